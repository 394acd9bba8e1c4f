"""How long it takes until a state is durable, beside Orbax and the machine's own limits, all in the same run.

    python -m benchmarks.emergency_save [--mib 936] [--repeats 4] [--leaves 10000] [--leaves-repeats 2]
                                        [--shaped-mib 256] [--shaped-mib-per-s 100] [--processes-repeats 3]
                                        [--limit-repeats 6] [--limit-only] [--settle-s 3] [--directory DIR]
                                        [--memory DIR] [--json FILE]

Two JAX processes of four CPU devices each save a state at once, as in an emergency (``emergency_save_process``): to the
disk that ``--directory`` is on, to memory (``--memory``), and to a file system on that disk that is slow on purpose
(``emergency_save_stores``). The writers take turns. A turn's time is that of the process that took longest, a figure
the median over the turns; a ratio is the median of the ratios within each round of turns, as a shared machine's speed
changes. For the same reason, Gracepoint and the limit of the disk take turns of their own, and each of Gracepoint's
turns is compared with the two turns of the limit before and after it. What Orbax needs is told without a goal: how far
apart the two are depends on the disk. Where the time of a save goes is traced (``emergency_save_trace``).

"Cold" is ``--settle-s`` seconds after what was there before was deleted and synced, "warm" right after a deletion,
whose pages are used again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import emergency_save_process, report
from benchmarks.checkpoint_process import MEASURED
from benchmarks.emergency_save_process import Measured, Place
from benchmarks.emergency_save_stores import cannot_shape, shaped
from benchmarks.emergency_save_writers import EXPRESS, MEMCPY, ORBAX, ORBAX_PLAIN, TENSORSTORE, WRITE_LIMIT
from benchmarks.report import Better, Figure
from tests.multiprocess.launcher import Processes, close_nursery

_PROCESSES, _DEVICES = 2, 4
_DIRECTORY = Path(__file__).parents[1] / "build" / "benchmarks"
_TIMEOUT_S = 3600.0
_MIB = 1 << 20
_ALL = [WRITE_LIMIT, EXPRESS, TENSORSTORE, ORBAX_PLAIN, ORBAX, MEMCPY]
_LIMIT_GOAL = 1.15
_TRACED = 3
_EMERGENCIES = 10

Found = Sequence[Measured]  # by process


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--mib", type=int, default=936, help="the state of large arrays (%(default)s)")
    parser.add_argument("--repeats", type=int, default=4, help="saves of it by each writer, of each kind (%(default)s)")
    parser.add_argument("--leaves", type=int, default=10_000, help="the state of small arrays (%(default)s)")
    parser.add_argument("--leaves-repeats", type=int, default=2, help="the same of that (%(default)s)")
    parser.add_argument("--shaped-mib", type=int, default=256, help="the state for the slow store (%(default)s)")
    parser.add_argument("--shaped-mib-per-s", type=int, default=100, help="how slow that is (%(default)s)")
    parser.add_argument(
        "--processes-repeats", type=int, default=3, help="starts in which the first save is compared (%(default)s)"
    )
    parser.add_argument(
        "--limit-repeats", type=int, default=6, help="saves to the disk beside its limit, of each kind (%(default)s)"
    )
    parser.add_argument("--limit-only", action="store_true", help="measure the disk and its limit, and nothing else")
    parser.add_argument("--settle-s", type=float, default=3.0, help="before a cold save (%(default)s)")
    parser.add_argument("--directory", type=Path, default=_DIRECTORY, help="on the disk to measure (%(default)s)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs (%(default)s)")
    flags = parser.parse_args()
    # Otherwise a loop device would be left mounted, and held to its rate.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    load = os.getloadavg()[0]
    why_not = cannot_shape()
    flags.directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as until_told:
        top = Path(until_told.enter_context(tempfile.TemporaryDirectory(prefix="emergency-", dir=flags.directory)))
        memory = until_told.enter_context(tempfile.TemporaryDirectory(prefix="emergency-", dir=flags.memory))
        state_bytes = flags.mib * _MIB
        limit = Place(
            str(top / "limit"),
            [WRITE_LIMIT, EXPRESS],
            flags.limit_repeats,
            state_bytes=state_bytes,
            settle_s=flags.settle_s,
            warm=True,
            between=True,
            traced=_TRACED,
        )
        if flags.limit_only:
            until_told.callback(close_nursery)
            return _tell(flags, load, figures_of_limit(_run([limit])[0]))
        places = [
            limit,
            Place(
                str(top / "large"), _ALL[1:], flags.repeats, state_bytes=state_bytes, settle_s=flags.settle_s, warm=True
            ),
            Place(memory, _ALL, flags.repeats, state_bytes=state_bytes),
            Place(
                str(top / "small"),
                [EXPRESS, ORBAX_PLAIN, ORBAX],
                flags.leaves_repeats,
                leaves=flags.leaves,
                settle_s=flags.settle_s,
            ),
        ]
        if why_not is None:
            size_bytes = 2 * flags.shaped_mib * _MIB + (256 << 20)
            slow = until_told.enter_context(shaped(top, size_bytes, flags.shaped_mib_per_s * _MIB))
            places.append(
                Place(
                    str(slow / "large"),
                    [WRITE_LIMIT, EXPRESS, TENSORSTORE, ORBAX_PLAIN],
                    flags.repeats,
                    state_bytes=flags.shaped_mib * _MIB,
                )
            )
        until_told.callback(close_nursery)
        found = _run(places)
        emergencies = []
        for start in range(flags.processes_repeats):
            root = top / f"start{start}"
            turns = Place(str(root), [EXPRESS], _EMERGENCIES, state_bytes=state_bytes, settle_s=flags.settle_s / 3)
            emergencies.append(_run([turns])[0])
            shutil.rmtree(root)
    told = [
        *figures_of_limit(found[0]),
        *figures_of_disk(found[1]),
        *figures_of_memory(found[2]),
        *figures_of_slow(found[4] if why_not is None else None),
        *figures_of_leaves(found[3], flags.leaves),
        figure_of_first(emergencies),
        figure_of_extra_memory([*found[:3], *emergencies]),
    ]
    if why_not is not None:
        print(f"no slow store here: {why_not}")
    return _tell(flags, load, told)


def _tell(flags: argparse.Namespace, load: float, told: Sequence[Figure]) -> int:
    print(f"load average before: {load:.1f}")
    report.publish(told, flags.json, load_average=load)
    return 1 if any(figure.met is False for figure in told) else 0


def figures_of_limit(found: Found) -> list[Figure]:
    """Returns how Gracepoint compares with the limit of the disk, and where its time goes."""
    told = [Figure("written by each process", max(m.mine_bytes for m in found) / _MIB, "MiB")]
    for kind in ("cold", "warm"):
        turns = _turns(found, kind)
        told += [Figure(f"disk, {kind}: {name}", statistics.median(times), "s") for name, times in turns.items()]
        ratios = between(turns[WRITE_LIMIT], turns[EXPRESS])
        name = f"disk, {kind}: express writer / writing the same bytes"
        told.append(Figure(name, statistics.median(ratios), "", _LIMIT_GOAL))
        told += [Figure(f"{name}, least", min(ratios), ""), Figure(f"{name}, most", max(ratios), "")]
    for part in found[0].parts_s[0]:
        of_saves = [max(m.parts_s[number][part] for m in found) for number in range(len(found[0].parts_s))]
        told.append(Figure(f"trace: {part}", statistics.median(of_saves), "s"))
    return told


def between(limit: Sequence[float], turns: Sequence[float]) -> list[float]:
    """Returns the ratio of each turn to the mean of the limit's turns before and after it."""
    return [2 * turn / (before + after) for turn, before, after in zip(turns, limit, limit[1:], strict=False)]


