"""Counts the programs that JAX compiles, and those that it takes from a cache instead.

JAX tells of them by its monitoring (``jax.monitoring``). The threads that compile call the listeners. The counts are
guarded by a lock. There are no threads here. ``close`` ends the listening.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from typing import Any

from gracepoint import trace

_PREFIX = "/jax/core/compile/"
#: The end of JAX's name of an event -> the word for it in the trace. The last event makes the program, or loads it.
_MAKES = "backend_compile_duration"
_WORDS = {"jaxpr_trace_duration": "trace", "jaxpr_to_mlir_module_duration": "lower", _MAKES: "compile or load"}
_FOUND = "/jax/compilation_cache/cache_hits"
_TRACED_S = 0.001  # shorter events are not in the trace: JAX traces hundreds of small functions


@dataclasses.dataclass(frozen=True)
class ProgramCounts:
    """What JAX did from the start of the watch on.

    Attributes:
        there: Number of programs that were compiled, or loaded from a cache that outlives the process.
        found: Number of programs that were loaded.
        newest_s: When the newest of these programs was there, in monotonic seconds. None: there is none.
    """

    there: int = 0
    found: int = 0
    newest_s: float | None = None

    @property
    def compiled(self) -> int:
        """Number of programs that were compiled."""
        return max(0, self.there - self.found)  # a program that is being loaded is found before it is there


class ProgramWatch:
    """See the module. Begins to count when it is made."""

    def __init__(self) -> None:
        import jax.monitoring

        self._lock = threading.Lock()
        self._programs = ProgramCounts()
        self._named = collections.Counter[str]()
        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        self._listens = True

    def count(self, name: str) -> int:
        """Returns how many programs of this name there were, such as ``jit(train_step)``."""
        return self._named[name]

    @property
    def programs(self) -> ProgramCounts:
        """What there was until now."""
        return self._programs

    def close(self) -> None:
        """Ends the listening. Safe to repeat."""
        import jax.monitoring

        if self._listens:
            self._listens = False
            with contextlib.suppress(AssertionError, ValueError):  # somebody has removed all listeners
                jax.monitoring.unregister_event_listener(self._event)
                jax.monitoring.unregister_event_duration_listener(self._duration)

    def _event(self, event: str, **_: Any) -> None:
        if event == _FOUND:
            with self._lock:
                self._programs = dataclasses.replace(self._programs, found=self._programs.found + 1)

    def _duration(self, event: str, seconds: float, **about: Any) -> None:
        kind = event.removeprefix(_PREFIX)
        if kind not in _WORDS:
            return
        if seconds >= _TRACED_S:
            trace.ended(f"{_WORDS[kind]} {about.get('fun_name', '')}".rstrip(), seconds)
        if kind == _MAKES:
            with self._lock:
                before = self._programs
                self._named[str(about.get("fun_name", ""))] += 1
                self._programs = ProgramCounts(before.there + 1, before.found, time.monotonic())
