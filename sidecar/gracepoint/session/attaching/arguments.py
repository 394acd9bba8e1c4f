"""Checks of arguments of ``attach`` that are no settings of the environment."""

from __future__ import annotations

import os
from typing import Any

from gracepoint.arguments import shown
from gracepoint.errors import SettingsError

#: Placeholders in the directory of a policy, which the operator replaces.
_PLACEHOLDERS = ("{namespace}", "{jobset}")


def checked_directory(directory: Any) -> str | None:
    """Returns the directory as a text. None if none is given.

    Raises:
        SettingsError: It is no path, or has a placeholder that only the operator fills in.
    """
    if directory is None:
        return None
    text = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise SettingsError(f"attach(directory=...): expected a path or a URI, found {shown(directory)}")
    for placeholder in _PLACEHOLDERS:
        if placeholder in text:
            raise SettingsError(
                f"attach(directory=...): found {text!r}, but only a CheckpointPolicy's directory has {placeholder}, "
                f"which the operator fills in. Write the name itself, or call attach() without a directory in a job "
                f"that has a policy"
            )
    return text


def check_receiver(receiver: Any) -> None:
    """Checks that a receiver can be started and closed.

    Raises:
        SettingsError: It cannot.
    """
    missing = [name for name in ("start", "close") if not callable(getattr(receiver, name, None))]
    if receiver is not None and missing:
        raise SettingsError(
            f"attach(receiver=...): expected an object with start(mailbox) and close(), found {shown(receiver)} "
            f"without {' and '.join(missing)}"
        )
