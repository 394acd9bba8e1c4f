"""Functions that run in a forked child, as a data loader's workers do."""

from __future__ import annotations

import os
import selectors
import signal
import warnings
from collections.abc import Callable

_TIMEOUT_S = 60.0


def forked(function: Callable[[], object], *, meanwhile: Callable[[], object] = lambda: None) -> str:
    """Calls ``function`` in a forked child. Returns its result as text, or its error as ``Class: message``.

    Args:
        function: What the child does.
        meanwhile: Called in this process while the child lives, after its function has returned.
    """
    reading, writing = os.pipe()
    over, ends = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks beside threads, which these tests are about
        child = os.fork()
    if child == 0:
        try:
            os.close(ends)
            try:
                said = str(function())
            except BaseException as error:  # noqa: BLE001 - told to the parent
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode()[:4000])
            os.close(writing)
            os.read(over, 1)  # until the parent closes its end
        finally:
            os._exit(0)
    os.close(writing)
    os.close(over)
    try:
        found = b""
        with selectors.DefaultSelector() as selector:
            selector.register(reading, selectors.EVENT_READ)
            while True:
                assert selector.select(_TIMEOUT_S), "the forked child does not answer"
                data = os.read(reading, 4000)
                if not data:
                    break
                found += data
        meanwhile()
    finally:
        os.close(reading)
        os.close(ends)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found.decode()
