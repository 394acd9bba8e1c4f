"""Saving and restoring, beside Orbax in the same run: how long training is blocked, and how far from the limits it is.

    python -m benchmarks.checkpoint [--mib 512] [--repeats 10] [--leaves 10000] [--leaves-repeats 2]
                                    [--directory DIR] [--json FILE]

Two JAX processes of four CPU devices each save a state of large arrays and one of many small ones to the disk that
``--directory`` is on, and restore them (``checkpoint_process``). The engines take turns. A turn's time is that of the
process that took longest, a figure the median over the turns. The processes print what they measured when all is done;
this one only waits for them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import checkpoint_process, report
from benchmarks.checkpoint_engines import GRACEPOINT, NAMES, ORBAX, ORBAX_PLAIN
from benchmarks.checkpoint_process import MEASURED, Measured
from benchmarks.report import Figure
from tests.multiprocess.launcher import Processes, close_nursery

_PROCESSES, _DEVICES = 2, 4
_DIRECTORY = Path(__file__).parents[1] / "build" / "benchmarks"
_TIMEOUT_S = 3600.0
_MIB = 1 << 20

_BLOCKED_GOAL = 1.2
_FIRST_GOAL = 1.1
_MEMORY_GOAL = 1.1
_READ_GOAL = 1.1
_AHEAD_GOAL = 1.0


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="the state of large arrays (%(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="saves and restores of it by each engine (%(default)s)")
    parser.add_argument("--leaves", type=int, default=10_000, help="the state of small arrays (%(default)s)")
    parser.add_argument("--leaves-repeats", type=int, default=2, help="the same of that (%(default)s)")
    parser.add_argument("--directory", type=Path, default=_DIRECTORY, help="on the disk to measure (%(default)s)")
    flags = parser.parse_args()
    if flags.repeats < 2:
        parser.error("--repeats: expected at least 2, as the first save is compared with the others")
    load = os.getloadavg()[0]
    found = measure(flags.directory, flags.mib * _MIB, flags.repeats, flags.leaves, flags.leaves_repeats)
    told = [
        *figures_of_large([large for large, _ in found]),
        *figures_of_small([small for _, small in found], flags.leaves),
    ]
    print(f"load average before: {load:.1f}")
    report.publish(told, flags.json, load_average=load)
    return 1 if any(figure.met is False for figure in told) else 0


def measure(
    directory: Path, state_bytes: int, repeats: int, leaves: int, leaves_repeats: int
) -> list[tuple[Measured, Measured]]:
    """Returns what each process measured with large arrays, and with small ones."""
    directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=directory))
    arguments = [str(root), *map(str, (state_bytes, repeats, leaves, leaves_repeats))]
    script = Path(checkpoint_process.__file__)
    # Compiled as in any program, unlike in tests, as Orbax compiles when it saves.
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES}"}
    try:
        with Processes.start(script, _PROCESSES, arguments=arguments, environment=flags) as processes:
            results = processes.wait(_TIMEOUT_S)
    finally:
        close_nursery()
        shutil.rmtree(root, ignore_errors=True)
    if any(result.code for result in results):
        raise RuntimeError("\n".join(f"--- ended with {result.code}\n{result.output}" for result in results))
    return [_measured(result.output) for result in results]


def _measured(output: str) -> tuple[Measured, Measured]:
    line = next(line for line in output.splitlines() if line.startswith(MEASURED))
    large, small = json.loads(line.removeprefix(MEASURED))
    return Measured(**large), Measured(**small)


def figures_of_large(found: Sequence[Measured]) -> list[Figure]:
    """Returns the figures of the state of large arrays."""
    blocked, committed, restored = (
        _by_engine(found, "blocked_s"),
        _by_engine(found, "committed_s"),
        _by_engine(found, "restore_s"),
    )
    memcpy_s, read_s = _slowest([m.memcpy_s for m in found]), _slowest([m.read_s for m in found])
    extra_bytes = {name: max(m.extra_bytes[name] for m in found) for name in NAMES}
    later = {name: statistics.median(turns[1:]) for name, turns in blocked.items()}
    snapshot_bytes = max(m.memcpy_bytes for m in found)
    return [
        Figure("copied by each process", snapshot_bytes / _MIB, "MiB"),
        Figure("memcpy of it", _median(memcpy_s), "s"),
        *(Figure(f"save blocks training, {name}", _median(blocked[name]), "s") for name in NAMES),
        Figure("save blocks training / memcpy", _median(blocked[GRACEPOINT]) / _median(memcpy_s), "", _BLOCKED_GOAL),
        Figure("before training: memory reserved", max(m.prepare_s[GRACEPOINT] for m in found), "s"),
        *(Figure(f"first save blocks training, {name}", blocked[name][0], "s") for name in NAMES),
        Figure("first save / later ones", blocked[GRACEPOINT][0] / later[GRACEPOINT], "", _FIRST_GOAL),
        *(Figure(f"save until committed, {name}", _median(committed[name]), "s") for name in NAMES),
        _ahead("save until committed", committed),
        *(Figure(f"extra memory of a process, {name}", extra_bytes[name] / _MIB, "MiB") for name in NAMES),
        Figure("extra memory / what it copies", extra_bytes[GRACEPOINT] / snapshot_bytes, "", _MEMORY_GOAL),
        Figure("read by each process for a restore", max(m.read_bytes for m in found) / _MIB, "MiB"),
        Figure("reading it with plain threads, cold", _median(read_s), "s"),
        *(Figure(f"restore, cold, {name}", _median(restored[name]), "s") for name in NAMES),
        Figure("restore / plain reading", _median(restored[GRACEPOINT]) / _median(read_s), "", _READ_GOAL),
    ]


def figures_of_small(found: Sequence[Measured], leaves: int) -> list[Figure]:
    """Returns the figures of the state of so many small arrays."""
    told = []
    for key, what in (
        ("blocked_s", "save blocks training"),
        ("committed_s", "save until committed"),
        ("restore_s", "restore, cold"),
    ):
        turns = _by_engine(found, key)
        told += [Figure(f"{leaves} leaves: {what}, {name}", _median(turns[name]), "s") for name in NAMES]
        told.append(_ahead(f"{leaves} leaves: {what}", turns))
    return told


def _ahead(what: str, turns: Mapping[str, Sequence[float]]) -> Figure:
    best = min(_median(turns[ORBAX]), _median(turns[ORBAX_PLAIN]))
    return Figure(f"{what} / the better of Orbax", _median(turns[GRACEPOINT]) / best, "", _AHEAD_GOAL)


def _by_engine(found: Sequence[Measured], key: str) -> dict[str, list[float]]:
    """Returns the turns of each engine."""
    return {name: _slowest([getattr(measured, key)[name] for measured in found]) for name in NAMES}


def _slowest(of_processes: Sequence[Sequence[float]]) -> list[float]:
    """Returns each turn's time, that of the process that took longest."""
    return [max(times) for times in zip(*of_processes, strict=True)]


def _median(turns: Sequence[float]) -> float:
    return statistics.median(turns)


if __name__ == "__main__":
    sys.exit(main())
