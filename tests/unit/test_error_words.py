"""Errors keep their kind on the way from one process to the others."""

from __future__ import annotations

import pytest

from gracepoint import errors
from gracepoint.errors import CheckpointCorrupt, CheckpointError, GracepointError, from_word, to_word


def checkpoint_errors() -> list[type[CheckpointError]]:
    found, todo = [], [CheckpointError]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", checkpoint_errors())
def test_each_checkpoint_error_comes_back_as_itself(kind: type[CheckpointError]) -> None:
    assert from_word(to_word(kind("text"))) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        pytest.param(FileNotFoundError(), CheckpointCorrupt, id="missing file"),
        pytest.param(OSError(), CheckpointError, id="other error of the system"),
        pytest.param(GracepointError(), CheckpointError, id="other error of the library"),
        pytest.param(KeyError(), CheckpointError, id="unexpected"),
    ],
)
def test_other_errors_come_back_as_the_nearest_kind(error: Exception, kind: type[CheckpointError]) -> None:
    assert from_word(to_word(error)) is kind


def test_an_unknown_word_is_a_checkpoint_error() -> None:
    assert from_word("of a newer version") is CheckpointError
