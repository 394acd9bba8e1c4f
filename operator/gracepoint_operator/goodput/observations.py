"""What becomes known of a life of a gang: what the operator sees, and what a process says. Immutable values. Pure."""

from __future__ import annotations

import dataclasses

from gracepoint_operator.goodput.life import StepMark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """When something happened.

    Attributes:
        stamp_ms: As the API server or the kubelet wrote it, in whole seconds.
        at_ms: The best guess.
    """

    stamp_ms: int
    at_ms: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodsObservation:
    """What the operator sees of the pods of one life. None: not yet.

    Attributes:
        attempt: Number of the workload's restarts when the pods were made.
        created: When the first pod was created.
        bound: When the last pod was bound, if all are that were created so far.
        pods: How many pods these are.
        started: When the last container was started, if all are.
        broke_ms: When the first process ended.
        gone_ms: When the last process had ended, if all have.
    """

    attempt: int
    created: Moment
    bound: Moment | None = None
    pods: int = 0
    started: Moment | None = None
    broke_ms: int | None = None
    gone_ms: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StallTimes:
    """What a process says when its training stalls. Any process of a life may say it.

    Attributes:
        attempt: Number of the workload's restarts when its pod was made.
        created_ms: When its pod was created.
        stalled_ms: When the newest step was passed.
    """

    attempt: int
    created_ms: int
    stalled_ms: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """What the primary process of a life says. None: not yet.

    Attributes:
        session: Its session.
        attempt: Number of the workload's restarts when its pod was made.
        created_ms: When its pod was created.
        attached_ms: When it began to join the others.
        started_ms: When the last of the processes was started.
        joined_ms: As in ``Life``. So are the fields that are not described here.
        of_former: True if a later start tells it. ``attempt`` and ``created_ms`` are those of that start then, and only
            the session says of which life it is.
    """

    session: str
    attempt: int
    created_ms: int
    attached_ms: int
    joined_ms: int
    started_ms: int | None = None
    restored_ms: int | None = None
    first_step: int = 0
    trained_ms: int | None = None
    left_ms: int | None = None
    saving_ms: int = 0
    saves: int = 0
    saves_ms: int = 0
    saved_ms: int | None = None
    marks: tuple[StepMark, ...] = ()
    of_former: bool = False
