"""One process of ``benchmarks.emergency_save``: joins the others, saves again and again, and prints what that took.

    emergency_save_process.py JSON

JSON is a list of ``Place``; the last line printed is a list of ``Measured``, one for each. The writers take turns, and
all processes begin each turn together. Nothing else runs meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import emergency_save_writers as writers
from benchmarks.checkpoint_process import MEASURED, Together, forget_peak, large_state, resident_bytes, small_state
from benchmarks.emergency_save_trace import traced
from gracepoint.checkpoint.groups import GroupFactory
from tests.multiprocess.launcher import here

_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Place:
    """What is saved where, by whom.

    Attributes:
        root: Folder.
        writers: In the order in which they take turns.
        repeats: Turns of each.
        state_bytes: Of a state of large arrays; 0: of small ones.
        leaves: How many small ones.
        settle_s: Seconds between a deletion that was synced and the next save.
        warm: Each cold save is followed by one right after it was deleted.
        between: The first writer takes one more turn at the end, so that each turn of the others is between two of its
            turns.
        traced: Saves of Gracepoint after all turns, of which is told where their time goes.
    """

    root: str
    writers: list[str]
    repeats: int
    state_bytes: int = 0
    leaves: int = 0
    settle_s: float = 0.0
    warm: bool = False
    between: bool = False
    traced: int = 0


@dataclasses.dataclass
class Measured:
    """What one process measured in one place: seconds of each turn, by writer.

    Attributes:
        cold_s: Seconds after the save before it was deleted and synced.
        warm_s: Right after a deletion.
        extra_bytes: Largest resident memory above what there was before, with what stays reserved.
        mine_bytes: What this process writes.
        parts_s: Seconds of each part of each save that was traced.
    """

    cold_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    warm_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    mine_bytes: int = 0
    parts_s: list[dict[str, float]] = dataclasses.field(default_factory=list)


def main(places: list[Place]) -> None:
    here().initialize_jax()
    together = Together(GroupFactory().join(timeout_s=_TIMEOUT_S))
    found = [_measure(place, together) for place in places]
    print(MEASURED + json.dumps([dataclasses.asdict(measured) for measured in found]), flush=True)
    together.meet()


def _measure(place: Place, together: Together) -> Measured:
    state = large_state(place.state_bytes) if place.state_bytes else small_state(place.leaves)
    measured = Measured()
    made: dict[str, writers.Saves] = {}
    for name in place.writers:
        joined = GroupFactory().join(timeout_s=_TIMEOUT_S)  # anew, as an attempt has one Checkpointer
        root = Path(place.root, name.replace(", ", "-").replace(" ", "-"))
        together.first(functools.partial(root.mkdir, parents=True))
        before_bytes = resident_bytes()
        made[name] = writers.make(name, root, joined)
        made[name].prepare(state)
        measured.extra_bytes[name] = max(0, resident_bytes() - before_bytes)
        measured.mine_bytes = writers.mine_bytes(state, joined)
        measured.cold_s[name], measured.warm_s[name] = [], []
    reserved_bytes = dict(measured.extra_bytes)
    step = 0
    for name in [*place.writers * place.repeats, *place.writers[: 1 if place.between else 0]]:
        together.first(os.sync)
        time.sleep(place.settle_s)
        for times in (measured.cold_s, measured.warm_s)[: 1 + place.warm]:
            step += 1
            before_bytes = resident_bytes()
            forget_peak()
            times[name].append(_save(made[name], step, state, together))
            extra_bytes = reserved_bytes[name] + max(0, resident_bytes(peak=True) - before_bytes)
            measured.extra_bytes[name] = max(measured.extra_bytes[name], extra_bytes)
    for _ in range(place.traced):
        writer = made[writers.EXPRESS]
        assert isinstance(writer, writers.Gracepoint)
        together.first(os.sync)
        time.sleep(place.settle_s)
        step += 1
        measured.parts_s.append(_traced(writer, step, state, together))
    for writer in made.values():
        writer.close()
    return measured


def _traced(writer: writers.Gracepoint, step: int, state: Any, together: Together) -> dict[str, float]:
    """Saves, deletes what was saved, and returns where the time went."""
    together.meet()
    with traced() as trace:
        writer.on_stage = trace.on_stage
        path = writer.save(step, state)
    together.meet()
    together.first(lambda: shutil.rmtree(path))
    return trace.parts()


def _save(writer: writers.Saves, step: int, state: Any, together: Together) -> float:
    """Saves, deletes what was saved, and returns the seconds that the former took in this process."""
    left: list[Path] = []
    taken_s = together.timed(lambda: left.append(writer.save(step, state)))
    together.meet()
    path = left[0]
    if path.is_dir():
        together.first(lambda: shutil.rmtree(path))
    elif path.is_file():
        path.unlink()
    together.meet()
    return taken_s


if __name__ == "__main__":
    main([Place(**place) for place in json.loads(sys.argv[1])])
