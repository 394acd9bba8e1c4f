"""Where training begins: at a checkpoint of this job, at one of another run, or at a new state.

With it begins the host state: what each process has beside the train state, such as a data iterator or a host's RNG.
``HostStates`` belongs to the training thread.

In an emergency each value is asked for in a separate thread ("gracepoint: host_state
NAME", daemon), so that one that hangs does not cost the train state. The thread ends with the user's function; if that
comes too late, nobody waits for it any more. A function that raises there is asked again in the training thread: some
libraries' objects belong to the thread that made them.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gracepoint.arguments import shown
from gracepoint.elastic import ElasticData, same_in_all
from gracepoint.errors import CheckpointMismatch, HostStateLost, SettingsError
from gracepoint.threads import NoThread, start_thread

if TYPE_CHECKING:
    from gracepoint.checkpoint.engine import StepCheckpointer
    from gracepoint.checkpoint.restoring.restore_step import Restored
    from gracepoint.checkpoint.restoring.start_state import Asked
    from gracepoint.checkpoint.storage.locations import UserPath

logger = logging.getLogger(__name__)

#: A function that raises within so many seconds is asked once more, in the training thread.
_QUICKLY_S = 1.0
#: A function that takes longer is named at the first step.
_SLOW_S = 1.0


@dataclasses.dataclass(frozen=True)
class _Value:
    get: Callable[[], Any]
    set: Callable[[Any], None]
    reshard: Callable[..., Any] | None
    missing: Callable[[int], None] | None = None


class DataIterator(Protocol):
    """An iterator whose place can be saved, such as Grain's."""

    def get_state(self) -> Any:
        """Returns where it is: JSON values, numpy arrays, bytes."""

    def set_state(self, state: Any, /) -> None:
        """Goes to where it was when ``get_state`` returned this."""


#: Name of the item that ``Session.restore(data=...)`` registers.
DATA = "data"


class HostStates:
    """The registered functions, by name."""

    def __init__(self) -> None:
        self._values: dict[str, _Value] = {}
        self._iterator: DataIterator | None = None

    def register(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],
        reshard: Callable[..., Any] | None,
        missing: Callable[[int], None] | None = None,
    ) -> None:
        """Registers an item, as ``Session.host_state``.

        Raises:
            SettingsError: The name is taken or no text, or one of the others is no function.
        """
        if not isinstance(name, str):
            raise SettingsError(f"host_state(name, get, set): expected a name, found {shown(name)}")
        if name in self._values:
            raise SettingsError(f"host_state({name!r}): registered before")
        if not (callable(get) and callable(set)):
            raise SettingsError(
                f"host_state({name!r}): expected functions that get and set the value, found {shown(get)} and "
                f"{shown(set)}"
            )
        for option, function in (("reshard", reshard), ("missing", missing)):
            if function is not None and not callable(function):
                raise SettingsError(f"host_state({name!r}, {option}=...): expected a function, found {shown(function)}")
        self._values[name] = _Value(get, set, reshard, missing)

    def register_iterator(self, iterator: DataIterator) -> None:
        """Registers a data iterator, as ``Session.restore``.

        Raises:
            SettingsError: The name ``data`` is taken, or ``iterator`` has no ``get_state`` or no ``set_state``.
        """
        if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
            raise SettingsError(
                f"restore(data=...): expected an iterator with get_state and set_state, found a "
                f"{type(iterator).__qualname__}. For other iterators there is host_state({DATA!r}, get, set)"
            )
        self.register(DATA, iterator.get_state, iterator.set_state, _iterator_state)
        self._iterator = iterator

    def get(self) -> dict[str, Any]:
        """Returns the current values.

        Raises:
            Exception: What a registered function raises; a note names the item.
        """
        return {name: self._get(name, value.get) for name, value in self._values.items()}

    def get_first(self) -> dict[str, Any]:
        """As ``get``, at the first step. Warns of functions that are slow: a preemption does not wait long."""
        values = {}
        for name, value in self._values.items():
            began_s = time.monotonic()
            values[name] = self._get(name, value.get)
            if (took_s := time.monotonic() - began_s) > _SLOW_S:
                logger.warning(
                    "host_state is slow, and training waits for it at each save name=%s s=%.1f", name, took_s
                )
        return values

    def get_in_time(self, limit_s: float) -> dict[str, Any]:
        """Returns the current values in an emergency, encoded. Never raises.

        Args:
            limit_s: Seconds for all of them. Each may take half of what those before it have left, the last all of it.

        Returns:
            The values by name. In place of one that cannot be had or saved, a ``HostStateLost`` that says why.
        """
        until_s, values = time.monotonic() + limit_s, dict[str, Any]()
        for place, (name, value) in enumerate(self._values.items()):
            left_s = max(0.0, until_s - time.monotonic()) / (1 if place == len(self._values) - 1 else 2)
            values[name] = answer = _asked(name, value.get, left_s)
            if isinstance(answer, HostStateLost):
                logger.error("the step is saved without a host_state name=%s reason=%s", name, answer)
        return values

    def get_now(self, limit_s: float | None = None) -> dict[str, Any]:
        """Returns the current values, encoded, so that they stay as they are. Never raises.

        Args:
            limit_s: Seconds for each of them. None: each has the time that it takes, in this thread.

        Returns:
            As ``get_in_time``.
        """
        if limit_s is not None:
            return {name: _asked(name, value.get, limit_s) for name, value in self._values.items()}
        from gracepoint.checkpoint.format import host_state

        values = dict[str, Any]()
        for name, value in self._values.items():
            try:
                values[name] = host_state.encoded(name, value.get())
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whoever saves it says so
                values[name] = HostStateLost(f"{type(error).__name__}: {error}")
        return values

    @staticmethod
    def _get(name: str, get: Callable[[], Any]) -> Any:
        try:
            return get()
        except Exception as error:
            error.add_note(f"host_state({name!r}, ...): the function that gets the value raised this")
            raise

    def set(self, restored: Mapping[str, Any], step: int) -> None:
        """Passes the restored values to the registered functions.

        A value that is lost was registered with ``missing``, which is called in place of ``set``.

        Raises:
            CheckpointMismatch: The checkpoint lacks a registered name.
        """
        missing = sorted(self._values.keys() - restored.keys())
        if missing:
            raise CheckpointMismatch(
                f"host_state {missing[0]!r} is not in the checkpoint of step {step}, which has "
                f"{sorted(restored) or 'none'}: register the names that it was saved with"
            )
        for name in sorted(restored.keys() - self._values.keys()):
            logger.warning("a host_state of the checkpoint is not registered and was dropped name=%s", name)
        for name, value in self._values.items():
            if not isinstance(lost := restored[name], HostStateLost):
                value.set(restored[name])
            elif value.missing is not None:
                logger.error("step %d was saved without host_state %r (%s): missing= is called", step, name, lost)
                value.missing(step)
            else:
                raise lost

    @property
    def changed(self) -> tuple[str, ...]:
        """What is different for the data since the checkpoint, as text. Empty if the data is no ``ElasticData``."""
        change = self._iterator.changed if isinstance(self._iterator, ElasticData) else ""
        return (change,) if change else ()

    @property
    def required(self) -> frozenset[str]:
        """The names without which training does not continue."""
        return frozenset(name for name, value in self._values.items() if value.missing is None)

    @property
    def reshard(self) -> dict[str, Callable[..., Any]]:
        """The functions that convert values to another number of processes, by name."""
        return {name: value.reshard for name, value in self._values.items() if value.reshard is not None}