def figures_of_disk(found: Found) -> list[Figure]:
    """Returns the figures of the disk beside Orbax."""
    told = []
    for kind in ("cold", "warm"):
        turns = _turns(found, kind)
        told += [Figure(f"disk, {kind}: {name}", statistics.median(turns[name]), "s") for name in turns]
        told.append(_ahead(f"disk, {kind}", turns, None))
    return told


def figures_of_memory(found: Found) -> list[Figure]:
    """Returns the figures of a file system in memory."""
    turns = _turns(found, "cold")
    told = [Figure(f"memory: {name}", statistics.median(turns[name]), "s") for name in _ALL]
    return [*told, _ahead("memory", turns, None)]


def figures_of_slow(found: Found | None) -> list[Figure]:
    """Returns the figures of the store that is slow on purpose; None: there was none."""
    name = "slow store: express writer / writing the same bytes"
    if found is None:
        return [Figure(name, None, "", 1.1)]
    turns = _turns(found, "cold")
    told = [Figure(f"slow store: {writer}", statistics.median(times), "s") for writer, times in turns.items()]
    return [*told, Figure(name, _ratio(turns[EXPRESS], turns[WRITE_LIMIT]), "", 1.1)]


def figures_of_leaves(found: Found, leaves: int) -> list[Figure]:
    """Returns the figures of many small arrays."""
    turns = _turns(found, "cold")
    told = [Figure(f"{leaves} leaves: {name}", statistics.median(times), "s") for name, times in turns.items()]
    return [*told, _ahead(f"{leaves} leaves", turns, 1.5)]


