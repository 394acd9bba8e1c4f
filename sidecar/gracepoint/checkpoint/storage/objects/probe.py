"""Checks at the start of a job that a store does what checkpoints rely on.

This module has no threads and no state.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gracepoint.checkpoint.storage import time_limit, undeleted
from gracepoint.checkpoint.storage.backend import StaleGeneration

if TYPE_CHECKING:
    from gracepoint.checkpoint.storage.objects.object_backend import ObjectBackend


logger = logging.getLogger(__name__)

#: Seconds that the deletion of the object may take, and TensorStore's read of it.
_CLEANUP_S = 10.0


def check(store: ObjectBackend, key: str) -> None:
    """Creates, reads, lists, replaces and deletes an object below ``key``, also with conditions that do not hold.

    Without conditions on deletions, a store is used with a warning.

    Raises:
        OSError: A request failed, or the store ignores a condition of a write. The message says which one.
    """
    probe = f"{key}/" * bool(key) + f".gracepoint-probe.{secrets.token_hex(8)}"
    try:
        made = store.create(probe, b"probe")
        if store.read(probe).data != b"probe":
            raise OSError(errno.EIO, f"{store.url(probe)}: was read with other contents than it was written with")
        store.tensorstore_error = _why_tensorstore_cannot_read(store, probe)
        if store.tensorstore_error is not None:
            logger.warning(
                "%s: %s. Saves in OCDBT are refused, and what is stored in OCDBT or compressed cannot be restored",
                store.url(key),
                store.tensorstore_error,
            )
        if not store.is_folder(key):
            raise OSError(errno.EIO, f"{store.url(key)}: the store lists no object there, though one was just written")
        with contextlib.suppress(FileExistsError):
            store.create(probe, b"other")
            raise _ignored(store, key, "the condition that an object must not exist")
        replaced = store.replace(probe, b"replaced", made)
        with contextlib.suppress(StaleGeneration):
            store.replace(probe, b"late", made)
            raise _ignored(store, key, "which version of an object a write may replace")
        store.delete_version(probe, made)
        found = store.found(probe)
        if found is None or found.generation != replaced:
            logger.warning(
                "%s: the store ignores which version of an object a deletion is for. Each version is looked at before "
                "it is deleted, and one process at a time deletes a step. But a deletion that the store carries out "
                "more than a minute late can hit a later save's object: let only one job at a time use the directory",
                store.url(key),
            )
    finally:
        # With a limit: if the store does not answer, the caller gets that error now, not after a second timeout.
        with undeleted.telling(store.url(probe)), time_limit.ended_by(_after(_CLEANUP_S)):
            store.delete_version(probe, None)


def _why_tensorstore_cannot_read(store: ObjectBackend, probe: str) -> str | None:
    """Returns why TensorStore cannot read what was just written. None if it can, is not installed, or gives no answer.

    It has requests, credentials, proxies and certificates of its own.
    """
    try:
        from gracepoint.checkpoint.storage.tensorstore_context import read_alone
    except ImportError:
        return None
    try:
        found = read_alone(store.kvstore_spec(probe), _CLEANUP_S)
    except TimeoutError:  # as the store may be slow now: later saves try it
        logger.warning(
            "%s: TensorStore did not answer within %g s, so it was not checked", store.url(probe), _CLEANUP_S
        )
        return None
    except (ValueError, OSError) as error:
        return f"TensorStore cannot read from the store: {str(error).partition(' [source')[0]}"
    return None if found == b"probe" else f"TensorStore reads {found!r} where {b'probe'!r} was just written"


def _after(seconds: float) -> Callable[[], None]:
    """Returns what raises TimeoutError once so many seconds have passed."""
    until_s = time.monotonic() + seconds

    def go_on() -> None:
        if time.monotonic() > until_s:
            raise TimeoutError(errno.ETIMEDOUT, f"not done after {seconds:g} s")

    return go_on


def _ignored(store: ObjectBackend, key: str, what: str) -> OSError:
    return OSError(
        errno.ENOTSUP,
        f"{store.url(key)}: the store ignores {what}, so two jobs could overwrite each other's checkpoints. "
        "Use a store with conditional writes",
    )
