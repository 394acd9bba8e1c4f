"""The messages of the channel between operator and library, version 1.

Direction, who writes and who reads stands at each message. All are JSON objects; in the stream of a
subscription there is one a line. Rules for both sides:

* ``version`` is 1. Another one is refused with ``WireError``; it changes only when a reader of version 1
  would misunderstand.
* A reader ignores fields that it does not know (the other side may be newer) and refuses a missing or
  mistyped one with ``WireError``, which names the field, what was expected and what was found.
* Durations (``_s``) are what counts. Absolute times are for the record: clocks may be off.
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

from gracepoint.errors import WireError

VERSION = 1

#: Fields whose key in JSON is not their name: version 1 was made when JobSet was the only workload.
_KEYS = {"workload_uid": "jobset_uid"}

#: Revisions of a notice that differ by so much or less are of the same deadline, as each replica may have observed it.
SAME_REVISION = 1000


class Mode(StrEnum):
    """What a preemption asks for."""

    ENFORCE = "Enforce"  # save, then leave
    OBSERVE = "Observe"  # recorded by the operator; never sent
    DRILL = "Drill"  # rehearse: agree, save, report, and train on; a library from before it refuses the notice


class Confidence(StrEnum):
    """How certain a signal is that the pod will die."""

    SURE = "sure"
    LIKELY = "likely"
    HINT = "hint"


class Phase(StrEnum):
    """How far a preemption is. Moves forward only, in this order; the last five are ends. One end may be followed by
    another: EXPIRED, after which nobody had said how it ended, by COMMITTED or PROMOTED.

    The operator sets NOTICED; the primary process reports the others, but for EXPIRED, which the operator
    sets when the deadline passed and nobody said how it ended.
    """

    NOTICED = "Noticed"  # the signal was seen and subscribers are being told
    FROZEN = "Frozen"  # every process has published the sync point it passed last
    AGREED = "Agreed"  # all know the one ordinal at which they save
    DRAINED = "Drained"  # all reached it and the devices' queues are empty
    WRITTEN = "Written"  # every process has written its shards
    DURABLE = "Durable"  # every process's done-record is on stable storage
    COMMITTED = "Committed"  # the checkpoint is visible under its step
    PROMOTED = "Promoted"  # an older snapshot was committed in its place (steps lost > 0)
    RETRACTED = "Retracted"  # the signal went away, or training had ended by itself
    EXPIRED = "Expired"  # the deadline passed without a word
    FAILED = "Failed"  # the save failed; the message says why

    @property
    def ended(self) -> bool:
        return self in _ENDED

    @property
    def rank(self) -> int:
        return list(Phase).index(self)


_ENDED = frozenset({Phase.COMMITTED, Phase.PROMOTED, Phase.RETRACTED, Phase.EXPIRED, Phase.FAILED})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages: strict reading and compact writing."""

    version: int = VERSION

    def to_json(self) -> str:
        """One line of JSON without line breaks."""
        return json.dumps(_plain(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Reads one message.

        Raises:
            WireError: It is no JSON object, of another version, or a field is missing or mistyped.
        """
        return cls.from_dict(_object(cls.__name__, text))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Like ``from_json``, from a parsed object."""
        found = data.get("version")
        if found != VERSION:
            raise WireError(f"{cls.__name__}.version: expected {VERSION}, found {_shown(found)}")
        return typing.cast(Self, _read(cls.__name__, cls, data))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subscription(Message):
    """Library -> operator, opens the stream. Says which process of which attempt of which job listens.

    The operator checks ``pod_uid`` against the bound token and against its own view of the pod.
    """

    namespace: str
    pod_name: str
    pod_uid: str
    session: str  # nonce made by attach(); a notice for another session is ignored
    workload_uid: str
    restart_attempt: int
    process_index: int
    process_count: int
    library_version: str
    takes_hints: bool = False  # absent: a library from before Hint, which is sent none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame(Message):
    """Operator -> library, one line of the stream; ``type`` tells which."""

    type: ClassVar[str]

    @staticmethod
    def read(line: str | bytes) -> Frame:
        """Reads any frame.

        Raises:
            WireError: As ``from_json``, or ``type`` is none of this version's.
        """
        data = _object("Frame", line)
        kind = data.get("type")
        frame = _FRAMES.get(kind) if isinstance(kind, str) else None
        if frame is None:
            raise WireError(f"Frame.type: expected one of {sorted(_FRAMES)}, found {_shown(kind)}")
        return frame.from_dict(data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello(Frame):
    """First frame: the subscription is accepted."""

    type: ClassVar[str] = "hello"
    replica: str  # the operator replica's pod name
    heartbeat_s: float  # a Ping comes at least this often; three missed mean that the stream is dead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ping(Frame):
    """Keeps the stream alive."""

    type: ClassVar[str] = "ping"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice(Frame):
    """Some pod of the gang is going to be disrupted. Repeated with the same name when the deadline moves."""

    type: ClassVar[str] = "notice"
    preemption: str  # name of the Preemption object
    pod_uid: str  # who is told; the reader ignores a notice for another pod
    session: str  # ... or for another session
    workload_uid: str
    cause: str  # e.g. SpotTermination; signals' table of the operator
    signal: str  # what was seen, e.g. "taint cloud.google.com/impending-node-termination"
    confidence: Confidence
    nodes: list[str]
    remaining_s: float  # until the deadline, when this was sent
    deadline: str  # RFC 3339, UTC; for the record
    mode: Mode
    # Which deadline this speaks of: the record's, in milliseconds since 1970 by the operator's clock. The same in all
    # replicas and however late the notice is read, so that a notice that is repeated is told from one that has moved.
    # Only compared, never taken for a time. None: an operator from before it; then remaining_s is compared.
    revision: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retraction(Frame):
    """The signal of a notice went away. Counts only while nobody has frozen."""

    type: ClassVar[str] = "retraction"
    preemption: str
    pod_uid: str
    session: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hint(Frame):
    """A disruption may be near: prepare, and train on. Only to a reader whose subscription takes hints.

    Not acknowledged, not recorded, not taken back. The same hint may come again, by another replica or stream.
    """

    type: ClassVar[str] = "hint"
    hints: list[str]  # names of what is new; equal for the same sign in all replicas, and otherwise without meaning
    pod_uid: str
    session: str
    workload_uid: str
    cause: str
    signal: str  # one of the signs, in words
    nodes: list[str]


_FRAMES: dict[str, type[Frame]] = {frame.type: frame for frame in (Hello, Ping, Notice, Retraction, Hint)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acknowledgement(Message):
    """Library -> operator: this process has the notice in its mailbox. A receipt, not progress."""

    pod_uid: str
    session: str
    preemption: str
    process_index: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTiming(Message):
    """When a stage ended, in seconds after the process that reports had the notice; over all processes."""

    p50_s: float
    max_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report(Message):
    """Library -> operator, by the primary process for the whole gang, at each phase. The last one ends it.

    ``preemption`` is empty where the gang learnt of it without the operator (SIGTERM); the operator then
    takes the open Preemption of the JobSet, or makes one with the given ``cause``.
    """

    pod_uid: str
    session: str
    workload_uid: str
    preemption: str
    phase: Phase
    cause: str
    process_count: int
    participants: list[int]  # process indices that took part
    ordinal: int | None  # the agreed sync point
    step: int | None  # the step that was (or is being) saved; after Promoted, the older one
    steps_lost: int | None  # completed steps that the checkpoint lacks
    bytes: int | None  # written by all processes
    seconds_to_spare: float | None  # deadline minus commit
    stages: dict[str, StageTiming]  # frozen, agreed, drained, written, durable, committed
    message: str
    # Told from the agreed point on, and by libraries that plan. A text, as later ones may choose from more.
    choice: str | None = None  # SaveNow, FinishInFlight, CancelAndSave, Promote or Impossible
    choice_reason: str = ""  # why, with the figures, in one sentence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast(Message):
    """Library -> operator, by the primary process after the first step and after each periodic save.

    What an emergency would take now: the policy's ``FitsGrace`` is made of it.
    """

    pod_uid: str
    session: str
    workload_uid: str
    state_bytes: int
    step_s: float  # one training step
    drain_s: float  # steps in flight
    save_s: float  # from drained to committed, by the throughput of the saves so far
    margin: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resumption(Message):
    """Library -> operator, by the primary process: after restore, and again after the first step after it."""

    pod_uid: str
    session: str
    workload_uid: str
    restart_attempt: int
    restored_step: int | None  # None: there was no checkpoint, training began at 0
    training: bool  # False: restored; True: the first step after it was passed
    age_s: float  # since that happened, when this was sent: the way to the operator may be broken for a while


def same_revision(first: int | None, second: int | None) -> bool | None:
    """True if two notices of one preemption speak of the same deadline; None if one does not say which it is."""
    return None if first is None or second is None else abs(first - second) <= SAME_REVISION


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        fields = {json_key(f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": value.type, **fields} if isinstance(value, Frame) else fields
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def json_key(field: str) -> str:
    """The key in JSON of a message's field of this name."""
    return _KEYS.get(field, field)


def _object(what: str, text: str | bytes) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter by a text of nothing but brackets
        raise WireError(f"{what}: expected a JSON object, found {text[:80]!r} ({error})") from error
    if not isinstance(data, dict):
        raise WireError(f"{what}: expected a JSON object, found {type(data).__name__}")
    return data


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's fields. To find them costs more than all else of reading a message."""
    return typing.get_type_hints(kind)


def _read(path: str, wanted: Any, value: Any) -> Any:
    """Converts ``value`` (plain JSON) to the type ``wanted``, or raises naming ``path``."""
    if type(value) is wanted and wanted is not float:  # most fields of a notice that a thousand processes get at once
        return value
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):  # only "X | None" is used
        if value is None:
            return None
        (wanted,) = (arm for arm in typing.get_args(wanted) if arm is not type(None))
        return _read(path, wanted, value)
    if origin is list and isinstance(value, list):
        (item,) = typing.get_args(wanted)
        return [_read(f"{path}[{i}]", item, v) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {k: _read(f"{path}.{k}", typing.get_args(wanted)[1], v) for k, v in value.items()}
    if dataclasses.is_dataclass(wanted) and isinstance(value, Mapping):
        hints = _hints(typing.cast(type, wanted))
        read = {}
        for field in dataclasses.fields(wanted):
            key = json_key(field.name)
            if key in value:
                read[field.name] = _read(f"{path}.{key}", hints[field.name], value[key])
            elif field.default is dataclasses.MISSING:
                raise WireError(f"{path}.{key}: missing; found the fields {_shown(sorted(value))}")
        return typing.cast(type, wanted)(**read)
    if isinstance(wanted, type):
        if issubclass(wanted, StrEnum):
            if isinstance(value, str) and value in set(wanted):
                return wanted(value)
            raise WireError(f"{path}: expected one of {[str(v) for v in wanted]}, found {_shown(value)}")
        if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value):
                return float(value)
        elif isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
            return value
    name = wanted.__name__ if isinstance(wanted, type) else str(wanted)
    raise WireError(f"{path}: expected {name}, found {_shown(value)}")


#: Whatever the other side sends, and however deep that is nested: some words of it are shown.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxlist = _SHORT.maxdict = 20
_SHORT.maxlevel = 2


def _shown(value: Any) -> str:
    return _SHORT.repr(value)[:400]
