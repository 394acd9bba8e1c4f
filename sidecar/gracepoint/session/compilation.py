"""Functions that are compiled in the background during the restore, and counts of what JAX compiles.

* The training thread traces a function, in ``Compilations.begin``. To trace it is to run the user's Python code, which
  may depend on what is set for the thread: a mesh, a precision, a library's rules for axes.
* The **compiling thread** ("gracepoint-compile", daemon) lowers and compiles one function after the other, in the order
  in which they were given. The order is the same in all processes. It ends when there is no function left, and is
  started again for the next one. ``Compilations.close`` waits for it: an interpreter must not end while it compiles.

The result is in JAX's own memory, where the call of the jitted function finds it. Otherwise that is an ordinary call:
other arguments are compiled again, and static arguments and donation are those of ``jax.jit``. The queue is guarded by
``_changed``. Each ``_Job`` is written by the compiling thread before its ``done`` is set, and read afterwards.

``ProgramWatch`` counts the programs that JAX compiles, and those that it takes from a cache instead, as
``jax.monitoring`` reports them. The threads that compile call its listeners; a lock guards the counts. ``close`` ends
the listening.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gracepoint import trace
from gracepoint.arguments import shown
from gracepoint.errors import SettingsError
from gracepoint.multihost import global_state
from gracepoint.threads import DaemonThread, Ending, NoThread, start_thread
from gracepoint.wire.names import COMPILATION_CACHE_OFF, COMPILATION_CACHE_ON, PROGRAMS_FOLDER

_PREFIX = "/jax/core/compile/"
#: The end of JAX's name of an event -> its name in the trace. The last event makes the program, or loads it.
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
    """Counts the programs that JAX compiles, and those that it takes from a cache. Begins to count when it is made."""

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

    def _duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        kind = event.removeprefix(_PREFIX)
        if kind not in _WORDS:
            return
        function = str(kwargs.get("fun_name", ""))
        if duration_secs >= _TRACED_S:
            trace.ended(f"{_WORDS[kind]} {function}".rstrip(), duration_secs)
        if kind == _MAKES:
            with self._lock:
                before = self._programs
                self._named[function] += 1
                self._programs = ProgramCounts(before.there + 1, before.found, time.monotonic())


logger = logging.getLogger(__name__)

#: The interpreter's end waits so long for a compilation that is still in progress.
_AT_EXIT_S = 60.0
#: After so many seconds, and again and again, the log says that a call waits for its compilation.
_SAID_EVERY_S = 60.0


class _Stage(Protocol):
    def __call__(self, stage: str, /, *, computes: bool = False) -> contextlib.AbstractContextManager[None]: ...


class _Job:
    """One compilation. ``error`` is None unless it failed."""

    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.work = work
        self.done = Ending()
        self.error: BaseException | None = None


class CompiledFunction:
    """A function that is being compiled. The first call waits for that. Each call is a call of the jitted function."""

    def __init__(
        self,
        jitted: Callable[..., Any],
        job: _Job,
        first_call: tuple[Any, Any],
        stage: _Stage,
        watch: ProgramWatch,
    ) -> None:
        self._jitted = jitted
        self._job: _Job | None = job  # None after the first call that succeeded
        self._given: tuple[Any, Any] | None = first_call
        self._stage = stage
        self._watch = watch
        self.__name__ = job.name
        self.__wrapped__ = jitted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function.

        Raises:
            Exception: What the compilation raised, with its traceback.
        """
        if self._job is None:
            return self._jitted(*args, **kwargs)
        return self._first(self._job, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns what the jitted function has, such as ``lower`` and ``clear_cache``."""
        return getattr(self.__dict__["_jitted"], name)

    def wait(self) -> None:
        """Waits for the compilation.

        Raises:
            Exception: What the compilation raised, with its traceback.
        """
        if self._job is not None:
            self._wait(self._job)

    @property
    def done(self) -> bool:
        """True once the compilation has ended, well or not."""
        return self._job is None or self._job.done.ended

    def _wait(self, job: _Job) -> None:
        began_s = time.monotonic()
        with self._stage("compilation", computes=True), trace.span(f"wait for the compilation of {job.name}"):
            while not job.done.wait(_SAID_EVERY_S):  # a compilation has no limit; the stall watch looks at it
                logger.info("waiting for a compilation function=%s seconds=%.0f", job.name, time.monotonic() - began_s)
        if job.error is not None:
            raise job.error

    def _first(self, job: _Job, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._wait(job)
        before = self._watch.count(job.name)
        result = self._jitted(*args, **kwargs)
        first_call, self._given, self._job = self._given, None, None
        if first_call is not None and self._watch.count(job.name) > before:
            differs = _difference(first_call, (args, kwargs))  # deleted arrays still have shape and dtype
            logger.warning(
                "compiled again, as the call differs from the one that was given to compile() function=%s: %s",
                job.name,
                differs or "a mesh, a precision or the like is set in another way at the call",
            )
        return result


class Compilations:
    """The functions that are compiled in the background.

    Args:
        stage: Names what the training thread does within a block.
        watch: Counts programs.
    """

    def __init__(self, stage: _Stage, watch: ProgramWatch) -> None:
        self._stage = stage
        self._watch = watch
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: collections.deque[_Job] = collections.deque()
        self._thread: DaemonThread | None = None  # None while there is nothing to compile
        self._closed = False

    def begin(
        self,
        function: Callable[..., Any],
        like: Sequence[Any],
        keywords: Mapping[str, Any],
        jit_options: Mapping[str, Any],
    ) -> CompiledFunction:
        """Traces a function, and begins to compile it.

        Args:
            function: A function, or one that ``jax.jit`` returned.
            like: The forms of its arguments.
            keywords: The forms of its keyword arguments.
            jit_options: Arguments of ``jax.jit``.

        Raises:
            SettingsError: There are options, and ``function`` is jitted already.
            Exception: What the function raises while it is traced.
        """
        import jax

        if not callable(function):
            raise SettingsError(f"compile(function, *like): expected a function, found {shown(function)}")

        jitted: Any = function
        if not isinstance(function, jax.stages.Wrapped):
            jitted = jax.jit(function, **jit_options)
        elif jit_options:
            raise SettingsError(
                f"compile(): expected a plain function with {', '.join(sorted(jit_options))}, found one that jax.jit "
                f"returned: give these arguments to jax.jit, or give compile() the function itself"
            )
        args = tuple(_form(argument) for argument in like)
        named = {name: _form(argument) for name, argument in keywords.items()}
        with self._stage("compilation", computes=True), trace.span("trace the function to compile"):
            traced = jitted.trace(*args, **named)
        name = f"jit({getattr(traced, 'fun_name', getattr(function, '__name__', 'function'))})"
        # A lowering in another thread would be found by the call only if the same things are set for both threads.
        lowered = None if _is_set_as_in_a_new_thread() else traced.lower()
        job = _Job(name, lambda: (traced.lower() if lowered is None else lowered).compile())
        self._add(job)
        return CompiledFunction(jitted, job, (args, named), self._stage, self._watch)

    def close(self, timeout_s: float) -> None:
        """Waits for the function that is being compiled. Never raises. Safe to repeat.

        Functions that wait for their turn are compiled by their first calls.
        """
        with self._lock:
            self._closed = True
            while self._waiting:  # ended first: nothing is left to wait for, if this is interrupted
                self._waiting[0].done.end()
                self._waiting.popleft()
            thread = self._thread
        if thread is None:
            return
        if not thread.wait(timeout_s):
            logger.warning("a compilation is still in progress waited_s=%g", timeout_s)
            atexit.register(thread.wait, _AT_EXIT_S)

    def _add(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                raise SettingsError("compile(): expected an open session, found that the session is closed")
            self._waiting.append(job)
            if self._thread is not None and not self._thread.ended:
                return
            self._thread = DaemonThread(self._run, "gracepoint-compile")
            try:
                self._thread.start()
            except NoThread as error:  # the system has no more threads
                self._thread = None
                logger.warning("no thread could be started: the call compiles function=%s: %s", job.name, error)
                self._waiting.remove(job)
                job.done.end()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._waiting.popleft()
            try:
                with trace.span(f"compile {job.name} in the background"):
                    job.work()
            except BaseException as error:  # noqa: BLE001 - raised by the call
                logger.info("a compilation failed, and its call will say why function=%s", job.name)
                job.error = error
            finally:
                job.work = _nothing  # it holds the program before it was compiled
                job.done.end()


def _nothing() -> None:
    pass


def _is_set_as_in_a_new_thread() -> bool:
    """Returns whether nothing that JAX compiles by, such as a mesh or a precision, is set for this thread alone."""
    contexts: list[Any] = []

    def look() -> None:
        contexts.append(_context())

    look()
    looking = threading.Thread(target=look, name="gracepoint-compile-looks", daemon=True)
    try:
        start_thread(looking)
    except NoThread:  # the system has no more threads
        return False
    looking.join()
    return contexts[0] is not None and contexts[0] == contexts[1]


def _context() -> Any:
    """Returns what is set for this thread and JAX compiles by. None if this version of JAX does not say."""
    try:
        from jax._src import config

        return config.trace_context()
    except (ImportError, AttributeError):
        return None


def _form(argument: Any) -> Any:
    """Returns the argument with its arrays replaced by their forms, so that nothing keeps their memory."""
    import jax

    def form(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = leaf.sharding if leaf.committed else None
        weak = getattr(leaf, "weak_type", False)  # arrays of random keys have no weak types
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(argument)):
        return argument  # a static argument stays the object that it is
    return jax.tree.map(form, argument)


def _difference(expected: tuple[Any, Any], actual: tuple[Any, Any]) -> str:
    """Says in what the arguments of a call differ from those that were announced. Empty if nothing is seen."""
    import jax

    expected_leaves: Any
    actual_leaves: Any
    expected_leaves, actual_leaves = (
        jax.tree_util.tree_flatten_with_path(arguments) for arguments in (expected, actual)
    )
    if expected_leaves[1] != actual_leaves[1]:
        return f"expected arguments of the tree {expected_leaves[1]}, found {actual_leaves[1]}"
    for (path, form), (_, value) in zip(expected_leaves[0], actual_leaves[0], strict=True):
        one, other = _kind(form), _kind(value)
        if one != other:
            which = "keyword argument" if path[0].idx else "argument"
            return f"{which} {jax.tree_util.keystr(path[1:])}: expected {one}, found {other}"
    return ""


def _kind(leaf: Any) -> str:
    """Returns as text what of an argument decides which program is used."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    words = f"{leaf.dtype}{list(leaf.shape)}"
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        return words
    return f"{words} on {sharding}"


_CACHE_DIR = "jax_compilation_cache_dir"
_MIN_COMPILE_S = "jax_persistent_cache_min_compile_time_secs"
#: JAX's default: programs that compile faster are not kept.
_DEFAULT_MIN_COMPILE_S = 1.0
_XLA_CACHES = "jax_persistent_cache_enable_xla_caches"


#: The directory that a session of this process chose.
_chosen: str | None = None


def keep_programs(setting: str | None, directory: str) -> None:
    """Makes JAX keep compiled programs in its persistent cache. Call it before the first compilation.

    If JAX's own settings name a directory already (``JAX_COMPILATION_CACHE_DIR``), they count. The operator's webhook
    sets them.

    Args:
        setting: ``on``: next to the checkpoints, if these are on a file system. Or the path or URI of a directory.
            ``off``: keep none. None: what JAX's own settings say.
        directory: The directory of the checkpoints.
    """
    global _chosen
    import jax

    if setting == COMPILATION_CACHE_OFF or (_chosen is not None and getattr(jax.config, _CACHE_DIR) == _chosen):
        _forget_directory()  # that of an earlier session is not the user's
    _chosen = None
    if setting == COMPILATION_CACHE_OFF:
        return
    if setting is not None and not getattr(jax.config, _CACHE_DIR):
        where = f"{directory.rstrip('/')}/{PROGRAMS_FOLDER}" if setting == COMPILATION_CACHE_ON else setting
        where = where.removeprefix("file://")  # JAX takes paths
        if setting == COMPILATION_CACHE_ON and "://" in where:
            logger.warning(
                "compiled programs are not kept: the checkpoints are in a bucket, for which JAX needs more packages. "
                "Name a directory in place of 'on' directory=%s",
                directory,
            )
        else:
            _keep_in(where)
            _chosen = where
    kept = getattr(jax.config, _CACHE_DIR)
    if not kept:
        return
    logger.info("JAX keeps compiled programs directory=%s", kept)
    if global_state.process_id != 0:
        _keep_in_this_process()


def _forget_directory() -> None:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update(_CACHE_DIR, None)
    compilation_cache.reset_cache()  # JAX goes on with one that is open


def _keep_in(where: str) -> None:
    import jax

    jax.config.update(_CACHE_DIR, where)
    if getattr(jax.config, _MIN_COMPILE_S) == _DEFAULT_MIN_COMPILE_S:
        jax.config.update(_MIN_COMPILE_S, 0.0)
    if "://" in where:
        jax.config.update(_XLA_CACHES, "none")  # XLA's own caches know no buckets


def _keep_in_this_process() -> None:
    """Lets this process, which is not process 0, write programs on CPUs.

    JAX writes in process 0 only, because on GPUs and TPUs the key of a program is the same in all processes. On CPUs it
    is not, and without this the other processes would compile everything at each start. There is no setting for it. If
    another version of JAX has other private names, that is what they do.
    """
    try:
        from jax._src import compilation_cache, compiler

        real, put = compiler._cache_write, compilation_cache.put_executable_and_time  # noqa: SLF001
    except (ImportError, AttributeError) as error:
        logger.info("on CPUs only process 0 keeps compiled programs: %s", error)
        return
    if real.__module__ == __name__:
        return  # an earlier session of this process has done it

    def cache_write(key: str, seconds: float, name: str, backend: Any, executable: Any, *host_callbacks: Any) -> None:
        if backend.platform != "cpu":
            real(key, seconds, name, backend, executable, *host_callbacks)
            return
        import jax

        # As JAX does in process 0. A program that calls back into Python has addresses of this process in it.
        if any(host_callbacks) or seconds < getattr(jax.config, _MIN_COMPILE_S):
            return
        try:
            put(key, name, executable, backend, int(seconds))
        except Exception as error:  # noqa: BLE001 - the program is compiled, and the training continues
            logger.warning("a compiled program cannot be written program=%s: %s", name, error)

    setattr(compiler, "_cache_write", cache_write)  # noqa: B010 - JAX types it by its own function
