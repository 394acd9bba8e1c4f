"""Records what processes do to files, as the kernel sees it: TensorStore's threads and Python alike.

One ``strace`` follows a nursery and all that it forks, so that the calls of several processes stand in one log, in one
order. A call is noted twice, when it is entered and when it is left; what it does to the file system happens between
the two. Processes can put words of their own into the log with ``mark``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.multiprocess.launcher import new_nursery
from tests.multiprocess.nursery import Nursery

#: Everything that changes files or folders or makes changes durable, and ``access`` for marks.
_CALLS = (
    "open,openat,creat,mkdir,mkdirat,mknod,mknodat,link,linkat,symlink,symlinkat,rename,renameat,renameat2,unlink,"
    "unlinkat,rmdir,write,writev,pwrite64,pwritev,pwritev2,truncate,ftruncate,fallocate,copy_file_range,sendfile,splice,"
    "fsync,fdatasync,access,faccessat,faccessat2"
)
_COMMAND = ("strace", "-f", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", "16777216", "-e", "signal=none", "-e")
_MARKS = "/marks-of-tests/"

# Every string and path is written in hexadecimal (-xx), so that no text can look like strace's own.
_WHOLE = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+).*")
_ENTERED = re.compile(r"(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*?) ?<unfinished \.\.\.>")
_LEFT = re.compile(r"(?P<pid>\d+) +<\.\.\. (?P<name>\w+) resumed>(?P<arguments>.*)\) += (?P<result>-?\d+).*")
_HEX = r"((?:\\x[0-9a-f]{2})*)"


@dataclasses.dataclass(frozen=True)
class Call:
    """A system call that succeeded, or a mark.

    Attributes:
        name: Of the call.
        arguments: As strace writes them.
        result: What it returned.
        entered: Position in the log where it began.
        left: Position where it had ended.
    """

    name: str
    arguments: str
    result: int
    entered: int
    left: int

    @property
    def strings(self) -> list[bytes]:
        return [_bytes(text) for text in re.findall(f'"{_HEX}"', self.arguments)]

    @property
    def paths(self) -> list[str]:
        """The files that its descriptors stand for."""
        return [os.fsdecode(_bytes(text)) for text in re.findall(f"<{_HEX}>", self.arguments)]

    @property
    def numbers(self) -> list[int]:
        """The arguments that are plain numbers."""
        return [int(text) for text in re.findall(r"(?<![\w.])\d+(?=,|$)", self.arguments)]

    @property
    def mark(self) -> str | None:
        """What a process said by ``mark``; None for any other call."""
        if self.strings and (text := os.fsdecode(self.strings[0])).startswith(_MARKS):
            return text.removeprefix(_MARKS)
        return None


def missing() -> str | None:
    """Why nothing can be recorded here, with what to do; None if it can."""
    if shutil.which("strace") is None:
        return "there is no strace: `make system` installs it (Debian's package strace)"
    tried = subprocess.run(
        [*_COMMAND, _CALLS, "-o", os.devnull, "true"], capture_output=True, text=True, timeout=30, check=False
    )
    return None if tried.returncode == 0 else f"strace cannot be used here: {tried.stderr.strip()}"


def mark(text: str) -> None:
    """Notes ``text`` in the log of whoever traces this process."""
    os.access(_MARKS + text, os.F_OK)


@contextlib.contextmanager
def recording(log: Path, calls: str = _CALLS) -> Iterator[Nursery]:
    """Yields a nursery whose processes' ``calls`` are recorded in ``log``, which is complete after the block."""
    nursery = new_nursery(under=[*_COMMAND, calls, "-o", str(log)])
    try:
        yield nursery
    finally:
        nursery.close()


def read(log: Path) -> list[Call]:
    """Returns the calls that succeeded, and the marks, in the order in which they were entered."""
    calls = []
    begun: dict[str, tuple[str, str, int]] = {}  # by thread
    with log.open() as lines:
        for position, line in enumerate(lines):
            if found := _ENTERED.fullmatch(line.rstrip("\n")):
                begun[found["pid"]] = found["name"], found["arguments"], position
                continue
            if found := _LEFT.fullmatch(line.rstrip("\n")):
                name, arguments, entered = begun.pop(found["pid"])
                assert name == found["name"], line
                call = Call(name, arguments + found["arguments"], int(found["result"]), entered, position)
            elif found := _WHOLE.fullmatch(line.rstrip("\n")):
                call = Call(found["name"], found["arguments"], int(found["result"]), position, position)
            else:
                continue  # a process ended
            if call.result >= 0 or call.mark is not None:
                calls.append(call)
    return sorted(calls, key=lambda call: call.entered)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
