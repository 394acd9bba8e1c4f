"""The frames of a subscription's stream, which the operator sends to a process. The rules of ``messages`` apply."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import ClassVar

from gracepoint.errors import WireError
from gracepoint.wire.messages import Confidence, Message, Mode, parsed, shown

#: Two revisions that differ by this or less mean the same deadline, which two replicas observed at different moments.
SAME_REVISION = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame(Message):
    """Written by the operator, read by the process that subscribed: one line of the stream.

    Attributes:
        type: Which frame it is. Part of the JSON object.
    """

    type: ClassVar[str]

    @staticmethod
    def read(line: str | bytes) -> Frame:
        """Reads any frame.

        Raises:
            WireError: As ``from_json``, or this version has no such ``type``.
        """
        data = parsed("Frame", line)
        kind = data.get("type")
        frame = _FRAMES.get(kind) if isinstance(kind, str) else None
        if frame is None:
            raise WireError(f"Frame.type: expected one of {sorted(_FRAMES)}, found {shown(kind)}")
        return frame.from_dict(data)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello(Frame):
    """The first frame: the subscription is accepted.

    Attributes:
        replica: Pod name of the operator's replica, for the log.
        heartbeat_s: Seconds. A ``Ping`` comes at least this often; after three missing ones the stream counts as dead.
    """

    type: ClassVar[str] = "hello"
    replica: str
    heartbeat_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ping(Frame):
    """Keeps the stream alive."""

    type: ClassVar[str] = "ping"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice(Frame):
    """Some pod of the job is going to be disrupted. Repeated with the same name when the deadline moves, and when the
    cause is corrected.

    Attributes:
        preemption: Name of the Preemption object.
        pod_uid: UID of the pod that is notified. The library ignores a notice for another pod.
        session: Session that is notified. The library ignores a notice for another session.
        workload_uid: UID of the JobSet, or of the Job by itself.
        cause: Why, for example ``SpotTermination``; a value of the operator's signal table.
        signal: What was seen, for example "taint cloud.google.com/impending-node-termination".
        confidence: How certain it is that the pod will die.
        nodes: Names of the nodes that are concerned.
        remaining_s: Seconds until the deadline, at the moment of sending.
        deadline: The deadline in RFC 3339, UTC. For the record: decisions go by ``remaining_s``.
        mode: What the notice asks for.
        revision: Identifies the deadline: in milliseconds since 1970, by the operator's clock. Two that differ by at
            most ``SAME_REVISION`` mean the same deadline, whichever replica sent them and however late they are read.
            So a repeated notice can be distinguished from one whose deadline has moved. It is only compared, never used
            as a time. Absent: an older operator; then the reader compares ``remaining_s``.
    """

    type: ClassVar[str] = "notice"
    preemption: str
    pod_uid: str
    session: str
    workload_uid: str
    cause: str
    signal: str
    confidence: Confidence
    nodes: list[str]
    remaining_s: float
    deadline: str
    mode: Mode
    revision: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retraction(Frame):
    """The signal of a notice went away. It has no effect once the freeze has begun.

    Attributes:
        preemption: Name of the notice's Preemption object.
        pod_uid: UID of the pod that is notified.
        session: Session that is notified.
        reason: Why, as text.
    """

    type: ClassVar[str] = "retraction"
    preemption: str
    pod_uid: str
    session: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hint(Frame):
    """A disruption may be near: prepare, and train on. Sent only if the subscription has ``takes_hints``.

    It is not acknowledged, recorded or taken back. The same hint may come again, from another replica or on a new
    stream.

    Attributes:
        hints: Names of the signs that are new. All replicas use the same name for a sign. The names have no other
            meaning.
        pod_uid: UID of the pod that is notified.
        session: Session that is notified.
        workload_uid: UID of the JobSet, or of the Job by itself.
        cause: Why, as in ``Notice``.
        signal: One of the signs, as text.
        nodes: Names of the nodes that are concerned.
    """

    type: ClassVar[str] = "hint"
    hints: list[str]
    pod_uid: str
    session: str
    workload_uid: str
    cause: str
    signal: str
    nodes: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trust(Frame):
    """The authorities to trust from now on, in place of those before. Sent only if the subscription has ``trust``.

    The operator sends it before its own certificate is one of a new authority. The frame counts for connections that
    are opened later; the open stream continues.

    Attributes:
        authorities: PEM certificates.
    """

    type: ClassVar[str] = "trust"
    authorities: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotPlacement(Frame):
    """Which snapshot servers hold what, from now on, in place of the placement before. Sent only if the subscription
    has ``takes_snapshots``: at once, and again at every change.

    A server is named by its node, and has an address ``IP:PORT`` or ``[IP]:PORT``.

    Attributes:
        pod_uid: UID of the pod that is meant.
        session: Session that is meant.
        capability: What the process shows to the servers (``wire.snapshot_requests``). It may write values of the pod's
            attempt, and read and drop these and earlier ones. A new one comes hours before it ends. Empty if both
            lists are.
        server_name: The name in the certificates of all servers. The authorities are those of the channel.
        write_to: Where this process's part goes: node and address of each server, the nearest first. Fewer than
            the policy has copies: no more can be had. Empty: snapshots pause.
        read_from: The servers that may have values of the workload, also of earlier attempts.
        reason: Why ``write_to`` has fewer servers than the policy has copies, as text. Empty if it has not.
    """

    type: ClassVar[str] = "snapshots"
    pod_uid: str
    session: str
    capability: str
    server_name: str
    write_to: dict[str, str]
    read_from: dict[str, str]
    reason: str = ""


_FRAMES: dict[str, type[Frame]] = {
    frame.type: frame for frame in (Hello, Ping, Notice, Retraction, Hint, Trust, SnapshotPlacement)
}


def trust_digest(authorities: str) -> str:
    """Returns what identifies the authorities of a PEM text. White space at its ends does not count."""
    return hashlib.sha256(authorities.strip().encode()).hexdigest()[:16]


def same_revision(first: int | None, second: int | None) -> bool | None:
    """Returns True if two notices of one preemption mean the same deadline. None if one of them has no revision."""
    return None if first is None or second is None else abs(first - second) <= SAME_REVISION
