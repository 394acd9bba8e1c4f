"""Parts of the primary process's messages: what its time went into, and for what the restored step was saved.

The rules of ``messages`` hold here, too.
"""

from __future__ import annotations

import dataclasses

from gracepoint.wire.codec import Message


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
        left_s: When training had ended because of a preemption, after the save. None: not yet.
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
