"""Stops a worker process at a named point of a save, until a file says that it may go on. Loads no JAX.

The trainer of a test sends ``write_handed`` to its worker in place of the real function. ``TEST_POINT`` and
``TEST_WHERE`` of the environment name the point and the folder of the files.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gracepoint.checkpoint.saving import save_worker
from gracepoint.checkpoint.saving.part import SavePart
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.writing import chunk_writer

POINT, WHERE = "TEST_POINT", "TEST_WHERE"
_PATIENCE_S = 120.0
_real = save_worker.write_handed


def write_handed(part: SavePart, *arguments: Any) -> None:
    """Writes a part as the engine's function does, and stops at the point on the way."""
    where = Path(os.environ[WHERE])
    (where / f"worker.{part.process_index}").write_text(str(os.getpid()))
    POINTS[os.environ[POINT]](functools.partial(_stop, where, part.process_index))
    _real(part, *arguments)


def _stop(where: Path, process_index: int) -> None:
    (where / f"at.{process_index}").touch()
    until_s = time.monotonic() + _PATIENCE_S
    while not (where / "go").exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"nobody made {where / 'go'}")
        time.sleep(0.005)


def _around(module: Any, name: str, when: Callable[..., bool], stop: Callable[[], None], *, after: bool) -> None:
    """Stops before or after the first call of ``module.name`` whose arguments ``when`` is true for.

    After a call means after one that returned: a writer that gives way to another one raises an error, and the other
    one writes the file again.
    """
    real, stopped = getattr(module, name), itertools.count()

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        counts = when(*arguments, **keywords)
        if counts and not after and next(stopped) == 0:
            stop()
        result = real(*arguments, **keywords)
        if counts and after and next(stopped) == 0:
            stop()
        return result

    setattr(module, name, wrapped)


def _always(*_: Any, **__: Any) -> bool:
    return True


def _is_written_here(_: Any, __: Any, chunk: Any, *___: Any) -> bool:
    return bool(chunk.mine)


POINTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "before any file": lambda stop: stop(),
    "in the middle of the files": lambda stop: _around(
        chunk_writer, "_write_chunk", _is_written_here, stop, after=True
    ),
    "before the done-record": lambda stop: _around(RenameCommit, "record", _always, stop, after=False),
    "after the done-record": lambda stop: _around(RenameCommit, "record", _always, stop, after=True),
}
