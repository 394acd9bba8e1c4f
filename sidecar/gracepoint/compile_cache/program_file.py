"""The form of a file that holds one compiled program. Pure.

A file is a line of text, a line of JSON and the bytes that JAX gave. The JSON holds JAX's key of the program, and the
number and the SHA-256 of the bytes. So a file that is incomplete or changed, or holds another program, is recognised
before JAX sees its bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re

_FIRST_LINE = b"gracepoint compiled program 1\n"
_SUFFIX = ".program"
_NAME = re.compile(r"[\w.-]{1,80}-[0-9a-f]{40}\.program", re.ASCII)
_NOT_IN_NAMES = re.compile(r"[^\w.-]", re.ASCII)


class NotThisProgram(Exception):
    """The bytes are not the file of the program that was asked for. The message says why."""


@dataclasses.dataclass(frozen=True)
class _Header:
    key: str
    bytes: int
    sha256: str


def file_name(key: str) -> str:
    """Returns the name of the file of a program.

    Args:
        key: JAX's key of the program. It begins with the name of the program, and may be long.
    """
    # A leading dot would hide the file.
    readable = _NOT_IN_NAMES.sub("_", key[:60]).lstrip(".") or "program"
    return f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:40]}{_SUFFIX}"


def is_file_name(name: str) -> bool:
    """Returns whether ``file_name`` can have returned the name."""
    return _NAME.fullmatch(name) is not None


def pack(key: str, program: bytes) -> bytes:
    """Returns the contents of the file of a program."""
    header = _Header(key, len(program), hashlib.sha256(program).hexdigest())
    return b"".join([_FIRST_LINE, json.dumps(dataclasses.asdict(header)).encode(), b"\n", program])


def unpack(key: str, data: bytes) -> bytes:
    """Returns the program in the contents of a file.

    Raises:
        NotThisProgram: The file is incomplete or damaged, holds another program, or was not written by Gracepoint.
    """
    if not data.startswith(_FIRST_LINE):
        if data and _FIRST_LINE.startswith(data):
            raise NotThisProgram(f"the file is incomplete: it has {len(data)} bytes")
        raise NotThisProgram(f"this version of Gracepoint did not write the file: it begins with {data[:30]!r}")
    line, end, program = data[len(_FIRST_LINE) :].partition(b"\n")
    if not end:
        raise NotThisProgram(f"the file is incomplete: it has {len(data)} bytes")
    try:
        found = _Header(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise NotThisProgram(f"the file is damaged: its second line cannot be read: {error}") from None
    if found.key != key:
        raise NotThisProgram(f"the file holds another program, {found.key!r}")
    if found.bytes != len(program):
        raise NotThisProgram(
            f"the file is incomplete: it has {len(program)} bytes of the program, expected {found.bytes}"
        )
    if found.sha256 != hashlib.sha256(program).hexdigest():
        raise NotThisProgram("the file is damaged: its bytes do not fit its SHA-256")
    return program
