"""Reading what others have written: one error for everything that can be wrong with it. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

#: What reading what others have written may raise.
CAUSES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: So much of what was found is shown at most: anybody may write as much as an object holds.
_SHOWN = 1000


class Unreadable(ValueError):
    """An object, or a part of one, is not what it is expected to be; the message says where, and what was found."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is said as ``Unreadable``.

    Args:
        what: What is read, for the message.

    Raises:
        Unreadable: A field is missing or mistyped, a time or number cannot be parsed, or it is nested too deeply.
    """
    try:
        yield
    except Unreadable:
        raise
    except CAUSES as error:
        raise Unreadable(f"{what}: {said(error)}") from error


def said(error: BaseException) -> str:
    """What an error says, for people; its kind too, where it is none of ours."""
    return shortened(str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}")


def shortened(text: str) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
