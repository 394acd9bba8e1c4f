"""Turns what a user gives into a ``StoragePath``: an absolute path, or the URI of a bucket or of memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gracepoint.arguments import shown
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointRefused, SettingsError
from gracepoint.machine import LocalPath
from gracepoint.settings import location

#: A location as users give it.
UserPath = str | os.PathLike[str]


def storage_path(path: UserPath | StoragePath) -> StoragePath:
    """Returns the location that a user gave: an absolute path, which may begin with ``~``, or a URI.

    Known URIs are ``file://``, ``gs://bucket/name``, ``s3://bucket/name``, and ``memory://`` within one process.

    Raises:
        SettingsError: The location is another kind of URI, is not absolute, has a variable that nobody replaces, or its
            extra is not installed.
    """
    if isinstance(path, StoragePath):
        return path
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise SettingsError(f"expected an absolute path, or a URI as gs://bucket/name, found {shown(path)}")
    text = location("checkpoint directory", text)
    scheme, rest, _ = text.partition("://")
    if not rest:
        local = Path(text)
        if not local.is_absolute():
            raise SettingsError(
                f"checkpoint directory {text!r}: expected an absolute path, or a URI as gs://bucket/name"
            )
        return local_path(local)
    opened = _SCHEMES.get(scheme)
    if opened is None:
        raise SettingsError(
            f"checkpoint directory {text!r}: {scheme}:// is not known; expected an absolute path, or one of "
            f"{', '.join(f'{each}://' for each in sorted(_SCHEMES))}"
        )
    return opened(text)


def local_path(path: UserPath) -> StoragePath:
    """Returns the location of a file or folder of this host, whatever is in its name. It need not come from a user."""
    return PosixPath(str(Path(path)))


def from_text(text: str) -> StoragePath:
    """Returns the location that has this text (``str``)."""
    return storage_path(text) if "://" in text else local_path(text)


def local_folder(place: StoragePath, name: str) -> LocalPath:
    """Returns the folder of an item in the local file system, which its handler reads and writes.

    Raises:
        CheckpointRefused: The store is not a file system.
    """
    try:
        return place.local()
    except TypeError as error:
        raise CheckpointRefused(
            f"item {name!r}: its handler reads and writes files, and {place} is in no file system: save its values as "
            "leaves of the tree"
        ) from error


def _file(uri: str) -> StoragePath:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise SettingsError(f"checkpoint directory {uri!r}: expected file:///path, without a host")
    return local_path(unquote(parts.path))  # a dollar sign may be written as %24


def _memory(uri: str) -> StoragePath:
    from gracepoint.checkpoint.storage.in_memory import MemoryPath  # it needs TensorStore

    parts = urlsplit(uri)
    return MemoryPath(unquote(f"{parts.netloc}{parts.path}").strip("/"))


def _bucket(uri: str) -> StoragePath:
    from gracepoint.checkpoint.storage.objects.object_store import object_path

    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise SettingsError(
            f"checkpoint directory {uri!r}: expected {scheme}://bucket/name, found bucket {bucket!r}. Its name needs 3 "
            f"characters or more: lower-case letters, digits, '-', '_' and '.'"
        )
    if _ODD.search(key):
        raise SettingsError(f"checkpoint directory {uri!r}: expected no empty part, '.', '..', '?' or '#' in its name")
    return object_path(uri)


_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII)
_ODD = re.compile(r"(^|/)\.{1,2}(/|$)|//|[?#]|^/")
_SCHEMES: dict[str, Callable[[str], StoragePath]] = {"file": _file, "memory": _memory, "gs": _bucket, "s3": _bucket}
