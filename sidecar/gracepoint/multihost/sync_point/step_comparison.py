"""What the processes tell each other at the agreed sync point, and the answer that all of them get.

Each process tells its step and a text. The process that comes last compares the steps, merges the texts, and writes
the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from gracepoint.errors import AgreementError


def word(step: int, text: str) -> str:
    """Returns what a process tells the others: its step, and a text of its own."""
    return f"{step} {text}"


def compare(words: Sequence[str], sync_point: int, merge: Callable[[list[str]], str]) -> str:
    """Returns the answer for all processes, which ``result`` reads.

    Args:
        words: The words of all processes, in the order of their indices.
        sync_point: Number of the sync point at which they are.
        merge: Called with the texts of the words, if all steps are equal. An ``AgreementError`` that it raises is
            raised in all processes.
    """
    told = [each.split(" ", 1) for each in words]
    first = told[0][0]
    for process, (step, _) in enumerate(told):
        if step != first:
            wrong = (
                f"at sync point {sync_point} process 0 is at step {first} and process {process} at step {step}: every "
                "process must call step() once for each step, with the same number"
            )
            return json.dumps({"wrong": wrong})
    try:
        return json.dumps({"merged": merge([text for _, text in told])})
    except AgreementError as error:
        return json.dumps({"wrong": str(error)})


def result(answer: str) -> str:
    """Returns what ``merge`` returned.

    Raises:
        AgreementError: Two processes are at different steps, or ``merge`` raised this error.
    """
    found: dict[str, str] = json.loads(answer)
    if "wrong" in found:
        raise AgreementError(found["wrong"])
    return found["merged"]
