"""Disrupts one training job on a real cluster again and again, at random, in every way, and counts what that costs.

    python -m tests.soak [--disruptions 100] [--seed N] [--minutes M] [--kinds taint drain ...] [--json FILE]

The job trains two processes. After each disruption it must train again; if it got a notice, it must have lost no step,
and the restart must not count. In the end its losses and parameters must be those of a run that nobody disturbed, bit
for bit, and nothing of it may be left. The operator's account of its time is compared with one by the trainers' own
records. Ends with 1 if any of that does not hold. Logs are in build/soak.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import time
from pathlib import Path

from demo import install
from demo.narrator import Narrator
from tests import testcluster
from tests.soak.kinds import KINDS
from tests.soak.plan import SPACING, plan
from tests.soak.report import rendered
from tests.soak.runner import Soak
from tests.testcluster.api import ClusterError

_LOGS = Path(__file__).parents[2] / "build" / "soak"


def main() -> int:
    """Runs a soak; returns 1 if something was found that must not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disruptions", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="what the plan is made from (default: any)")
    parser.add_argument("--spacing", type=int, default=SPACING, help="most steps between two (%(default)s)")
    parser.add_argument("--minutes", type=float, default=None, help="begin no disruption after so many of the run")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="only these")
    parser.add_argument("--json", type=Path, default=None, help="write what was found into this file")
    flags = parser.parse_args()
    seed = secrets.randbelow(10**6) if flags.seed is None else flags.seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the cluster is removed, and the report printed
    say = Narrator()
    say(f"seed {seed}")
    made = plan(seed, flags.disruptions, flags.kinds, spacing=flags.spacing)
    try:
        with testcluster.open(nodes=2) as cluster:
            images = install.build_images(cluster, say)
            install.install_operator(cluster, images.operator)
            until_s = float("inf") if flags.minutes is None else time.monotonic() + 60 * flags.minutes
            soak = Soak(cluster, images, made, seed=seed, say=say, logs=_LOGS)
            try:
                found = soak.run(until_s=until_s)
            except BaseException:
                print(rendered(soak.found()))
                raise
    except (ClusterError, KeyboardInterrupt) as error:
        say(f"stopped, with seed {seed}: {error or 'interrupted'}\nlogs are in {_LOGS}")
        return 1
    print(rendered(found))
    if flags.json is not None:
        flags.json.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
