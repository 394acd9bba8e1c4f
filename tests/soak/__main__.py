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
from pathlib import Path

from demo.narrator import Narrator
from tests.soak import whole
from tests.soak.kinds import KINDS
from tests.soak.plan import SPACING, plan
from tests.soak.report import rendered
from tests.testcluster.api import ClusterError


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
    signal.signal(signal.SIGTERM, _interrupt)
    say = Narrator()
    say(f"seed {seed}")
    made = plan(seed, flags.disruptions, flags.kinds, spacing=flags.spacing)
    try:
        found = whole.run(made, seed=seed, say=say, minutes=flags.minutes)
    except (ClusterError, KeyboardInterrupt) as error:
        say(f"stopped, with seed {seed}: {error}\nlogs are in {whole.LOGS}")
        return 1
    print(rendered(found))
    if flags.json is not None:
        flags.json.write_text(json.dumps(found.to_json(), indent=2) + "\n")
    return 1 if found.problems else 0


def _interrupt(number: int, frame: object) -> None:
    """Lets the report be printed and the cluster be removed, undisturbed by a second signal."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt("interrupted")


if __name__ == "__main__":
    sys.exit(main())
