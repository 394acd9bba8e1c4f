"""Lets process 0 do for all processes what only one should do, such as listing a directory or taking its lease."""

from __future__ import annotations

import json
from collections.abc import Callable

from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, from_word, to_word
from gracepoint.process_group import ProcessGroup


def by_process_zero(act: Callable[[], str], *, gang: ProcessGroup, key: str, deadline: Deadline) -> str:
    """Calls ``act`` in process 0, and returns its text in all processes. Collective.

    Args:
        act: Called in process 0 only.
        gang: The processes that call this together.
        key: Key of the broadcast.
        deadline: When the other processes stop waiting for process 0.

    Raises:
        CheckpointError: ``act`` raised an error. Process 0 raises that error itself. The other processes raise an error
            of the same class, with the same message. If it is no ``CheckpointError``, they raise a ``CheckpointError``.
        BarrierError: Process 0 did not answer in time.
    """
    if gang.process_index != 0:
        kind, text = json.loads(gang.broadcast(key, None, timeout_s=deadline.remaining_s()))
        if kind is not None:
            raise from_word(kind)(text)
        return str(text)
    try:
        text = act()
    except Exception as error:
        # Before it is raised here: the other processes wait for this key, until their deadline.
        gang.broadcast(key, json.dumps(_told(error)), timeout_s=deadline.remaining_s())
        raise
    gang.broadcast(key, json.dumps([None, text]), timeout_s=deadline.remaining_s())
    return text


def _told(error: Exception) -> list[str]:
    if isinstance(error, CheckpointError):
        return [to_word(error), str(error)]
    return [to_word(CheckpointError()), f"process 0: {type(error).__name__}: {error}"]
