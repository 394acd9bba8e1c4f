"""Reads in every process, and tells all processes how it went, so that all of them go on in the same way."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import TypeVar

from gracepoint.checkpoint import metrics
from gracepoint.deadline import Deadline
from gracepoint.errors import from_word, to_word
from gracepoint.process_group import ProcessGroup

Result = TypeVar("Result")

# Processes whose report an error has, for each kind of error.
_SHOWN = 8
# Kinds of errors (``errors.to_word``) for which an older step is read.
_DAMAGE = ("corrupt", "not found")
# All other kinds end the restore. If the processes report different kinds, the first in this order is raised in all.
_RAISED_FIRST = ("error", "save failed", "exists", "invalid sharding", "refused", "too new", "mismatch")


def read_together(
    what: str, read: Callable[[], Result], *, gang: ProcessGroup, key: str, deadline: Deadline
) -> tuple[Result | None, str]:
    """Calls ``read`` in every process, and exchanges the outcomes.

    Returns:
        The result and an empty text. If some process found damage, None and a description of the damage, in all
        processes.

    Raises:
        CheckpointMismatch: ``read`` raised this error in some process; says what each process reported.
        CheckpointTooNew: ``read`` raised this error in some process.
        CheckpointRefused: ``read`` raised this error in some process.
        InvalidSharding: ``read`` raised this error in some process.
        CheckpointError: ``read`` raised another error that is not damage.
    """
    failure: Exception | None = None
    result = None
    metrics.tell_restore_started()
    began_s = time.monotonic()
    try:
        result = read()
    except Exception as error:  # noqa: BLE001 - told to the others, then raised
        failure = error
    mine = json.dumps([] if failure is None else [to_word(failure), str(failure) or repr(failure)])
    # The report is the same in all processes, and small: thousands of processes may find the same damage.
    failures = json.loads(gang.reduce(key, mine, functools.partial(_merged, what), timeout_s=deadline.remaining_s()))
    damage = [text for word in _DAMAGE for text in failures.pop(word, ())]
    for word in sorted(failures, key=_RAISED_FIRST.index):
        raise from_word(word)(f"{what} cannot be restored: {'; '.join(failures[word])}") from failure
    if damage:
        return None, "; ".join(damage)
    metrics.tell_restored(time.monotonic() - began_s)
    return result, ""


def _merged(what: str, answers: list[str]) -> str:
    """Returns the reports of the processes that failed, by kind of error, as JSON."""
    failures: dict[str, list[str]] = {}
    for process, answer in enumerate(map(json.loads, answers)):
        if answer:
            word, text = answer
            who = "" if len(answers) == 1 else f"process {process}: "
            failures.setdefault(word, []).append(who + text.removeprefix(f"{what}: "))  # the message names it
    for texts in failures.values():
        if len(texts) > _SHOWN:
            texts[_SHOWN:] = [f"and {len(texts) - _SHOWN} more processes"]
    return json.dumps(failures)
