"""Tells all processes whether each of them could read, so that all of them go on in the same way."""

from __future__ import annotations

import functools
import json

from gracepoint.deadline import Deadline
from gracepoint.errors import from_word, to_word
from gracepoint.process_group import ProcessGroup

# Most processes whose reports an error has, for each kind of error.
_SHOWN = 8
# Kinds of errors (``errors.to_word``) for which an older step is read.
_DAMAGE = ("corrupt", "not found")
# All other kinds end the restore. If the processes report different kinds, all raise the first in this order.
_RAISED_FIRST = (
    "error",
    "save failed",
    "exists",
    "invalid sharding",
    "refused",
    "too new",
    "mismatch",
    "host state lost",
)


def damage_in_any(what: str, failure: Exception | None, *, gang: ProcessGroup, key: str, deadline: Deadline) -> str:
    """Tells all processes how this process's read went. Collective.

    Args:
        what: What was read. Errors begin with it.
        failure: The error of this process's read. None if it succeeded.
        gang: The processes that read together.
        key: Key of their meeting.
        deadline: The deadline of the restore.

    Returns:
        A description of the damage that was found in some process, the same in all processes. Empty if all have read.

    Raises:
        CheckpointMismatch: This error was raised in some process; says what each process reported. ``HostStateLost`` is
            one.
        CheckpointTooNew: This error was raised in some process.
        CheckpointRefused: This error was raised in some process.
        InvalidSharding: This error was raised in some process.
        CheckpointError: Another error that is not damage was raised in some process.
    """
    mine = json.dumps([] if failure is None else [to_word(failure), str(failure) or repr(failure)])
    # The report is the same in all processes, and small: thousands of processes may find the same damage.
    failures = json.loads(gang.reduce(key, mine, functools.partial(_merged, what), timeout_s=deadline.remaining_s()))
    damage = [text for word in _DAMAGE for text in failures.pop(word, ())]
    for word in sorted(failures, key=_RAISED_FIRST.index):
        raise from_word(word)(f"{what} cannot be restored: {'; '.join(failures[word])}") from failure
    return "; ".join(damage)


def _merged(what: str, answers: list[str]) -> str:
    """Returns the reports of the processes that failed, by kind of error, as JSON."""
    failures: dict[str, list[str]] = {}
    for process, answer in enumerate(map(json.loads, answers)):
        if answer:
            word, text = answer
            who = "" if len(answers) == 1 else f"process {process}: "
            failures.setdefault(word, []).append(who + text.removeprefix(f"{what}: "))  # the error names it once
    for texts in failures.values():
        if len(texts) > _SHOWN:
            texts[_SHOWN:] = [f"and {len(texts) - _SHOWN} more processes"]
    return json.dumps(failures)
