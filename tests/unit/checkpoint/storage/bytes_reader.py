"""What the back ends of the tests return for an open file."""

from __future__ import annotations


class BytesReader:
    """Reads parts of bytes that are in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size_bytes = self.best_bytes = len(data)

    def read_into(self, out: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)
