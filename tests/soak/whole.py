"""A whole soak: makes a cluster, installs the operator, disrupts a job as planned, and removes the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from demo import install
from tests import testcluster
from tests.soak.plan import Disruption
from tests.soak.report import Found, rendered
from tests.soak.runner import Soak

#: Where logs, objects and accounts of the newest soak are.
LOGS = Path(__file__).parents[2] / "build" / "soak"


def run(plan: Sequence[Disruption], *, seed: int, say: Callable[[str], None], minutes: float | None = None) -> Found:
    """Runs a soak on a cluster of its own.

    Args:
        plan: What happens.
        seed: Of the plan, for the report.
        say: Where news go. If the soak is interrupted, also what it has found so far.
        minutes: The first disruption that begins after so many minutes is the last one. None: all of them come.

    Raises:
        ClusterError: The job did not come back, or did not end; or there is no cluster.
    """
    with testcluster.open(nodes=2) as cluster:
        images = install.build_images(cluster, say)
        install.install_operator(cluster, images.operator)
        until_s = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        soak = Soak(cluster, images, plan, seed=seed, say=say, logs=LOGS)
        try:
            return soak.run(until_s=until_s)
        except BaseException:
            say(f"interrupted; found until here:\n{rendered(soak.found())}")
            raise
