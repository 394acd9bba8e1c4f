"""JSON objects that name their format and carry a checksum of their own bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew

# The last entry: the checksum of all bytes before it.
_CHECKSUM = b', "checksum": '


def seal(form: str, fields: Mapping[str, Any]) -> bytes:
    """Returns ``fields`` as JSON, with the name of their format and a checksum."""
    body = json.dumps({"format": form, **fields}).removesuffix("}").encode()
    return body + _CHECKSUM + str(crc32(body)).encode() + b"}"


def is_whole(data: bytes) -> bool:
    """True if the contents of a file, in any format, match the checksum that they carry."""
    body, _, checksum = data.rpartition(_CHECKSUM)
    return checksum == str(crc32(body)).encode() + b"}"


def unsealed(forms: Sequence[str], data: bytes, where: str) -> dict[str, Any]:
    """Returns the fields that were sealed.

    Args:
        forms: The formats that can be read, the newest one last.
        data: The contents of a file.
        where: Names the file in errors.

    Raises:
        CheckpointCorrupt: The fields cannot be read.
        CheckpointTooNew: This version does not know their format.
    """
    if not is_whole(data):
        raise CheckpointCorrupt(f"{where} cannot be read: its checksum does not fit its contents")
    try:
        value = dict(json.loads(data.rpartition(_CHECKSUM)[0] + b"}"))
        found = value.pop("format")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{where} cannot be read: {error!r}") from error
    if found not in forms:
        form = forms[-1]
        if _is_newer(found, form):
            raise CheckpointTooNew(
                f"{where} was written by a newer Gracepoint: found format {found!r}, expected {form!r}. Install in the "
                "image the version of gracepoint that wrote it, or train in another directory; it is left as it is"
            )
        raise CheckpointCorrupt(f"{where}: found format {found!r}, expected {form!r}")
    return value


def _is_newer(found: Any, form: str) -> bool:
    name, _, version = form.partition("/")
    number = found.removeprefix(f"{name}/") if isinstance(found, str) else ""
    return number.isdecimal() and int(number) > int(version)
