"""What clients and snapshot servers send each other over TLS: frames, keys and refusals.

A frame is a magic number, the length of a header, and the header: a JSON object with few fields. Each request is one
frame, and is answered by one frame before the next request:

| request | fields | the answer, if it is not a refusal |
|---|---|---|
| hello | capability | – ; the first request of a connection, and again when the capability is renewed |
| put | key, bytes, if_absent | – ; then the client sends the bytes and their CRC-32 (4 bytes), and is answered again |
| link | key, of, generation | – ; the value has the bytes of another one, which are held once |
| get | key, start, bytes, generation | bytes, size, checksum, generation; then the bytes |
| list | under, after | bytes; then a JSON array of entries in order. Asked again with the last key until it is empty |
| drop | under, or before_step | values, bytes |
| stat | – | bytes; then a JSON object |

A refusal has the field ``refused`` (a ``Refusal``) and ``message``, and the connection goes on, unless it was broken or
slow. A put is answered twice, so that nothing is sent before there is memory for it.

``receive`` and ``send`` move bytes between a socket and given memory, without copies, and at a least pace: each block
has ``stall_s`` seconds. They belong to the thread that calls them. Nothing here has state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import re
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from gracepoint.errors import GracepointError
from gracepoint.wire.snapshot_requests import LONGEST_HEADER_BYTES as LONGEST_HEADER_BYTES  # imported from here
from gracepoint.wire.snapshot_requests import MAGIC as MAGIC
from gracepoint.wire.snapshot_requests import PREFIX
from gracepoint.wire.snapshot_requests import frame as frame

CHECKSUM = struct.Struct(">I")
#: The longest key, in characters.
LONGEST_KEY_CHARACTERS = 512
#: Bytes that are moved before the clock is looked at, and whose checksum is computed while they are in a cache.
BLOCK_BYTES = 256 * 1024
#: Entries in one answer to ``list``.
ENTRIES_AT_ONCE = 200

_KEY = re.compile(r"(0|[1-9][0-9]{0,14})/(0|[1-9][0-9]{0,14})/(0|[1-9][0-9]{0,8})/([!-.0-~]+(?:/[!-.0-~]+)*)", re.ASCII)


class Refusal(StrEnum):
    """Why a server refuses a request. Also a label of its figures."""

    NOT_ADMITTED = "not admitted"  # no capability, or one that is not genuine or does not allow it
    EXPIRED = "expired"  # the capability has ended
    SUPERSEDED = "superseded"  # a newer attempt of the workload has come
    FULL = "full"  # no memory left, or none for this workload
    BUSY = "busy"  # too many connections or workloads, or the server is ending
    MALFORMED = "malformed"
    SLOW = "slow"
    NOT_FOUND = "not found"
    EXISTS = "exists"
    REPLACED = "replaced"  # the value has another generation
    DAMAGED = "damaged"  # the bytes that arrived do not fit their checksum


class SnapshotsUnavailable(GracepointError, ConnectionError):
    """A snapshot server was not reached, did not answer in time, or has no place for another connection."""


class SnapshotRefused(GracepointError, PermissionError):
    """A snapshot server does not allow it: the capability is missing, forged, too old, or of another attempt.

    Attributes:
        refusal: Why.
    """

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(errno.EACCES, message)
        self.refusal = refusal


class SnapshotsFull(GracepointError, OSError):
    """A snapshot server has no memory left, or none for this workload."""


class SnapshotReplaced(GracepointError, OSError):
    """A value of a snapshot server was replaced since its generation was learnt."""


class SnapshotDamaged(GracepointError, OSError):
    """The bytes that arrived do not fit the checksum of what was sent."""


class Malformed(GracepointError, ValueError):
    """A frame, or a field of one, is not as it must be."""


class ConnectionEnded(GracepointError, ConnectionError):
    """The other side ended the connection."""


def error_of(refusal: str, message: str) -> OSError:
    """Returns the error that a client raises for a refusal."""
    match refusal:
        case Refusal.NOT_FOUND:
            return FileNotFoundError(errno.ENOENT, message)
        case Refusal.EXISTS:
            return FileExistsError(errno.EEXIST, message)
        case Refusal.FULL:
            return SnapshotsFull(errno.ENOSPC, message)
        case Refusal.REPLACED:
            return SnapshotReplaced(errno.ESTALE, message)
        case Refusal.DAMAGED:
            return SnapshotDamaged(errno.EIO, message)
        case Refusal.NOT_ADMITTED | Refusal.EXPIRED | Refusal.SUPERSEDED:
            return SnapshotRefused(message, Refusal(refusal))
        case Refusal.MALFORMED:
            return OSError(errno.EINVAL, message)
        case _:
            return SnapshotsUnavailable(errno.EAGAIN, message)


@dataclasses.dataclass(frozen=True)
class ValuePlace:
    """What a key says.

    Attributes:
        step: The step.
        attempt: The attempt of the workload that wrote the value.
        part: The process part.
        path: The rest.
    """

    step: int
    attempt: int
    part: int
    path: str

    @classmethod
    def of(cls, key: str) -> ValuePlace:
        """Reads a key.

        Raises:
            Malformed: It is none.
        """
        match = _KEY.fullmatch(key) if len(key) <= LONGEST_KEY_CHARACTERS else None
        if match is None:
            raise Malformed(
                f"expected a key STEP/ATTEMPT/PART/PATH of up to {LONGEST_KEY_CHARACTERS} characters of ASCII, found "
                f"{key[:80]!r}"
            )
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4])

    @property
    def key(self) -> str:
        """The key."""
        return f"{self.step}/{self.attempt}/{self.part}/{self.path}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredValue:
    """What a server says of a value.

    Attributes:
        key: Its key.
        bytes: Its size.
        checksum: CRC-32 of all of it.
        generation: Identifies this version of the value.
        age_s: Seconds since it was written.
    """

    key: str
    bytes: int
    checksum: int
    generation: str
    age_s: float

    @property
    def place(self) -> ValuePlace:
        """Step, attempt, part and path."""
        return ValuePlace.of(self.key)


def is_under(key: str, folder: str) -> bool:
    """Returns whether a key is ``folder``, or in it. The empty folder has all keys."""
    return not folder or key == folder or key.startswith(f"{folder}/")


def number(header: Mapping[str, Any], name: str) -> int:
    """Returns a field that is an integer from 0.

    Raises:
        Malformed: It is not.
    """
    value = header.get(name)
    if type(value) is not int or value < 0 or value >= 1 << 63:
        raise Malformed(f"{name}: expected an integer from 0, found {str(value)[:80]!r}")
    return value


def text(header: Mapping[str, Any], name: str) -> str:
    """Returns a field that is a text.

    Raises:
        Malformed: It is not.
    """
    value = header.get(name)
    if not isinstance(value, str):
        raise Malformed(f"{name}: expected a text, found {str(value)[:80]!r}")
    return value


def read_frame(
    connection: ssl.SSLSocket, stall_s: float, go_on: Callable[[], None] | None = None, first: bytes = b""
) -> dict[str, Any]:
    """Reads a frame, and returns its header.

    Args:
        connection: The connection.
        stall_s: Seconds for each of its two parts.
        go_on: As of ``receive``.
        first: What was read of it before.

    Raises:
        Malformed: It is none. What follows cannot be read either.
        ConnectionEnded: The other side has ended the connection.
        TimeoutError: It took longer.
    """
    prefix = bytearray(first.ljust(PREFIX.size))
    receive(connection, memoryview(prefix)[len(first) :], stall_s, go_on)
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC or length > LONGEST_HEADER_BYTES:
        raise Malformed(f"expected {MAGIC!r} and at most {LONGEST_HEADER_BYTES} bytes, found {bytes(prefix)!r}")
    data = bytearray(length)
    receive(connection, memoryview(data), stall_s, go_on)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"expected a JSON object, found {bytes(data[:80])!r}") from error
    if not isinstance(header, dict):
        raise Malformed(f"expected a JSON object, found {bytes(data[:80])!r}")
    return header


def blocks(memory: memoryview) -> Iterator[memoryview]:
    """Yields the memory in blocks."""
    for start in range(0, len(memory), BLOCK_BYTES):
        yield memory[start : start + BLOCK_BYTES]


def receive(
    connection: ssl.SSLSocket, memory: memoryview, stall_s: float, go_on: Callable[[], None] | None = None
) -> None:
    """Fills all of the memory.

    Args:
        connection: The connection. Its timeout says how often ``go_on`` is called while nothing comes.
        memory: Bytes.
        stall_s: Seconds that each block may take.
        go_on: Called for each block, and while nothing comes. An error that it raises ends the wait.

    Raises:
        ConnectionEnded: The other side has ended the connection.
        TimeoutError: A block took longer.
    """
    for block in blocks(memory):
        _move(lambda rest: _received(connection, rest), block, stall_s, go_on)


def send(
    connection: ssl.SSLSocket, memory: memoryview, stall_s: float, go_on: Callable[[], None] | None = None
) -> None:
    """Sends all of the memory. Arguments and errors as of ``receive``."""
    for block in blocks(memory):
        _move(connection.send, block, stall_s, go_on)


def _received(connection: ssl.SSLSocket, rest: memoryview) -> int:
    count = connection.recv_into(rest, len(rest))
    if count == 0:
        raise ConnectionEnded("the other side ended the connection")
    return count


def _move(
    move: Callable[[memoryview], int], block: memoryview, stall_s: float, go_on: Callable[[], None] | None
) -> None:
    until_s, position, size_bytes = time.monotonic() + stall_s, 0, len(block)
    if go_on is not None:
        go_on()
    while position < size_bytes:
        try:
            position += move(block[position:])
        except TimeoutError:
            if go_on is not None:
                go_on()
        # Also after some bytes: who sends one now and then would stay for ever.
        if position < size_bytes and time.monotonic() >= until_s:
            raise TimeoutError(errno.ETIMEDOUT, f"moved {position} of {size_bytes} bytes in {stall_s:g} s")


def shut_down(connection: socket.socket) -> None:
    """Ends whatever another thread does with a connection. ``SSLSocket.shutdown`` would take its TLS away from it."""
    with contextlib.suppress(OSError):  # not connected any more
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
