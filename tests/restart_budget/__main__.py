"""Counts what uses up a workload's restarts, with real controllers.

    python -m tests.restart_budget [--times 4] [--json FILE]

Each kind of failure of the infrastructure happens several times: no restart may count, and the operator must have named
each within half a minute. Each kind of error of a program happens several times: each must count, and a loop of them
must end as the user wrote. Ends with 1 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.restart_budget.control_plane import missing, open_control_plane
from tests.restart_budget.kinds import INFRASTRUCTURE, PROGRAM
from tests.restart_budget.runs import LOOP, Outcome, run, run_loops
from tests.testcluster import parts
from tests.testcluster.api import ClusterError
from tests.testcluster.shell import say

_JSON = Path(__file__).parents[2] / "build" / "restart-budget.json"


def main() -> int:
    """Runs all kinds; returns 1 if something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=4, help="how often each kind happens (%(default)s)")
    parser.add_argument("--kinds", nargs="+", default=[], help="only kinds whose names contain one of these texts")
    parser.add_argument("--json", type=Path, default=_JSON, help="where the outcomes are written (%(default)s)")
    flags = parser.parse_args()
    if reason := missing():
        say(reason)
        return 1
    kinds = [
        kind
        for kind in (*INFRASTRUCTURE, *PROGRAM)
        if not flags.kinds or any(text in kind.name for text in flags.kinds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with open_control_plane(Path(folder)) as plane:
                outcomes = run(plane, kinds, flags.times, say)
                outcomes += [] if flags.kinds else run_loops(plane, say)
        except ClusterError as error:
            say(str(error))
            return 1
    print(table(outcomes))
    flags.json.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: parts.part(name).version for name in ("kubernetes", "jobset")}
    flags.json.write_text(
        json.dumps({"versions": versions, "failures": [dataclasses.asdict(each) for each in outcomes]}, indent=2) + "\n"
    )
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each kind, and what came of all together."""
    lines = ["| failure | times | counted | named after at most | said | problems |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(outcome.kind for outcome in outcomes):
        of_kind = [outcome for outcome in outcomes if outcome.kind == name]
        named = [outcome.named_s for outcome in of_kind if outcome.named_s is not None]
        problems = "; ".join(dict.fromkeys(outcome.problem for outcome in of_kind if outcome.problem))
        last = f"{max(named):.1f} s" if named else "–"
        counted = sum(outcome.counted for outcome in of_kind)
        lines.append(f"| {name} | {len(of_kind)} | {counted} | {last} | {of_kind[0].said[:80]} | {problems[:200]} |")
    for title, infrastructure in (("failures of the infrastructure", True), ("errors of the program", False)):
        of_kinds = [outcome for outcome in outcomes if not outcome.kind.startswith(LOOP)]
        chosen = [outcome for outcome in of_kinds if outcome.infrastructure is infrastructure]
        lines.append(f"{len(chosen)} {title}: {sum(outcome.counted for outcome in chosen)} counted")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
