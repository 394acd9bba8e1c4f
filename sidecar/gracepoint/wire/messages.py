"""The messages of the channel between operator and library, version 1, and their strict reading and writing as JSON.

The docstring of each message says who writes it and who reads it; that holds for each of its fields. All messages are
JSON objects. The stream of a subscription has one on each line; those are in ``frames``. Rules for both sides:

* ``version`` is 1. A reader refuses another version with ``WireError``. The number changes only if a reader of
  version 1 would misunderstand a message.
* A reader ignores fields that it does not know, as the other side may be newer. It refuses a missing or mistyped field
  with ``WireError``, which names the field, what was expected and what was found. A field with a default may be
  missing.
* Fields whose name ends in ``_s`` are durations in seconds. Decisions depend on durations. Absolute times are only
  recorded, as the clocks of two machines may differ.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self

from gracepoint.errors import WireError as WireError  # the operator imports it from here

VERSION = 1

#: Fields whose key in JSON is not their name. Version 1 was made when JobSet was the only kind of workload.
_KEYS = {"workload_uid": "jobset_uid"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages: strict reading and compact writing."""

    type: ClassVar[str] = ""  # of a frame of the stream; empty for all other messages
    version: int = VERSION

    def to_json(self) -> str:
        """One line of JSON without line breaks."""
        return json.dumps(_plain(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads one message.

        Raises:
            WireError: The text is no JSON object, the version is another one, or a field is missing or mistyped.
        """
        return cls.from_dict(parsed(cls.__name__, text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads one message from a parsed JSON object, as ``from_json``."""
        version = data.get("version")
        if version != VERSION:
            raise WireError(f"{cls.__name__}.version: expected {VERSION}, found {shown(version)}")
        return typing.cast(Self, _read(cls.__name__, cls, data))


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        fields = {json_key(f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": value.type, **fields} if value.type else fields
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def json_key(field: str) -> str:
    """Returns the key in JSON of a message's field of this name."""
    return _KEYS.get(field, field)


def printable(text: str) -> str:
    """Returns a text without what could control a terminal or hide its own parts: such characters become escapes.

    Line breaks and tabs stay. Everything that a message says may be shown to a person.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The same without line breaks and tabs, for what is shown as a line: no text can pretend to be the next one."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def parsed(source: str, text: str | bytes) -> dict[str, Any]:
    """Parses a JSON object; ``source`` names it in the error.

    Raises:
        WireError: The text is no JSON object.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise WireError(f"{source}: expected a JSON object, found {text[:80]!r} ({error})") from error
    if not isinstance(data, dict):
        raise WireError(f"{source}: expected a JSON object, found {type(data).__name__}")
    return data


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Returns the types of a class's fields. Cached, as finding them costs more than the rest of reading a message."""
    return typing.get_type_hints(kind)


def _read(path: str, expected: Any, value: Any) -> Any:
    """Converts ``value`` (plain JSON) to the type ``expected``, or raises naming ``path``. Texts become printable."""
    if expected is str and isinstance(value, str):
        return printable(value)
    if type(value) is expected and expected is not float:  # the fast path, for most fields
        return value
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):  # only "X | None" is used
        if value is None:
            return None
        (expected,) = (arm for arm in typing.get_args(expected) if arm is not type(None))
        return _read(path, expected, value)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(expected)
        return [_read(f"{path}[{i}]", item, v) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {printable(k): _read(f"{path}.{k}", typing.get_args(expected)[1], v) for k, v in value.items()}
    if dataclasses.is_dataclass(expected) and isinstance(value, Mapping):
        hints = _hints(typing.cast(type, expected))
        read = {}
        for field in dataclasses.fields(expected):
            key = json_key(field.name)
            if key in value:
                read[field.name] = _read(f"{path}.{key}", hints[field.name], value[key])
            elif field.default is dataclasses.MISSING:
                raise WireError(f"{path}.{key}: missing; found the fields {shown(sorted(value))}")
        return typing.cast(type, expected)(**read)
    if isinstance(expected, type):
        if issubclass(expected, StrEnum):
            if isinstance(value, str) and value in set(expected):
                return expected(value)
            raise WireError(f"{path}: expected one of {[str(v) for v in expected]}, found {shown(value)}")
        if expected is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
        elif isinstance(value, expected) and (expected is bool or not isinstance(value, bool)):
            return value
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    raise WireError(f"{path}: expected {name}, found {shown(value)}")


#: Shortens what the other side sent for an error message, however long and however deeply nested it is.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxdict = 20
_SHORT.maxlevel = 2


def shown(value: Any) -> str:
    """Returns a value for an error message, shortened."""
    return _SHORT.repr(value)[:400]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent(Message):
    """Part of what the primary process writes: what its time went into so far, by its own clock. Read by the operator.

    All values are totals, so a message that is lost leaves no gap. Times (``now_s``, ``joined_s``, ``restored_s``,
    ``compiled_s``, ``trained_s``, ``left_s``, ``last_started_s``) are in seconds since ``attach`` was called.

    Attributes:
        now_s: When this is sent.
        joined_s: When all processes had joined.
        restored_s: When the state was restored, or made if there was no checkpoint. None: not yet, or ``restore`` is
            not used.
        first_step: The step from which it trains: the one that was restored. 0 if there was none.
        trained_s: When the first step was done. None: not yet.
        left_s: When training had ended because of a preemption: after the save. If training had stalled and nothing was
            saved, with the last step. None: not yet.
        saving_s: Seconds for which saves of all kinds stopped the training.
        saves: Number of periodic saves.
        saves_s: Seconds for which periodic saves stopped the training. They are part of ``saving_s``.
        passed: Seconds for which this process had trained when it passed a step, without the time of saves. The keys
            are numbers of steps: the newest of those at which a save began or a message was sent. None: none is known.
        saved_s: When the newest step was passed that is known to be committed in this start. None: none is known.
        age_s: For how many seconds the process had run when ``attach`` was called. None: it is not known.
        compiled_s: When the newest of the programs that the first step needs was compiled or loaded. None: not yet, or
            there was none.
        last_started_s: When the last of all processes was started, by the clocks of their machines. Negative: before
            ``attach`` was called here. None: one of them does not know.
    """

    now_s: float
    joined_s: float
    restored_s: float | None = None
    first_step: int = 0
    trained_s: float | None = None
    left_s: float | None = None
    saving_s: float = 0.0
    saves: int = 0
    saves_s: float = 0.0
    passed: dict[str, float] | None = None
    saved_s: float | None = None
    age_s: float | None = None
    compiled_s: float | None = None
    last_started_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedFor(Message):
    """Part of a ``Resumption``: for which preemption the restored step was saved.

    The former start has written this into the checkpoint, before the commit. So a restart that finds it proves that the
    commit took place, also if nobody was there to take the report of it.

    Attributes:
        preemption: Name of the Preemption object. Empty if the processes learnt of the preemption without the operator.
        session: Session that saved.
        restart_attempt: As in ``Subscription``, of the pods that saved.
        spent: What the time of the former start had gone into when the save began. Unless it was a drill, its training
            ended then (``left_s``).
    """

    preemption: str
    session: str
    restart_attempt: int
    spent: Spent


class TroubleKind(StrEnum):
    """What goes wrong without ending the training."""

    SAVES = "Saves"  # periodic saves fail
    DELETIONS = "Deletions"  # old checkpoints, or what failed saves left, cannot be deleted


class Mode(StrEnum):
    """What a preemption asks for."""

    ENFORCE = "Enforce"  # save, then leave
    OBSERVE = "Observe"  # recorded by the operator, never sent to a pod
    DRILL = "Drill"  # rehearse: agree, save, report, and train on. A library without drills refuses the notice


class Confidence(StrEnum):
    """How certain a signal is that the pod will die."""

    SURE = "sure"
    LIKELY = "likely"
    HINT = "hint"


class Phase(StrEnum):
    """How far a preemption is. It moves forward only, in this order; the last six are ends.

    The operator sets NOTICED, RETRACTED and EXPIRED, and COMMITTED if the next start restores what was to be saved, or
    has saved what was evacuated; the primary process reports all others. One end may follow another: EVACUATED,
    COMMITTED or PROMOTED may still come after RETRACTED or EXPIRED, and COMMITTED after EVACUATED.
    """

    NOTICED = "Noticed"  # the operator has seen the signal and is telling the subscribers
    FROZEN = "Frozen"  # every process has published the number of its latest sync point
    AGREED = "Agreed"  # all processes know the sync point at which they save
    DRAINED = "Drained"  # all processes have reached it, and their devices are idle
    WRITTEN = "Written"  # every process has written its shards
    DURABLE = "Durable"  # every process's done-record is on stable storage
    EVACUATED = "Evacuated"  # all parts are safe in snapshot servers, and not in storage yet
    COMMITTED = "Committed"  # the checkpoint is visible under its step number
    PROMOTED = "Promoted"  # an older snapshot was committed instead (steps lost > 0)
    RETRACTED = "Retracted"  # the signal went away, or training has finished
    EXPIRED = "Expired"  # the deadline has passed, and no process has reported an end
    FAILED = "Failed"  # the save failed; the report's message says why

    @property
    def ended(self) -> bool:
        """True for the phases that end a preemption."""
        return self in _ENDED

    @property
    def rank(self) -> int:
        """Position in the order of the phases."""
        return list(Phase).index(self)


_ENDED = frozenset({Phase.EVACUATED, Phase.COMMITTED, Phase.PROMOTED, Phase.RETRACTED, Phase.EXPIRED, Phase.FAILED})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subscription(Message):
    """Written by every process, read by the operator. Opens the stream: says which process of which job listens.

    Attributes:
        namespace: The pod's namespace.
        pod_name: The pod's name.
        pod_uid: The pod's UID. The operator compares it with the bound token and with its own view of the pod.
        session: Nonce that ``attach`` makes. The library ignores frames for another session.
        workload_uid: UID of the JobSet, or of the Job by itself.
        restart_attempt: The JobSet's number of restarts when the pod was created; 0 for the first start.
        process_index: ``jax.process_index()``.
        process_count: How many processes train together.
        library_version: The library's version, for the operator's log.
        takes_hints: True if the library understands ``Hint``. Absent: an older library, which is sent none.
        trust: ``trust_digest`` of the authorities that the process trusts. It is sent a ``Trust`` if the operator has
            others. Absent: an older library, or one that trusts the system's authorities, which is sent none.
        spent: What the time went into so far. Absent: an older library, or not the primary process.
        stalled_s: How long ago the newest step was passed, if that is far longer than steps take. Absent: an older
            library, or training continues, or has not begun.
        takes_snapshots: True if the process sends snapshots to servers, so that it is sent a ``SnapshotPlacement``.
            Absent: an older library, or its policy asks for none.
    """

    namespace: str
    pod_name: str
    pod_uid: str
    session: str
    workload_uid: str
    restart_attempt: int
    process_index: int
    process_count: int
    library_version: str
    takes_hints: bool = False
    trust: str | None = None
    spent: Spent | None = None
    stalled_s: float | None = None
    takes_snapshots: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acknowledgement(Message):
    """Written by every process, read by the operator: the process has received the notice. Says nothing of progress.

    Attributes:
        pod_uid: UID of the pod that writes.
        session: Session that writes.
        preemption: Name of the notice's Preemption object.
        process_index: ``jax.process_index()``.
    """

    pod_uid: str
    session: str
    preemption: str
    process_index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTiming(Message):
    """Part of a ``Report``: when a stage ended, in seconds after the notice.

    Attributes:
        p50_s: Median over the processes, in seconds.
        max_s: Maximum over the processes, in seconds.
    """

    p50_s: float
    max_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Message):
    """Written by the primary process for all processes, at each phase, and read by the operator.

    Attributes:
        pod_uid: UID of the pod that writes.
        session: Session that writes.
        workload_uid: UID of the JobSet, or of the Job by itself.
        preemption: Name of the Preemption object. Empty if the processes learnt of the preemption without the operator
            (SIGTERM): the operator then takes the workload's open Preemption, or makes one with ``cause``.
        phase: How far the preemption is.
        cause: Why, as in ``Notice``.
        process_count: How many processes train together.
        participants: ``jax.process_index()`` of the processes that took part.
        ordinal: Number of the agreed sync point. None while it is not known.
        step: The step that is being saved, or was. After ``Promoted``, the older one that was committed. None while it
            is not known.
        steps_lost: Completed steps that the checkpoint lacks. None while that is not known.
        bytes: Bytes that all processes wrote. None while that is not known, or if the training loop saved by itself.
        seconds_to_spare: Seconds from the commit to the deadline; negative if the commit came later. None before.
        stages: When each stage ended: ``frozen``, ``agreed``, ``drained``, ``evacuated`` (all parts are in snapshot
            servers), ``written``, ``durable``, ``committed``. A stage that some process has not reached is missing.
        message: What happened, as a sentence. Empty if there is nothing to say.
        choice: What the processes chose to do: SaveNow, FinishInFlight, CancelAndSave, Promote, Evacuate or Impossible.
            A text, as later versions may have more choices. None or absent before the agreed sync point, and in older
            libraries.
        choice_reason: Why, with the figures, in one sentence. Empty or absent if there is no ``choice``.
        spent: What the time went into so far. Absent: an older library, or not the primary process.
    """

    pod_uid: str
    session: str
    workload_uid: str
    preemption: str
    phase: Phase
    cause: str
    process_count: int
    participants: list[int]
    ordinal: int | None
    step: int | None
    steps_lost: int | None
    bytes: int | None
    seconds_to_spare: float | None
    stages: dict[str, StageTiming]
    message: str
    choice: str | None = None
    choice_reason: str = ""
    spent: Spent | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast(Message):
    """Written by the primary process when its figures are first known and after each periodic save; read by the
    operator.

    Says what an emergency save would take now. The operator derives the policy's condition ``FitsGrace`` from it.

    Attributes:
        pod_uid: UID of the pod that writes.
        session: Session that writes.
        workload_uid: UID of the JobSet, or of the Job by itself.
        state_bytes: Bytes of the state over all processes.
        step_s: Seconds of one training step.
        drain_s: Seconds for the steps in flight.
        save_s: Seconds from drained to committed, by the throughput of the saves so far.
        margin: Factor by which the library multiplies its predictions.
        spent: What the time went into so far. Absent: an older library.
        takes_interval: True if the operator is to answer with a ``SaveEvery``. Absent: it answers with nothing.
        send_s: Seconds from drained until the step is in snapshot servers, if a process sends it at once. None or
            absent: there are no servers, or an older library.
    """

    pod_uid: str
    session: str
    workload_uid: str
    state_bytes: int
    step_s: float
    drain_s: float
    save_s: float
    margin: float
    spent: Spent | None = None
    takes_interval: bool = False
    send_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveEvery(Message):
    """Written by the operator in answer to a ``Forecast`` that ``takes_interval``, and read by the primary process.

    There is none while nothing can be suggested, and from an older operator.

    Attributes:
        every_s: Seconds between two periodic saves, by what saves cost and how often steps are lost.
    """

    every_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumption(Message):
    """Written by the primary process after a restore, and again after the next step; read by the operator.

    Attributes:
        pod_uid: UID of the pod that writes.
        session: Session that writes.
        workload_uid: UID of the JobSet, or of the Job by itself.
        restart_attempt: As in ``Subscription``.
        restored_step: The step that was restored. None if there was no checkpoint, so that training began at step 0.
        training: False after the restore, True after the first step after it.
        age_s: Seconds from that moment to the sending of this message, as the operator may be out of reach for a while.
        spent: What the time went into so far. Absent: an older library.
        saved_for: The preemption for which the restored step was saved. Absent: none, a promoted snapshot, or a save of
            an older library or by the training loop's own means.
        from_memory: True if the step came from a snapshot in the memory of nodes. Absent: an older library, or it came
            from storage.
    """

    pod_uid: str
    session: str
    workload_uid: str
    restart_attempt: int
    restored_step: int | None
    training: bool
    age_s: float
    spent: Spent | None = None
    saved_for: SavedFor | None = None
    from_memory: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stall(Message):
    """Written by one process for all when a gang makes no progress, and again when it does; read by the operator.

    Any process may write it, as the primary process may be the one that is stopped. If process 0 does not answer, all
    processes write it.

    Attributes:
        pod_uid: UID of the pod that writes.
        session: Session that writes.
        workload_uid: UID of the JobSet, or of the Job by itself.
        over: True if there is progress again. The other fields then say which stall that was.
        stage: What the writer does, as text.
        step: The step that the writer has reached.
        for_s: Seconds for which the writer has made no progress.
        suspects: ``jax.process_index()`` of the processes that hold up the others. Empty if that is not known.
        message: Why they are suspected, as text.
        stack: Where the first suspect is, as lines of a traceback. Empty if it has not said so. An older library then
            sends the writer's own stack.
        beside: True if the writer is not the training process but another process of its pod, which watches it from
            outside. The message is about that pod alone.
        pods: Names of the suspects' pods, as far as they are known. None: the writer is older than this field.
    """

    pod_uid: str
    session: str
    workload_uid: str
    over: bool
    stage: str
    step: int
    for_s: float
    suspects: list[int]
    message: str
    stack: str
    beside: bool = False
    pods: list[str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trouble(Message):
    """Written by the primary process when something goes wrong that does not end the training, again when more is known
    of it, and when it is over; read by the operator.

    Attributes:
        pod_uid: UID of the pod that writes.
        session: Session that writes.
        workload_uid: UID of the JobSet, or of the Job by itself.
        kind: What goes wrong, a ``TroubleKind``. A text, as later versions may know more kinds.
        over: True if it does not go wrong any more.
        for_s: Seconds since it began.
        times: How often it has happened since then.
        left_s: Seconds after which training ends for it. None: it does not end for it.
        message: What happened, as a sentence.
    """

    pod_uid: str
    session: str
    workload_uid: str
    kind: str
    over: bool
    for_s: float
    times: int
    left_s: float | None
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotReport(Message):
    """Written by every process that takes a ``SnapshotPlacement``, when something of it has changed and else seldom;
    read by the operator.

    Attributes:
        pod_uid: UID of the pod that writes.
        session: Session that writes.
        workload_uid: UID of the JobSet, or of the Job by itself.
        process_index: ``jax.process_index()``. What process 0 says is shown to people.
        safe_step: The newest step of which all parts are in servers. None: none is, or the writer does not know.
        copies: In how many servers each part of it is. 0 if there is none.
        age_s: Seconds since the training had passed that step. None if there is none.
        interval_s: Seconds between two snapshots, as the policy has it or as they came last. None: not known.
        skipped: How many snapshots were due and not begun, since ``attach``.
        skipped_reason: Why the newest of them was not begun, as a sentence. Empty if there is none.
        bytes: Bytes of this process's part of its newest snapshot. 0 if there is none.
        servers: Nodes of the servers that have this process's part of the newest snapshot.
    """

    pod_uid: str
    session: str
    workload_uid: str
    process_index: int
    safe_step: int | None
    copies: int
    age_s: float | None
    interval_s: float | None
    skipped: int
    skipped_reason: str
    bytes: int
    servers: list[str]
