"""How long a save that is under way goes on after it was told to stop.

    python -m benchmarks.cancel [--mib 256] [--repeats 5] [--shaped-mib-per-s 100] [--directory DIR] [--json FILE]

One process of four CPU devices saves a state in the background, again and again, and stops each save when some of it is
on the disk: as a preemption does that has no time for it. A turn's time counts from the call of ``stop`` to the end of
the save's thread, after which nothing stands in the way of the next save; and until the last of its files is closed,
after which nothing more is written. A figure is the longest of all turns.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.emergency_save_stores import cannot_shape, shaped
from benchmarks.report import Figure

# Before the first import of JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

from benchmarks.checkpoint_process import large_state
from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.process_group import SingleProcess

_DIRECTORY = Path(__file__).parents[1] / "build" / "benchmarks"
_MIB = 1 << 20
_TIMEOUT_S = 300.0
_GOAL_S = 0.1
_LOOK_S = 0.0005
_WRITERS = {"express writer": True, "TensorStore writer": False}


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--mib", type=int, default=256, help="the state (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind (%(default)s)")
    parser.add_argument("--shaped-mib-per-s", type=int, default=100, help="of a slow store (%(default)s)")
    parser.add_argument("--directory", type=Path, default=_DIRECTORY, help="on the disk to measure (%(default)s)")
    flags = parser.parse_args()
    load, why_not = os.getloadavg()[0], cannot_shape()
    flags.directory.mkdir(parents=True, exist_ok=True)
    told: list[Figure] = []
    with contextlib.ExitStack() as until_told:
        places = {"disk": Path(until_told.enter_context(tempfile.TemporaryDirectory(dir=flags.directory)))}
        if why_not is None:
            size_bytes = (flags.repeats + 2) * 2 * flags.mib * _MIB
            places["slow store"] = until_told.enter_context(
                shaped(flags.directory, size_bytes, flags.shaped_mib_per_s * _MIB)
            )
        state = large_state(flags.mib * _MIB)
        for place, folder in places.items():
            for writer, express in _WRITERS.items():
                turns = _stop_saves(folder / writer.replace(" ", "-"), state, express, flags.repeats)
                told += figures(f"{place}, {writer}", turns)
    print(f"load average before: {load:.1f}")
    if why_not is not None:
        print(f"no slow store here: {why_not}")
    report.publish(told, flags.json, load_average=load)
    return 1 if any(figure.met is False for figure in told) else 0


def figures(what: str, turns: list[tuple[float, float]]) -> list[Figure]:
    """Returns what is told of the turns: seconds until the save's thread had ended, and its files were closed."""
    return [
        Figure(f"{what}: stop until it has ended", max(ended_s for ended_s, _ in turns), "s", _GOAL_S),
        Figure(f"{what}: stop until its files are closed", max(written_s for _, written_s in turns), "s"),
    ]


def _stop_saves(root: Path, state: object, express: bool, repeats: int) -> list[tuple[float, float]]:
    checkpointer = StepCheckpointer(
        Layout(storage_path(root)),
        gang=SingleProcess(),
        attempt="benchmark",
        settings=SaveSettings(WriteOptions(express=express)),
    )
    checkpointer.prepare(state)
    turns = []
    for step in range(1, repeats + 1):
        checkpointer.save_in_background(step, state, {})
        while (newest := checkpointer.executor.newest_snapshot) is None or newest.done_bytes == 0:
            time.sleep(_LOOK_S)
        began_s = time.monotonic()
        checkpointer.executor.stop("it is measured how long that takes")
        while checkpointer.executor.is_busy(_LOOK_S):
            pass
        ended_s = time.monotonic()
        while _is_written_to(root):
            time.sleep(_LOOK_S)
        turns.append((ended_s - began_s, time.monotonic() - began_s))
    checkpointer.close(_TIMEOUT_S)
    return turns


def _is_written_to(root: Path) -> bool:
    """True while this process has a file open there."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{root}/"):
                return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
