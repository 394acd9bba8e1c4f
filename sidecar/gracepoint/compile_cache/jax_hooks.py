"""Puts a ``ProgramCache`` into JAX, and takes it out again.

JAX has a cache of compiled programs, which by its public settings is a directory. Gracepoint gives it an object in its
place. So programs can be in any store that checkpoints can be in, no reader ever sees half a program, and a program is
known to be complete when JAX hands it over. Two functions of JAX are wrapped:

* ``compile_or_get_cached``, to know on which processes' devices a program runs.
* ``_cache_write``. JAX writes in process 0 only. But other processes have programs for their own devices, such as those
  that slice arrays for a save. So here the cache says which process writes a program.

These functions are private to JAX. ``install`` checks whether they are as in the versions that are known (0.10 and
0.12), and raises ``CannotInstall`` if they are not. The only state is what was there before, for ``uninstall``. There
are no threads: the wrapped functions run in the threads that compile, and note the processes of the program in a
thread-local variable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any, Protocol

from gracepoint.multihost import global_state

logger = logging.getLogger(__name__)

_COMPILE_ARGUMENTS = ("backend", "computation", "devices")
_WRITE_ARGUMENTS = ("cache_key", "compile_time_secs", "module_name", "backend", "executable")
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"
#: JAX's own value: programs that compile faster are not kept.
_DEFAULT_THRESHOLD_S = 1.0


class CannotInstall(Exception):
    """JAX's cache cannot be used. The message says why."""


class Programs(Protocol):
    """What answers JAX: ``ProgramCache``."""

    def get(self, key: str, processes: Set[int]) -> bytes | None: ...

    def keeps(self, processes: Set[int]) -> bool: ...

    def put(self, key: str, processes: Set[int], program: bytes) -> None: ...


class JaxHooks:
    """See the module.

    Args:
        programs: What answers JAX.
    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._cache = _JaxCache(programs, self)
        self._running = threading.local()
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Makes JAX use the programs.

        Raises:
            CannotInstall: The user has set JAX's own cache, or has switched it off. Or the cache is in use already, or
                this version of JAX is different from those that are known.
        """
        import jax

        try:
            from jax._src import compilation_cache, compiler
        except ImportError as error:
            raise CannotInstall(f"jax {jax.__version__} is not known: {error}") from None
        _check_not_the_users()
        missing = [name for name in ("_cache", "_cache_initialized") if not hasattr(compilation_cache, name)]
        unknown = [
            name
            for name, arguments in (("compile_or_get_cached", _COMPILE_ARGUMENTS), ("_cache_write", _WRITE_ARGUMENTS))
            if not _begins_with(getattr(compiler, name, None), arguments)
        ]
        if missing or unknown:
            raise CannotInstall(f"jax {jax.__version__} is not known: {', '.join([*missing, *unknown])} differ")
        if compilation_cache._cache is not None:  # noqa: SLF001
            raise CannotInstall("JAX's compilation cache is in use already in this process")
        self._replace(compiler, "compile_or_get_cached", self._compile(compiler.compile_or_get_cached))
        self._replace(compiler, "_cache_write", self._write(compiler._cache_write, compilation_cache))  # noqa: SLF001
        self._replace(compilation_cache, "_cache", self._cache)
        self._replace(compilation_cache, "_cache_initialized", True)
        if getattr(jax.config, _THRESHOLD) == _DEFAULT_THRESHOLD_S:
            jax.config.update(_THRESHOLD, 0.0)
            self._undo.append(lambda: jax.config.update(_THRESHOLD, _DEFAULT_THRESHOLD_S))

    def uninstall(self) -> None:
        """Puts back what ``install`` replaced. Safe to repeat. A function that others have replaced since is left."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    @property
    def processes(self) -> Set[int]:
        """The processes on whose devices the program runs that this thread compiles. Empty if that is not known."""
        found: Set[int] = getattr(self._running, "processes", frozenset())
        return found

    @contextlib.contextmanager
    def _on(self, processes: Set[int]) -> Iterator[None]:
        before = self.processes
        self._running.processes = processes
        try:
            yield
        finally:
            self._running.processes = before

    def _compile(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def compile_or_get_cached(backend: Any, computation: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
            with self._on(frozenset(device.process_index for device in devices.flat)):
                return real(backend, computation, devices, *args, **kwargs)

        return compile_or_get_cached

    def _write(self, real: Callable[..., None], compilation_cache: Any) -> Callable[..., None]:
        @functools.wraps(real)
        def cache_write(
            cache_key: str,
            compile_time_secs: float,
            module_name: str,
            backend: Any,
            executable: Any,
            *host_callbacks: Any,  # none from JAX 0.12 on, which gives them to the program as it loads it
        ) -> None:
            if not self._programs.keeps(self.processes):
                return
            if global_state.process_id == 0:
                real(cache_key, compile_time_secs, module_name, backend, executable, *host_callbacks)
                return
            import jax

            # JAX does the same in process 0. A program that calls back into Python has addresses of this process in it.
            if any(host_callbacks) or compile_time_secs < getattr(jax.config, _THRESHOLD):
                return
            try:
                compilation_cache.put_executable_and_time(
                    cache_key, module_name, executable, backend, int(compile_time_secs)
                )
            except Exception as error:  # noqa: BLE001 - the program is compiled, and the training goes on
                logger.warning("compiled program %s is not kept: %s", module_name, error)

        return cache_write

    def _replace(self, module: Any, name: str, value: Any) -> None:
        before = getattr(module, name)
        setattr(module, name, value)

        def undo() -> None:
            if getattr(module, name) is value:
                setattr(module, name, before)

        self._undo.append(undo)


class _JaxCache:
    """What JAX calls. It has the methods of JAX's ``CacheInterface``."""

    #: JAX shows it in a log line when its cache is reset.
    _path = Path("gracepoint")

    def __init__(self, programs: Programs, hooks: JaxHooks) -> None:
        self._programs = programs
        self._hooks = hooks

    def get(self, key: str) -> bytes | None:
        return self._programs.get(key, self._hooks.processes)

    def put(self, key: str, value: bytes) -> None:
        self._programs.put(key, self._hooks.processes, value)


def _check_not_the_users() -> None:
    import jax

    own: str | None = jax.config.jax_compilation_cache_dir
    if own:
        raise CannotInstall(
            f"JAX's own cache is set, and counts: jax_compilation_cache_dir (JAX_COMPILATION_CACHE_DIR) is {own!r}. "
            f"Unset it to keep compiled programs beside the checkpoints"
        )
    if not jax.config.jax_enable_compilation_cache:
        raise CannotInstall("JAX's cache is switched off: jax_enable_compilation_cache is False")


def _begins_with(function: Callable[..., Any] | None, arguments: tuple[str, ...]) -> bool:
    if function is None:
        return False
    try:
        found = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return found[: len(arguments)] == arguments
