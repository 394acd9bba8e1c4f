"""One process for ``benchmarks.agreement``: what a sync point of a whole session costs while nothing is wrong.

Argument: a folder for checkpoints, which stays empty. Prints nanoseconds, of blocks of calls.
"""

from __future__ import annotations

import itertools
import json
import sys

import gracepoint
from benchmarks.agreement import MEASURED
from benchmarks.agreement_process import measure_calls


def main() -> None:
    """Measures, and prints it."""
    with gracepoint.attach(sys.argv[1]) as session:
        call = "reached(next(steps))"
        durations_ns: dict[str, list[float]] = {call: []}
        measure_calls(durations_ns, {"reached": session.reached_preemption, "steps": itertools.count(1)})
    print(MEASURED + json.dumps(durations_ns[call]))


if __name__ == "__main__":
    main()
