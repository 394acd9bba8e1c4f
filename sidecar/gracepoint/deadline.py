"""The time that is left: deadlines, pauses before another attempt, and what to save before a preemption's deadline.

A ``Deadline`` is handed down to whatever does the work. It may move to an earlier time: a preemption's does when a
nearer notice comes, and any thread may cancel a deadline. So work asks ``remaining_s`` repeatedly instead of keeping a
number of seconds, and a wait for a condition goes through ``wait_for``, which checks the deadline every
``_LOOK_EVERY_S``. A deadline never moves to a later time: when a preemption is over, its ``left_s`` becomes infinite,
and other threads may still work for it then.

``Backoff`` is how long the library waits between attempts, everywhere.

``plan`` chooses what to save in the time that is left once all processes are at the agreed sync point. Every process
sends the others its ``Situation``. ``merged`` combines them, taking the worst of each figure, and ``plan`` chooses by
the result. All processes have the same input, so they make the same choice. docs/deadline.md has the rules and a table.
Predictions are for all processes together. A save *fits* if its predicted duration times the margin is left. All of
this is pure.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Self, TypeVar

from gracepoint.errors import SaveFailed

_LOOK_EVERY_S = 0.05
_JITTER = 0.9
#: Not the generator of ``random`` itself: the training script may have seeded that one.
_random = random.Random()


def jittered(pause_s: float, jitter: float) -> float:
    """Returns a pause that differs from ``pause_s`` by up to the part ``jitter``, so that pods do not act together."""
    return pause_s * _random.uniform(1 - jitter, 1 + jitter)


class Backoff:
    """Pauses between tries that fail. They double, and are random, so that many pods do not try at the same time.

    It belongs to one thread.

    Args:
        first_s: Upper limit of the first pause, in seconds.
        most_s: Upper limit of all pauses, in seconds.
        jitter: The part by which a pause may be shorter than its upper limit.
    """

    def __init__(self, first_s: float, most_s: float, *, jitter: float = _JITTER) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._jitter = jitter
        self._failures = 0

    def next_s(self, most_s: float = math.inf) -> float:
        """Returns the next pause in seconds.

        Args:
            most_s: Upper limit of this pause.
        """
        longest_s = min(most_s, self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return longest_s * _random.uniform(1 - self._jitter, 1)

    def reset(self) -> None:
        """Starts over at ``first_s``. Call it after a success."""
        self._failures = 0


class Deadline:
    """A point in time after which work must stop. The clock is injected.

    Args:
        timeout_s: Seconds from now until the deadline.
        clock: Returns monotonic seconds.
        left_s: Returns the seconds that are left now. The deadline is the earliest point in time that it ever gave.
            None if the deadline is fixed.

    Attributes:
        timeout_s: Seconds from the making of this object to the deadline.
        clock: Returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float], left_s: Callable[[], float] | None = None) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self._started_s = clock()
        self._left_s = left_s
        self._until_s = self._started_s + timeout_s
        self._cancelled: str | None = None  # the reason; written once

    @classmethod
    def after(cls, timeout_s: float, clock: Callable[[], float]) -> Deadline:
        """Returns a fixed deadline, ``timeout_s`` from now."""
        return cls(timeout_s, clock)

    @classmethod
    def following(cls, left_s: Callable[[], float], clock: Callable[[], float]) -> Deadline:
        """Returns a deadline that moves to an earlier time when ``left_s`` says so: any thread may ask it."""
        return cls(left_s(), clock, left_s)

    def elapsed_s(self) -> float:
        """Returns the seconds since the deadline was made."""
        return self.clock() - self._started_s

    def remaining_s(self) -> float:
        """Returns the seconds that are left: at least 0, and 0 once the deadline is cancelled."""
        if self._cancelled is not None:
            return 0.0
        now_s = self.clock()
        if self._left_s is not None:
            self._until_s = min(self._until_s, now_s + self._left_s())
        return max(0.0, self._until_s - now_s)

    def passed(self) -> bool:
        """Returns True if no time is left."""
        return self.remaining_s() == 0

    def part(self, fraction: float) -> Deadline:
        """Returns a fixed deadline after ``fraction`` of the time that is left until this one."""
        return Deadline.after(self.remaining_s() * fraction, self.clock)

    def cancel(self, reason: str) -> None:
        """Makes whatever works until this deadline stop now. Any thread may call it; the first reason is kept."""
        if self._cancelled is None:
            self._cancelled = reason

    @property
    def cancelled(self) -> bool:
        """True once ``cancel`` was called."""
        return self._cancelled is not None

    @property
    def ended(self) -> str:
        """How the deadline ended, for messages: ``within 3.0 s``, or ``before it was stopped: ...``."""
        if self._cancelled is not None:
            return f"before it was stopped: {self._cancelled}"
        return f"within {self.elapsed_s() if self._left_s is not None else self.timeout_s:.1f} s"

    def check_not_cancelled(self) -> None:
        """Raises SaveFailed if the deadline is cancelled. Called where work can stop, between two chunks."""
        if self._cancelled is not None:
            raise SaveFailed(f"not done {self.ended}")

    def check(self) -> None:
        """Raises SaveFailed if no time is left."""
        if self.passed():
            raise SaveFailed(f"not done {self.ended}")

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        """Waits on a condition that the caller holds, until the predicate is true or the deadline has passed.

        Returns:
            The predicate's last value.
        """
        while not predicate():
            left_s = self.remaining_s()
            if left_s == 0:
                return False
            condition.wait(min(left_s, _LOOK_EVERY_S))
        return True


