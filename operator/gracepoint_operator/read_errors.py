"""One error for everything that can be wrong with an object that somebody else wrote. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

#: Errors that reading such an object may raise.
CAUSES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
#: Messages show at most this number of characters of what was found.
_SHOWN = 1000
#: And of the object's kind, namespace and name, which nobody has checked before the object is read.
_SHOWN_OF_NAMES = 600


class Unreadable(ValueError):
    """An object, or a part of one, cannot be read. The message says where, and what was found."""


@contextlib.contextmanager
def reading(subject: str) -> Iterator[None]:
    """Turns every error of ``CAUSES`` into ``Unreadable``.

    Args:
        subject: What is read, for the message.

    Raises:
        Unreadable: A field is missing or has a wrong type, a time or number cannot be parsed, or the object is nested
            too deeply.
    """
    try:
        yield
    except Unreadable:
        raise
    except CAUSES as error:
        raise Unreadable(f"{shortened(subject, _SHOWN_OF_NAMES)}: {said(error)}") from error


def said(error: BaseException) -> str:
    """Returns the message of an error for users, with the class of the error unless it is ``Unreadable``."""
    return shortened(str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}")


def shortened(text: str, shown: int = _SHOWN) -> str:
    """Returns the text, or only its beginning if it is long."""
    return text if len(text) <= shown else f"{text[:shown]}... ({len(text)} characters)"
