"""HTTP/1.1 messages on sockets: heads are read whole, bodies pass by in large pieces."""

from __future__ import annotations

import socket
from collections.abc import Iterator

_PIECE = 256 << 10
_LIMIT = 1 << 20


class Closed(Exception):
    """The other side closed the connection where a message may end."""


class Head:
    """The first line and the headers of a message.

    Attributes:
        raw: As it was received, with the empty line at its end.
        first: The first line.
        headers: Values by names in small letters.
    """

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        self.first = first
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }

    @property
    def closes(self) -> bool:
        """Whether the connection ends with this message."""
        return self.headers.get("connection", "").lower() == "close"

    @property
    def length(self) -> int | None:
        """Bytes of the body; None if the head does not say it."""
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks that say their lengths."""
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def status(self) -> int:
        """Of a reply."""
        return int(self.first.split(" ", 2)[1])

    def without(self, name: str) -> bytes:
        """The head as bytes, without a header."""
        lines = self.raw[:-4].split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(name.encode() + b":")]
        return b"\r\n".join(kept) + b"\r\n\r\n"


class Reader:
    """Reads messages from a socket.

    Args:
        source: The socket. Its timeout is the reader's.
    """

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._rest = b""
        self._buffer = memoryview(bytearray(_PIECE))

    def head(self) -> Head:
        """The next head.

        Raises:
            Closed: There is no further message.
        """
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > _LIMIT:
                raise ConnectionError(f"a head of more than {_LIMIT} bytes")
            self._more(closed=Closed if not self._rest else ConnectionError)
        raw, self._rest = self._rest[: end + 4], self._rest[end + 4 :]
        return Head(raw)

    def body(self, head: Head, *, until_closed: bool = False) -> Iterator[bytes | memoryview]:
        """The body in pieces, as it is on the wire. A piece is good until the next is asked for.

        Args:
            head: Of the message.
            until_closed: Whether a body of unknown length reaches until the connection ends; else there is none.
        """
        if head.chunked:
            yield from self._chunks()
        elif head.length is not None:
            yield from self._exactly(head.length)
        elif until_closed:
            yield self._rest
            self._rest = b""
            while count := self._source.recv_into(self._buffer):
                yield self._buffer[:count]

    def _exactly(self, length: int) -> Iterator[bytes | memoryview]:
        if length and self._rest:
            piece, self._rest = self._rest[:length], self._rest[length:]
            length -= len(piece)
            yield piece
        while length:
            count = self._source.recv_into(self._buffer, min(length, len(self._buffer)))
            if not count:
                raise ConnectionError(f"the connection ended {length} bytes before the end of the body")
            length -= count
            yield self._buffer[:count]

    def _chunks(self) -> Iterator[bytes | memoryview]:
        while True:
            line = self._line()
            yield line
            length = int(line.split(b";")[0], 16)
            if length:
                yield from self._exactly(length + 2)
                continue
            while (trailer := self._line()) != b"\r\n":
                yield trailer
            yield b"\r\n"
            return

    def _line(self) -> bytes:
        while (end := self._rest.find(b"\r\n")) < 0:
            self._more(closed=ConnectionError)
        line, self._rest = self._rest[: end + 2], self._rest[end + 2 :]
        return line

    def _more(self, closed: type[Exception]) -> None:
        count = self._source.recv_into(self._buffer)
        if not count:
            raise closed("the connection ended")
        self._rest += bytes(self._buffer[:count])
