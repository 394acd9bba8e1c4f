"""What the agreement costs while nothing is wrong, and how soon all processes know of a notice and stop together.

    python -m benchmarks.agreement [--repeats 5] [--notices 20] [--json FILE]

Real JAX processes on this host, 2, 4 and 8 by turns. In each start, one after the other: sync points while nothing is
wrong, JAX's own (``multihost_utils.reached_preemption_sync_point``) in between; ``--notices`` notices, told by each
process in turn; and one SIGTERM, which JAX's own agreement takes. A notice is one that leaves no time, so that the
agreement begins at once. Quantiles are over all repeats: JAX's are of one moment for each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import Figure
from tests.multiprocess.launcher import Processes, close_nursery

#: A line with this in front holds what was measured.
MEASURED = "measured "
COUNTS = (2, 4, 8)
_IDLE_GOAL_NS = 1_000
_KNOWN_GOAL_MS = 5  # with so many processes, and half of the notices:
_KNOWN_GOAL_COUNT = 2
_START_TIMEOUT_S = 300.0
_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured with one number of processes.

    Attributes:
        idle_ns: A sync point while nothing is wrong, the mean of each block of calls.
        jax_idle_ns: The same of JAX's.
        known_ms: From a notice in one process until all know of it.
        stopped_ms: Until all are held at the agreed sync point.
        jax_stopped_ms: From a SIGTERM in one process until JAX's sync point is reached in all.
    """

    idle_ns: list[float]
    jax_idle_ns: list[float]
    known_ms: list[float]
    stopped_ms: list[float]
    jax_stopped_ms: list[float]

    def __add__(self, other: Measured) -> Measured:
        """Both."""
        return Measured(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="starts with each number of processes (%(default)s)")
    parser.add_argument("--notices", type=int, default=20, help="for each start (%(default)s)")
    flags = parser.parse_args()
    load = os.getloadavg()[0]  # before there is any of our own
    print(f"load average of the last minute: {load:.2f} on {os.cpu_count()} CPUs", flush=True)
    try:
        session_idle_ns: list[float] = []
        by_count = dict.fromkeys(COUNTS, Measured([], [], [], [], []))
        for repeat in range(1, flags.repeats + 1):
            print(f"repeat {repeat} of {flags.repeats}", flush=True)
            session_idle_ns += measure_session()
            by_count = {count: found + measure(count, flags.notices) for count, found in by_count.items()}
    finally:
        close_nursery()
    told = figures(by_count, session_idle_ns)
    report.publish(told, flags.json, load_average=load)
    return 1 if any(figure.met is False for figure in told) else 0


def figures(by_count: Mapping[int, Measured], session_idle_ns: Sequence[float]) -> list[Figure]:
    """What is told of the measurements; by number of processes."""
    told = [Figure("1 process: idle sync point of a session", statistics.median(session_idle_ns), "ns", _IDLE_GOAL_NS)]
    for count, found in by_count.items():
        idle = f"{count} processes: idle sync point of the agreement"
        told.append(Figure(idle, statistics.median(found.idle_ns), "ns", _IDLE_GOAL_NS))
        told.append(Figure(f"{count} processes: idle sync point, JAX's", statistics.median(found.jax_idle_ns), "ns"))
        for name, values_ms, goal_ms in (
            ("notice -> known to all", found.known_ms, _KNOWN_GOAL_MS if count == _KNOWN_GOAL_COUNT else None),
            ("notice -> all stopped", found.stopped_ms, None),
            ("SIGTERM -> all stopped, JAX's", found.jax_stopped_ms, None),
        ):
            named = f"{count} processes: {name}"
            told.append(Figure(f"{named}, p50", percentile(values_ms, 50), "ms", goal_ms))
            told.append(Figure(f"{named}, p99", percentile(values_ms, 99), "ms"))
    return told


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which so much lies, between two of them if need be; of a single value, that."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(count: int, notices: int) -> Measured:
    """One start of so many processes."""
    return Measured(**_run(_FOLDER / "agreement_process.py", count, str(notices)))


def measure_session() -> list[float]:
    """Nanoseconds of a session's sync point, by block of calls; in one process, as it asks nobody."""
    with tempfile.TemporaryDirectory() as folder:
        found: list[float] = _run(_FOLDER / "agreement_session.py", 1, folder)
    return found


def _run(script: Path, count: int, *arguments: str) -> Any:
    """What process 0 says it has measured."""
    with Processes.start(script, count, arguments=arguments, devices=1) as processes:
        results = processes.wait(_START_TIMEOUT_S)
    found = [line.removeprefix(MEASURED) for line in results[0].output.splitlines() if line.startswith(MEASURED)]
    if any(result.code for result in results) or len(found) != 1:
        raise RuntimeError(
            f"{script.name}: expected {count} processes to end with 0, the first with one line of figures, found "
            f"{[result.code for result in results]} and {len(found)} lines:\n{processes.output()}"
        )
    return json.loads(found[0])


if __name__ == "__main__":
    sys.exit(main())