T = TypeVar("T", int, float)

#: Assumed until a save was measured: the throughput of a slow network disk for one process, and the fixed part of a
#: save. A cautious guess; the first periodic save replaces it.
ASSUMED_BYTES_PER_S = 100e6
ASSUMED_FIXED_S = 1.0


class Choice(StrEnum):
    """What the processes do."""

    SAVE_NOW = "SaveNow"  # the current step is saved; nothing else is in progress
    FINISH_IN_FLIGHT = "FinishInFlight"  # the save in progress is finished, then the current step is saved
    CANCEL_AND_SAVE = "CancelAndSave"  # the save in progress is stopped, and the current step is saved
    PROMOTE = "Promote"  # the newest snapshot in host memory is committed in place of the current step
    EVACUATE = "Evacuate"  # the current step is sent to the snapshot servers of nodes that stay
    #: Nothing is predicted to be done in time. Done as FINISH_IN_FLIGHT, as nothing is lost by trying.
    IMPOSSIBLE = "Impossible"


class SnapshotState(StrEnum):
    """How far the save of a snapshot is, as far as a process knows."""

    WRITING = "writing"  # its save is in progress
    COMMITTED = "committed"  # its step, or a newer one
    HELD = "held"  # its save failed or was stopped, and host memory still has the snapshot
    GONE = "gone"  # its save failed or was stopped, and host memory does not have the snapshot any more


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewestSnapshot:
    """The newest snapshot in host memory.

    Attributes:
        step: The snapshot's step.
        state: How far its save is.
        done_bytes: Bytes of this process's part that are written.
        left_bytes: Bytes of this process's part that are not yet written.
        elapsed_s: Seconds since its save began.
    """

    step: int
    state: SnapshotState
    done_bytes: int
    left_bytes: int
    elapsed_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evacuation:
    """What a process would send to the memory of nodes that stay.

    Attributes:
        part_bytes: Bytes of this process's part, which goes to each server.
        copies: How many servers it may be sent to.
        bytes_per_s: Bytes per second that this process has sent, to all servers together. None: none was measured.
    """

    part_bytes: int
    copies: int
    bytes_per_s: float | None

    @property
    def send_s(self) -> float:
        """Predicted seconds to send the part to all servers."""
        return writing_s(self.part_bytes * self.copies, 1, self.bytes_per_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What one process, or all of them, know at the agreed sync point.

    Attributes:
        step: The current step.
        left_s: Seconds until everything must be done. Infinite if no deadline is known.
        state_bytes: Bytes of the state over all processes. None if that is not known yet.
        process_count: How many processes write.
        drain_s: Predicted seconds for the steps in flight.
        streamed_bytes_per_s: Bytes per second of earlier emergency saves, over all processes. None if there was none.
        snapshot_bytes_per_s: Bytes per second of earlier saves from a snapshot. None if there was none.
        snapshot: The newest snapshot in host memory. None if there is none.
        margin: Factor on predictions.
        evacuation: What would be sent to the memory of other nodes. None: a process has no server to send to.
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
    evacuation: Evacuation | None = None

    @property
    def save_s(self) -> float:
        """Predicted seconds to write the current state from the devices."""
        return self._writing_s(self.streamed_bytes_per_s or self.snapshot_bytes_per_s)

    @property
    def rewrite_s(self) -> float:
        """Predicted seconds to write a whole snapshot."""
        return self._writing_s(self.snapshot_bytes_per_s or self.streamed_bytes_per_s)

    @property
    def finish_s(self) -> float:
        """Predicted seconds until the save in progress ends: by earlier saves or its own pace, whichever is longer."""
        snapshot = self.snapshot
        if snapshot is None or snapshot.state is not SnapshotState.WRITING:
            return 0.0
        total_bytes = snapshot.done_bytes + snapshot.left_bytes
        if total_bytes == 0:
            return 0.0
        share = snapshot.left_bytes / total_bytes
        # If a save has written nothing yet, all that is known is that it takes as long again.
        by_itself = snapshot.left_bytes / snapshot.done_bytes if snapshot.done_bytes else 1.0
        return max(self.rewrite_s * share, snapshot.elapsed_s * by_itself)

    def _writing_s(self, bytes_per_s: float | None) -> float:
        return 0.0 if self.state_bytes is None else writing_s(self.state_bytes, self.process_count, bytes_per_s)

    def to_json(self) -> str:
        """Returns one line of JSON. An infinite ``left_s`` is null."""
        left_s = self.left_s if math.isfinite(self.left_s) else None
        return json.dumps(dataclasses.asdict(self) | {"left_s": left_s})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what ``to_json`` returned in another process, which has the same version of this library."""
        fields = json.loads(text)
        if fields["left_s"] is None:
            fields["left_s"] = math.inf
        if fields["snapshot"] is not None:
            fields["snapshot"] = NewestSnapshot(
                **fields["snapshot"] | {"state": SnapshotState(fields["snapshot"]["state"])}
            )
        if fields["evacuation"] is not None:
            fields["evacuation"] = Evacuation(**fields["evacuation"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the processes do at the agreed sync point.

    Attributes:
        choice: The choice of all processes.
        step: The step that will be committed if the predictions hold.
        steps_lost: How many completed steps that step lacks.
        reason: Why, in one sentence.
    """

    choice: Choice
    step: int
    steps_lost: int
    reason: str


def writing_s(state_bytes: int, process_count: int, bytes_per_s: float | None) -> float:
    """Returns the seconds to write a state at a rate over all processes. If the rate is None: at the assumed one."""
    if bytes_per_s is None:
        return ASSUMED_FIXED_S + state_bytes / (ASSUMED_BYTES_PER_S * process_count)
    return state_bytes / bytes_per_s


def must_choose(snapshot: NewestSnapshot | None) -> bool:
    """Returns True if there is a choice: the snapshot could be saved in place of the current step, or before it."""
    return snapshot is not None and snapshot.state in (SnapshotState.WRITING, SnapshotState.HELD)


def merged(situations: Sequence[Situation]) -> Situation:
    """Returns one situation for all processes: the worst of each figure."""
    first = situations[0]
    return dataclasses.replace(
        first,
        left_s=min(s.left_s for s in situations),
        drain_s=max(s.drain_s for s in situations),
        state_bytes=_of_known(max, [s.state_bytes for s in situations]),
        streamed_bytes_per_s=_of_known(min, [s.streamed_bytes_per_s for s in situations]),
        snapshot_bytes_per_s=_of_known(min, [s.snapshot_bytes_per_s for s in situations]),
        snapshot=_merged_snapshot(situations),
        margin=max(s.margin for s in situations),
        evacuation=_merged_evacuation([s.evacuation for s in situations]),
    )


def plan(now: Situation) -> Plan:
    """Chooses the current step if it fits, else an older one that does, else what may succeed without the margin."""
    snapshot, left_s, margin = now.snapshot, now.left_s, now.margin
    writing = _is_writing(now)
    current_s, remaining = now.drain_s + now.save_s, f"{max(left_s, 0.0):.1f} s are left"
    save_alone = Choice.CANCEL_AND_SAVE if writing else Choice.SAVE_NOW
    evacuation = now.evacuation
    memory_s = math.inf if evacuation is None else now.drain_s + evacuation.send_s
    servers = "" if evacuation is None else f"sending it to {evacuation.copies} snapshot servers {memory_s:.1f} s"

    def current(choice: Choice, reason: str) -> Plan:
        return Plan(choice, now.step, 0, reason)

    if now.state_bytes is None:
        return current(Choice.SAVE_NOW, f"step {now.step} is saved: nothing was measured yet, {remaining}")
    if snapshot is not None and snapshot.step == now.step:
        if writing and (margin * memory_s > left_s or margin * now.finish_s <= left_s):
            return current(Choice.FINISH_IN_FLIGHT, f"the save in progress is of step {now.step} itself")
        if snapshot.state is SnapshotState.COMMITTED:
            return current(Choice.SAVE_NOW, f"step {now.step} is committed already")
    needs = f"step {now.step} needs {current_s:.1f} s to drain and save"
    if writing:
        assert snapshot is not None
        finish_s = now.finish_s
        both_s = max(finish_s, now.drain_s) + now.save_s  # the devices finish their steps while the save continues
        flight = f"the save of step {snapshot.step}, in progress, needs another {finish_s:.1f} s"
        if margin * both_s <= left_s:
            return current(Choice.FINISH_IN_FLIGHT, f"{needs} and {flight}: there is time for both, {remaining}")
        if margin * current_s <= left_s:
            return current(Choice.CANCEL_AND_SAVE, f"{needs} and {flight}: there is no time for both, {remaining}")
        if margin * memory_s <= left_s:
            return current(Choice.EVACUATE, f"{needs}, {servers}, and {flight}, {remaining}")
        if margin * finish_s <= left_s and both_s <= left_s:
            return current(
                Choice.FINISH_IN_FLIGHT,
                f"{needs} and {flight}: both fit without margin, and that one is safe, {remaining}",
            )
        if margin * finish_s <= left_s:
            lost = now.step - snapshot.step
            return Plan(Choice.PROMOTE, snapshot.step, lost, f"{needs}, {flight}, {remaining}")
    elif margin * current_s <= left_s:
        return current(Choice.SAVE_NOW, f"{needs}, {remaining}")
    elif margin * memory_s <= left_s:
        return current(Choice.EVACUATE, f"{needs}, {servers}, {remaining}")
    held = _is_held(now)
    if snapshot is not None and held and margin * now.rewrite_s <= left_s:
        lost = now.step - snapshot.step
        again = f"the snapshot of step {snapshot.step}, whose save failed, {now.rewrite_s:.1f} s"
        return Plan(Choice.PROMOTE, snapshot.step, lost, f"{needs}, {again}, {remaining}")
    if current_s <= left_s:
        return current(save_alone, f"{needs}, which fits without margin, {remaining}")
    if memory_s <= left_s:
        return current(Choice.EVACUATE, f"{needs}, {servers}, which fits without margin, {remaining}")
    older_s = now.finish_s if writing else now.rewrite_s if held else math.inf
    if snapshot is not None and older_s <= left_s:
        lost, older = now.step - snapshot.step, f"the snapshot of step {snapshot.step} {older_s:.1f} s"
        return Plan(Choice.PROMOTE, snapshot.step, lost, f"{needs}, {older}, which fits without margin, {remaining}")
    if memory_s < current_s:  # predicted by snapshots that are sent beside training, so it may be much quicker
        return current(Choice.EVACUATE, f"{needs}, {servers}, and nothing fits, {remaining}; the quicker way is tried")
    return current(Choice.IMPOSSIBLE, f"{needs}, and nothing older can be had in time, {remaining}; tried anyway")


def kept_s(now: Situation, begun_s: float) -> float:
    """Returns the seconds that an evacuation leaves, so that something can be saved if no server takes a part.

    0 if there is no time for both, with the margin. A save under way goes on while parts are sent.

    Args:
        now: The situation.
        begun_s: Seconds until the other save has begun.
    """
    if now.evacuation is None:
        return 0.0
    send_s, older_s = now.margin * now.evacuation.send_s, math.inf
    if _is_writing(now):
        older_s = max(now.margin * now.finish_s - send_s, 0.0)
    elif _is_held(now):
        older_s = now.margin * now.rewrite_s
    needed_s = min(now.margin * now.save_s, older_s) + begun_s
    return needed_s if now.drain_s + send_s + needed_s <= now.left_s else 0.0


def _is_writing(now: Situation) -> bool:
    return now.snapshot is not None and now.snapshot.state is SnapshotState.WRITING


def _is_held(now: Situation) -> bool:
    """Whether host memory still has an older step, of which no save is in progress."""
    snapshot = now.snapshot
    return snapshot is not None and snapshot.state is SnapshotState.HELD and snapshot.step != now.step


def _merged_snapshot(situations: Sequence[Situation]) -> NewestSnapshot | None:
    """Returns the newest snapshot as all processes together know it.

    The save of a snapshot ends alike in all processes, so what one of them knows of its end is true for all. Where a
    process could not take its snapshot, the newest ones are of different steps. Then none can be committed.
    """
    snapshots = [situation.snapshot for situation in situations]
    newest = max((each for each in snapshots if each is not None), key=lambda each: each.step, default=None)
    if newest is None or any(each is None or each.step != newest.step for each in snapshots):
        return None if newest is None else dataclasses.replace(newest, state=SnapshotState.GONE)
    # GONE before HELD: a snapshot that one process no longer has cannot be committed.
    for state in (SnapshotState.COMMITTED, SnapshotState.GONE, SnapshotState.HELD):
        for situation in situations:
            if situation.snapshot is not None and situation.snapshot.state is state:
                return situation.snapshot
    return max(situations, key=lambda s: s.finish_s).snapshot


def _merged_evacuation(evacuations: Sequence[Evacuation | None]) -> Evacuation | None:
    """Returns the slowest evacuation. None if a process has no server to send to: without its part, no step is safe."""
    known = [each for each in evacuations if each is not None]
    return max(known, key=lambda each: each.send_s) if len(known) == len(evacuations) else None


def _of_known(choose: Callable[[Sequence[T]], T], values: Sequence[T | None]) -> T | None:
    numbers = [value for value in values if value is not None]
    return choose(numbers) if numbers else None