def _asked(name: str, get: Callable[[], Any], limit_s: float) -> Any:
    """Returns a value, encoded, or a ``HostStateLost``."""
    from gracepoint.checkpoint.format import host_state

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> Any:
        try:
            return host_state.encoded(name, get())
        except BaseException as error:  # noqa: BLE001 - the train state is saved whatever the user's function does
            return error

    began_s = time.monotonic()
    try:
        asking = threading.Thread(target=lambda: answers.put(ask()), name=f"gracepoint: host_state {name}", daemon=True)
        start_thread(asking)
        answer = answers.get(timeout=limit_s)
    except NoThread:  # the system has no more threads
        answer = ask()
    except queue.Empty:
        return HostStateLost(f"the function that gets it did not return within {limit_s:.1f} s")
    if isinstance(answer, BaseException) and time.monotonic() - began_s < _QUICKLY_S:
        answer = ask()
    return HostStateLost(f"{type(answer).__name__}: {answer}") if isinstance(answer, BaseException) else answer


def _iterator_state(states: Sequence[Any], process_index: int, process_count: int) -> Any:
    """Returns the iterator's state for another number of processes.

    Raises:
        CheckpointMismatch: The processes that saved were not all at the same state.
    """
    try:
        return same_in_all(states, process_index, process_count)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"the data iterator: {error}: register it by host_state({DATA!r}, ..., reshard=...)"
        ) from None


RESTORE_TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True)
class RestoredFrom:
    """The checkpoint that ``Session.restore`` has restored.

    Attributes:
        directory: The directory that it is in.
        step: Its step there.
        own: True if this job saved it. False if it came from ``from_``.
        changed: What is different from the run that saved it, as text: number of processes, devices, mesh, batch.
            Empty if nothing is.
        from_memory: True if it came from the memory of nodes (snapshots), not from the directory.
    """

    directory: str
    step: int
    own: bool
    changed: tuple[str, ...] = ()
    from_memory: bool = False


@dataclasses.dataclass(frozen=True)
class Start:
    """Where training begins.

    Attributes:
        state: The train state.
        step: The step of this job that was restored. None if this job begins again.
        restored: Where the state came from. None if it is a new state.
        note: The text that the step was saved with, in process 0. None: there is none.
    """

    state: Any
    step: int | None
    restored: RestoredFrom | None
    note: str | None = None


def start_from(
    restored: Restored | None,
    checkpointer: StepCheckpointer,
    request: Asked,
    base: UserPath | None,
    values: HostStates,
) -> Start:
    """Begins at the restored step of this job, or else at another run's newest step, or else at the first state.

    Collective.

    Args:
        restored: The newest step of this job. None if there is none.
        checkpointer: The checkpoint engine of this job.
        request: The arguments of ``Session.restore``.
        base: The directory of the other run. None: there is none.
        values: The host states, which are set if a step of this job was restored.

    Raises:
        As ``Session.restore``.
    """
    with request.noting_deletions():
        if restored is not None:
            values.set(restored.host_state, restored.step)
            logger.info("restored step=%d from_memory=%s", restored.step, restored.from_memory)
            changed = (*restored.changed, *values.changed)
            if changed and checkpointer.is_primary:
                logger.warning("the job continues in another form step=%d %s", restored.step, ", ".join(changed))
            origin = RestoredFrom(
                checkpointer.directory, restored.step, own=True, changed=changed, from_memory=restored.from_memory
            )
            return Start(restored.state, restored.step, origin, restored.note)
        if base is not None:
            base_state = checkpointer.restore_base(
                base,
                request.like,
                timeout_s=RESTORE_TIMEOUT_S,
                restore_args=request.restore_args,
                options=request.options,
            )
            logger.warning(
                "training begins at step 0 with the state of another run from=%s step=%d", base, base_state.step
            )
            return Start(base_state.state, None, RestoredFrom(str(base), base_state.step, own=False))
    logger.warning("no checkpoint was restored, training begins at step 0")
    return Start(request.first_state(), None, None)
