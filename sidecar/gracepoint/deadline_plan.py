"""What is done with the time that is left once all processes stand at the agreed sync point. Pure.

Every process tells the others its ``Situation``; ``merged`` makes one of all, the gloomiest in every figure, and
``plan`` chooses by it: the same input in all processes, the same choice. docs/deadline.md has the rules and a table.

Predictions are times of the whole gang. *Fits* means: times the margin.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Self, TypeVar

from gracepoint.errors import AgreementError

T = TypeVar("T", int, float)

#: Assumed until the first save was measured: what a slow network disk gives one process, and the fixed part of a
#: save. A guess, on the safe side; a first periodic save replaces it.
ASSUMED_BYTES_PER_S = 100e6
ASSUMED_FIXED_S = 1.0


class Choice(StrEnum):
    """What is done."""

    SAVE_NOW = "SaveNow"  # the current step is saved; nothing else is under way
    FINISH_IN_FLIGHT = "FinishInFlight"  # the save under way is finished, then the current step is saved
    CANCEL_AND_SAVE = "CancelAndSave"  # the save under way is stopped, and the current step is saved
    PROMOTE = "Promote"  # the newest snapshot in host memory is committed in place of the current step
    IMPOSSIBLE = "Impossible"  # by what is known nothing will be in time; as FINISH_IN_FLIGHT, there is nothing to lose


class SnapshotState(StrEnum):
    """Where a snapshot is, as far as is known."""

    WRITING = "writing"  # its save is under way
    COMMITTED = "committed"
    HELD = "held"  # its save failed or was stopped; the memory still has it
    GONE = "gone"  # ... and has it no longer


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewestSnapshot:
    """The newest snapshot in host memory.

    Attributes:
        step: That it is of.
        state: Where it is.
        done_bytes: Of one process's part of its save: on the disk.
        left_bytes: Not yet.
        elapsed_s: Since its save began.
    """

    step: int
    state: SnapshotState
    done_bytes: int
    left_bytes: int
    elapsed_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What one process knows, or all of them, at the agreed point.

    Attributes:
        step: The current one.
        left_s: Until everything must be done.
        state_bytes: The state, over all processes; None: not known yet.
        process_count: How many write.
        drain_s: What the steps in flight take.
        streamed_bytes_per_s: How fast emergencies have been, over all processes; None: there was none.
        snapshot_bytes_per_s: The same of saves from a snapshot.
        snapshot: The newest; None: there is none.
        margin: Factor on predictions.
    """

    step: int
    left_s: float
    state_bytes: int | None
    process_count: int
    drain_s: float
    streamed_bytes_per_s: float | None
    snapshot_bytes_per_s: float | None
    snapshot: NewestSnapshot | None
    margin: float

    @property
    def save_s(self) -> float:
        """What it takes to stream the current state to the disk."""
        return self._writing_s(self.streamed_bytes_per_s or self.snapshot_bytes_per_s)

    @property
    def rewrite_s(self) -> float:
        """What it takes to write a whole snapshot."""
        return self._writing_s(self.snapshot_bytes_per_s or self.streamed_bytes_per_s)

    @property
    def finish_s(self) -> float:
        """What the save under way still takes: by earlier saves or by its own pace, whichever is longer."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.state is not SnapshotState.WRITING:
            return 0.0
        total_bytes = snapshot.done_bytes + snapshot.left_bytes
        if total_bytes == 0:
            return 0.0
        left = snapshot.left_bytes / total_bytes
        # Of a save that has nothing on the disk after so long, no more is known than that it is slow.
        by_itself = snapshot.left_bytes / snapshot.done_bytes if snapshot.done_bytes else 1.0
        return max(self.rewrite_s * left, snapshot.elapsed_s * by_itself)

    def _writing_s(self, bytes_per_s: float | None) -> float:
        return 0.0 if self.state_bytes is None else writing_s(self.state_bytes, self.process_count, bytes_per_s)

    def to_json(self) -> str:
        """One line; a deadline that is not known is null."""
        left_s = self.left_s if math.isfinite(self.left_s) else None
        return json.dumps(dataclasses.asdict(self) | {"left_s": left_s})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what ``to_json`` of another process, of this same library, wrote."""
        found = json.loads(text)
        if found["left_s"] is None:
            found["left_s"] = math.inf
        if found["snapshot"] is not None:
            found["snapshot"] = NewestSnapshot(
                **found["snapshot"] | {"state": SnapshotState(found["snapshot"]["state"])}
            )
        return cls(**found)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done.

    Attributes:
        choice: Of all processes.
        step: That will be committed, if all goes as predicted.
        steps_lost: Completed steps that it lacks.
        reason: In one sentence.
    """

    choice: Choice
    step: int
    steps_lost: int
    reason: str


def writing_s(state_bytes: int, process_count: int, bytes_per_s: float | None) -> float:
    """What it takes to write a state at a rate, over all processes; None: at the assumed one."""
    if bytes_per_s is None:
        return ASSUMED_FIXED_S + state_bytes / (ASSUMED_BYTES_PER_S * process_count)
    return state_bytes / bytes_per_s


def merged(situations: Sequence[Situation]) -> Situation:
    """One situation of all processes', the worst of each figure.

    Raises:
        AgreementError: Their newest snapshots are of different steps, or not all have one.
    """
    first = situations[0]
    for process, other in enumerate(situations):
        mine, theirs = (None if s.snapshot is None else s.snapshot.step for s in (first, other))
        if mine != theirs:
            raise AgreementError(
                f"the newest snapshot of process 0 is of step {mine}, and that of process {process} of step {theirs}: "
                f"every process must pass the same sync points, with the same settings"
            )
    return dataclasses.replace(
        first,
        left_s=min(s.left_s for s in situations),
        drain_s=max(s.drain_s for s in situations),
        state_bytes=_of_known(max, [s.state_bytes for s in situations]),
        streamed_bytes_per_s=_of_known(min, [s.streamed_bytes_per_s for s in situations]),
        snapshot_bytes_per_s=_of_known(min, [s.snapshot_bytes_per_s for s in situations]),
        snapshot=_merged_snapshot(situations),
        margin=max(s.margin for s in situations),
    )


def plan(now: Situation) -> Plan:
    """Chooses: the current step wherever it fits, else an older one that does, else what may succeed all the same."""
    snapshot, left_s, margin = now.snapshot, now.left_s, now.margin
    writing = snapshot is not None and snapshot.state is SnapshotState.WRITING
    current_s, left = now.drain_s + now.save_s, f"{max(left_s, 0.0):.1f} s are left"
    save_alone = Choice.CANCEL_AND_SAVE if writing else Choice.SAVE_NOW

    def current(choice: Choice, reason: str) -> Plan:
        return Plan(choice, now.step, 0, reason)

    if now.state_bytes is None:
        return current(Choice.SAVE_NOW, f"step {now.step} is saved: nothing was measured yet, {left}")
    if snapshot is not None and snapshot.step == now.step:
        if writing:
            return current(Choice.FINISH_IN_FLIGHT, f"the save under way is of step {now.step} itself")
        if snapshot.state is SnapshotState.COMMITTED:
            return current(Choice.SAVE_NOW, f"step {now.step} is committed already")
    needs = f"step {now.step} needs {current_s:.1f} s to drain and save"
    if writing:
        assert snapshot is not None
        finish_s = now.finish_s
        both_s = max(finish_s, now.drain_s) + now.save_s  # the queue drains while the save under way goes on
        flight = f"the save of step {snapshot.step} under way another {finish_s:.1f} s"
        if margin * both_s <= left_s:
            return current(Choice.FINISH_IN_FLIGHT, f"{needs} and {flight}: there is time for both, {left}")
        if margin * current_s <= left_s:
            return current(Choice.CANCEL_AND_SAVE, f"{needs} and {flight}: there is no time for both, {left}")
        if margin * finish_s <= left_s and both_s <= left_s:
            return current(
                Choice.FINISH_IN_FLIGHT, f"{needs} and {flight}: both fit without margin, and that one is safe, {left}"
            )
        if margin * finish_s <= left_s:
            lost = now.step - snapshot.step
            return Plan(Choice.PROMOTE, snapshot.step, lost, f"{needs}, {flight}, {left}")
    elif margin * current_s <= left_s:
        return current(Choice.SAVE_NOW, f"{needs}, {left}")
    held = snapshot is not None and snapshot.state is SnapshotState.HELD and snapshot.step != now.step
    if snapshot is not None and held and margin * now.rewrite_s <= left_s:
        lost = now.step - snapshot.step
        again = f"the snapshot of step {snapshot.step}, whose save failed, {now.rewrite_s:.1f} s"
        return Plan(Choice.PROMOTE, snapshot.step, lost, f"{needs}, {again}, {left}")
    if current_s <= left_s:
        return current(save_alone, f"{needs}, which fits without margin, {left}")
    older_s = now.finish_s if writing else now.rewrite_s if held else math.inf
    if snapshot is not None and older_s <= left_s:
        lost, older = now.step - snapshot.step, f"the snapshot of step {snapshot.step} {older_s:.1f} s"
        return Plan(Choice.PROMOTE, snapshot.step, lost, f"{needs}, {older}, which fits without margin, {left}")
    return current(Choice.IMPOSSIBLE, f"{needs}, and nothing older can be had in time, {left}; tried all the same")


def _merged_snapshot(situations: Sequence[Situation]) -> NewestSnapshot | None:
    """The newest snapshot as the processes together know it: how its save ends, it ends in all."""
    for state in (SnapshotState.COMMITTED, SnapshotState.GONE, SnapshotState.HELD):
        for situation in situations:
            if situation.snapshot is not None and situation.snapshot.state is state:
                return situation.snapshot
    return max(situations, key=lambda s: s.finish_s).snapshot


def _of_known(choose: Callable[[Sequence[T]], T], values: Sequence[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None
