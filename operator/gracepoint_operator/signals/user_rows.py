"""Reads users' own rows from the file that the chart mounts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from pydantic import Field, ValidationError

from gracepoint_operator.resources.base import Model
from gracepoint_operator.signals.catalogue import BUILT_IN
from gracepoint_operator.signals.rows import Row


class UserRowsError(ValueError):
    """Users' rows cannot be used. The message names each wrong field, what was expected and what was found."""


class _File(Model):
    rows: list[Row] = Field(default=[], max_length=256)


def read_user_rows(path: Path) -> tuple[Row, ...]:
    """Returns users' rows, in the order of the file.

    Args:
        path: A JSON file, ``{"rows": [...]}``, in the form of the chart's value ``signals``.

    Raises:
        UserRowsError: The file cannot be read, a row is wrong, or a name is used already.
    """
    try:
        text = path.read_text(encoding="utf-8")
        read = _File.model_validate_json(text)
    except OSError as error:
        raise UserRowsError(f"signals: {path} cannot be read: {error}") from error
    except ValidationError as error:
        raise UserRowsError(
            "; ".join(_said(item["loc"], item["msg"], item["input"]) for item in error.errors())
        ) from error
    taken = {row.name for row in BUILT_IN}
    counts = Counter(row.name for row in read.rows)
    for index, row in enumerate(read.rows):
        if row.name in taken or counts[row.name] > 1:
            whose = "a built-in row's" if row.name in taken else "another row's too"
            raise UserRowsError(f"signals.rows[{index}].name: expected a name of its own, found {row.name!r}, {whose}")
    return tuple(read.rows)


def _said(location: tuple[int | str, ...], message: str, found: object) -> str:
    path = "signals" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return f"{path}: {message} (found {str(found)[:80]!r})"
