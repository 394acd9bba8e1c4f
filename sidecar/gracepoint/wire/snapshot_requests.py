"""What a client shows to a snapshot server: a frame, and the capability that says what it may do.

A **frame** is a prefix, and a header that is a JSON object. ``gracepoint.snapshots.exchange`` says what the requests
and their answers are.

A **capability** is what the operator lets one attempt of a workload do, as a text that proves itself. The operator
gives the text to the pods of a workload over the authenticated channel. They show it to a server. A server that has the
key needs nothing else to judge it. The text is ``v1.KEY_ID.PAYLOAD.MAC``: the payload is a JSON object in URL-safe
Base64, and the MAC is HMAC-SHA256 of all that stands before its dot. During a rotation servers have two keys, and
``KEY_ID`` says which one was used.

A server refuses a capability with a field that it does not know, unlike a reader of messages: a newer operator may
limit something by it. The time of the end is absolute, as nothing else can be judged alone; the operator gives hours,
so the clocks of two machines may differ by minutes. This module is pure.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import json
import re
import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from gracepoint.errors import WireError

MAGIC = b"GPS1"
#: The magic number and the length of the header, in bytes.
PREFIX = struct.Struct(">4sI")
#: The longest header, in bytes. A hello with the longest capability fits.
LONGEST_HEADER_BYTES = 8192


def frame(**header: object) -> bytes:
    """Returns a frame with this header."""
    data = json.dumps(header, separators=(",", ":")).encode()
    if len(data) > LONGEST_HEADER_BYTES:
        raise WireError(f"expected a header of up to {LONGEST_HEADER_BYTES} bytes, found {len(data)}")
    return PREFIX.pack(MAGIC, len(data)) + data


#: The longest text, in characters.
LONGEST_CHARACTERS = 2048
#: The shortest key, in bytes: as long as the MAC.
SHORTEST_KEY_BYTES = 32
_VERSION = "v1"
_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
#: The largest number that every JSON reader keeps exactly.
_LARGEST = 1 << 53


class Right(StrEnum):
    """What a capability allows."""

    WRITE = "write"  # values of its own attempt
    READ = "read"  # values of its own attempt and of earlier ones
    DROP = "drop"  # the same
    STAT = "stat"  # figures of the whole server: for the operator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capability:
    """What one attempt of a workload may do.

    Attributes:
        namespace: Namespace of the workload.
        workload: UID of the workload.
        attempt: Number of the workload's attempt, which grows with each restart.
        rights: What is allowed.
        until: When it ends, in seconds since the epoch.
        max_bytes: Bytes that the workload may have at one server.
    """

    namespace: str
    workload: str
    attempt: int
    rights: frozenset[Right]
    until: int
    max_bytes: int

    def __post_init__(self) -> None:
        for field, name in (("namespace", self.namespace), ("workload", self.workload)):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise WireError(f"Capability.{field}: expected a name of Kubernetes, found {str(name)[:80]!r}")
        for field, number in (("attempt", self.attempt), ("until", self.until), ("max_bytes", self.max_bytes)):
            if type(number) is not int or not 0 <= number <= _LARGEST:
                raise WireError(f"Capability.{field}: expected an integer from 0, found {str(number)[:80]!r}")


class NotGenuine(WireError):
    """A text is no capability, or none that was made with a known key."""


def write_capability(capability: Capability, key_id: str, key: bytes) -> str:
    """Returns the text of a capability.

    Args:
        capability: What is allowed.
        key_id: Names the key: letters, digits, ``_`` and ``-``.
        key: At least 32 bytes that only the operator and the servers have.

    Raises:
        WireError: The key or its name cannot be used.
    """
    check_key(key_id, key)
    fields = dataclasses.asdict(capability) | {"rights": sorted(capability.rights)}
    payload = _text(json.dumps(fields, separators=(",", ":")).encode())
    signed = f"{_VERSION}.{key_id}.{payload}"
    return f"{signed}.{_text(_mac(key, signed))}"


def read_capability(text: str, keys: Mapping[str, bytes]) -> Capability:
    """Returns the capability that the text proves. Whether it has ended is for the caller to say.

    Args:
        text: What a client showed.
        keys: The known keys by their names.

    Raises:
        NotGenuine: It is none, or its key is not known, or its MAC is another. The message does not quote it.
    """
    parts = _parts(text)
    key = keys.get(parts[1])
    if key is None:
        raise NotGenuine(f"expected a capability with a known key ({', '.join(sorted(keys))}), found another key")
    if not hmac.compare_digest(_mac(key, text.rpartition(".")[0]), _bytes(parts[3])):
        raise NotGenuine("expected a capability of the operator's, found one whose MAC does not fit")
    return _parsed(_bytes(parts[2]))


def unproven_capability(text: str) -> Capability:
    """Returns what a capability says, without a proof: for who was given it, and does not have the key.

    Raises:
        NotGenuine: It is none.
    """
    return _parsed(_bytes(_parts(text)[2]))


def check_key(key_id: str, key: bytes) -> None:
    """Raises WireError if a key or its name cannot be used."""
    if not _KEY_ID.fullmatch(key_id):
        raise WireError(f"key: expected a name of up to 32 letters, digits, _ and -, found {len(key_id)} characters")
    if len(key) < SHORTEST_KEY_BYTES:
        raise WireError(f"key {key_id}: expected at least {SHORTEST_KEY_BYTES} bytes, found {len(key)}")


def _parts(text: str) -> list[str]:
    parts = text.split(".") if len(text) <= LONGEST_CHARACTERS and text.isascii() else []
    if len(parts) != 4 or parts[0] != _VERSION:
        raise NotGenuine(f"expected a capability, {_VERSION}.KEY_ID.PAYLOAD.MAC, found {len(text)} other characters")
    return parts


def _parsed(payload: bytes) -> Capability:
    """Reads what somebody with the key wrote. A newer operator may have written what this version does not know."""
    try:
        fields: Any = json.loads(payload)
        expected = {field.name for field in dataclasses.fields(Capability)}
        if not isinstance(fields, dict) or set(fields) != expected:
            raise WireError(f"Capability: expected the fields {', '.join(sorted(expected))}, found others")
        return Capability(**fields | {"rights": frozenset(map(Right, fields["rights"]))})
    except (WireError, ValueError, TypeError, RecursionError) as error:
        raise NotGenuine(f"cannot read the capability, though its MAC fits: {error}") from error


def _mac(key: bytes, signed: str) -> bytes:
    return hmac.digest(key, signed.encode(), hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise NotGenuine("cannot read the capability: it has a part that is not URL-safe Base64") from error