def figure_of_first(starts: Sequence[Found]) -> Figure:
    """Returns how the first save of a process compares with its tenth."""
    turns = [_turns(found, "cold")[EXPRESS] for found in starts]
    return Figure("first save of a process / tenth", statistics.median(t[0] / t[-1] for t in turns), "", 1.1)


def figure_of_extra_memory(found: Sequence[Found]) -> Figure:
    """Returns how much memory the express writer took at most."""
    most_bytes = max(measured.extra_bytes[EXPRESS] for of_place in found for measured in of_place)
    return Figure("extra memory of a process, express writer", most_bytes / _MIB, "MiB", 64)


def _ahead(what: str, turns: dict[str, list[float]], goal: float | None) -> Figure:
    ratio = _ratio(turns[ORBAX_PLAIN], turns[EXPRESS])
    return Figure(f"{what}: Orbax, not compressed / express writer", ratio, "", goal, Better.MORE)


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(these, those, strict=True))


def _turns(found: Found, kind: str) -> dict[str, list[float]]:
    """Returns each turn's time by writer, that of the process that took longest."""
    of_processes = [measured.cold_s if kind == "cold" else measured.warm_s for measured in found]
    return {
        name: [max(times) for times in zip(*(of_process[name] for of_process in of_processes), strict=True)]
        for name in of_processes[0]
    }


def _run(places: Sequence[Place]) -> list[Found]:
    """Returns what the processes measured in each place."""
    script = Path(emergency_save_process.__file__)
    # Compiled as in any program, unlike in tests, as Orbax compiles when it saves.
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES}"}
    arguments = [json.dumps([dataclasses.asdict(place) for place in places])]
    with Processes.start(script, _PROCESSES, arguments=arguments, environment=flags) as processes:
        results = processes.wait(_TIMEOUT_S)
    if any(result.code for result in results):
        raise RuntimeError("\n".join(f"--- ended with {result.code}\n{result.output}" for result in results))
    lines = [next(line for line in r.output.splitlines() if line.startswith(MEASURED)) for r in results]
    of_processes = [[Measured(**m) for m in json.loads(line.removeprefix(MEASURED))] for line in lines]
    return [list(of_place) for of_place in zip(*of_processes, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
