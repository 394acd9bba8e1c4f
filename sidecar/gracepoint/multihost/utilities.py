"""Multi-process utilities for training code: the process index, barriers, and whether it is time to save.

Everything here may be called without a session, once the JAX cluster is joined or in a single process. Processes are
identified by ``jax.process_index()``. Barriers use the coordination service's store, not the devices. So a timeout
names the missing processes, and background threads may use barriers. A collective of the devices must come in the same
order as those of training, so it must not run in a background thread. For a barrier over the devices, which is Orbax's
default, pass ``barrier_sync_fn=lambda *, key, timeout_ms: multihost_utils.sync_global_devices(key)``.

State: one process group (``AllProcesses``) for the coordination service that this process has joined, and the keys of
calls that pass no name. The first thread that needs the group makes it; it is made again if the process joins another
cluster. And the hook through which ``reached_preemption`` asks the open session: the training thread sets it when a
session is attached, clears it when the session ends, and reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from gracepoint.errors import CannotKnow, GracepointError, NoCluster
from gracepoint.multihost.barriers import StoreProcessGroup
from gracepoint.multihost.distributed import global_state
from gracepoint.multihost.store import BarrierKeys, JaxStore
from gracepoint.wire.names import Env


@dataclasses.dataclass(frozen=True)
class AllProcesses:
    """All processes of the JAX cluster."""

    client: Any
    gang: StoreProcessGroup
    keys: BarrierKeys


_lock = threading.Lock()
_last: AllProcesses | None = None


def joined_cluster() -> AllProcesses:
    """Returns all processes of the cluster that this process belongs to now. Initialises JAX's backend.

    Raises:
        NoCluster: This process has not joined a cluster.
    """
    import jax

    global _last
    index, count = jax.process_index(), jax.process_count()
    with _lock:
        client = global_state.client
        if client is None:
            raise NoCluster("expected a JAX cluster, found none: call gracepoint.multihost.initialize() at the start")
        if _last is None or _last.client is not client:
            store = JaxStore(client, "gracepoint/everybody")
            # The service, and so its store, belongs to one attempt. The job and the attempt are in the keys only for
            # people who read them.
            keys = BarrierKeys(os.environ.get(Env.JOBSET_UID) or "local", os.environ.get(Env.RESTART_ATTEMPT) or 0)
            _last = AllProcesses(client, StoreProcessGroup(store, index, count), keys)
        return _last


_hook: Callable[[int], bool] | None = None


def set_reached_preemption_hook(hook: Callable[[int], bool] | None) -> None:
    """Sets the function that answers ``reached_preemption(step)``. None if no session is open."""
    global _hook
    _hook = hook


def reached_preemption_hook() -> Callable[[int], bool] | None:
    """Returns the function that answers ``reached_preemption(step)``. None if no session is open."""
    return _hook


logger = logging.getLogger(__name__)

DEFAULT_BARRIER_TIMEOUT_S = 300
SYNC_DURATION_EVENT = "/jax/checkpoint/sync_global_devices_duration_sec"


class BarrierSyncFn(Protocol):
    """A barrier of several processes, identified by ``key``."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Blocks until all processes have arrived.

        Raises:
            BarrierError: Some processes did not arrive within ``timeout_ms``, or the key was used before.
        """


def process_index() -> int:
    """Returns ``jax.process_index()``. The id in the coordination service is ``global_state.process_id``."""
    import jax

    return int(jax.process_index())


def process_count() -> int:
    """Returns ``jax.process_count()``."""
    import jax

    return int(jax.process_count())


def is_primary_host(primary_host: int | None) -> bool:
    """Returns True in process ``primary_host``. None means that each host writes on its own: True in every process."""
    return primary_host is None or primary_host == process_index()


def get_barrier_sync_fn(*, processes: Collection[int] | None = None) -> BarrierSyncFn:
    """Returns a barrier over the coordination service. Any thread may call it, and several threads at the same time.

    Threads that call it at the same time must use different keys.

    Args:
        processes: The processes that take part, by ``process_index()``. All of them pass the same ones. None: all
            processes.

    Returns:
        A function that all of them call once with the same key. It does nothing if only one process takes part.

    Raises:
        ValueError: This process is not in ``processes``, or a process there does not exist. If there are several
            processes and no coordination service, it is a ``NoCluster``, which is a ValueError.
    """
    if takes_part_alone(processes):
        return _nobody_to_wait_for
    gang = joined_cluster().gang
    gang.check_participants(processes)

    def wait(*, key: str, timeout_ms: int) -> None:
        gang.barrier(key, timeout_s=timeout_ms / 1000, processes=processes)

    return wait


def sync_global_processes(
    name: str,
    *,
    timeout: float | None = None,
    processes: Collection[int] | None = None,
    barrier_sync_fn: BarrierSyncFn | None = None,
    record_event_name: str = SYNC_DURATION_EVENT,
) -> None:
    """Waits until all processes have arrived here. Does nothing if only one process takes part.

    Args:
        name: The name of this barrier. A name can be used once.
        timeout: Seconds to wait. None: 300.
        processes: The processes that take part, by ``process_index()``. All of them pass the same ones. None: all
            processes.
        barrier_sync_fn: The barrier to use. None: ``get_barrier_sync_fn(processes=processes)``.
        record_event_name: The event under which the duration in seconds is recorded in ``jax.monitoring``.

    Raises:
        BarrierTimeout: Some processes did not arrive in time. The message names them.
        BarrierReused: The name was used before.
        ValueError: This process is not in ``processes``, a process there does not exist, or the timeout is not
            positive.
    """
    import jax

    timeout_s = DEFAULT_BARRIER_TIMEOUT_S if timeout is None else timeout
    if timeout_s <= 0:
        raise ValueError(f"timeout: expected seconds above 0, or None for {DEFAULT_BARRIER_TIMEOUT_S}, found {timeout}")
    if takes_part_alone(processes):
        return
    wait = barrier_sync_fn or get_barrier_sync_fn(processes=processes)
    began = time.monotonic()
    if barrier_sync_fn is not None:  # the built-in barrier logs this itself
        logger.info("process %d is at barrier %r, for %g s at most", process_index(), name, timeout_s)
    wait(key=name, timeout_ms=int(timeout_s * 1000))
    jax.monitoring.record_event_duration_secs(record_event_name, time.monotonic() - began)


@contextlib.contextmanager
def failing_together(
    name: str, *, timeout: float | None = None, processes: Collection[int] | None = None
) -> Iterator[None]:
    """Runs a block of work that succeeds in all processes or fails in all. Collective.

    At the end of the block each process waits for the others, as in ``sync_global_processes``. If the block raises an
    error in one process, the others are notified. Their wait ends at once, or as soon as they reach the end of the
    block. A process that is in a collective of the devices is not interrupted. With one process, only the block runs.

        with multihost.failing_together("arrays written"):
            for future in handler.serialize(values, infos):
                future.result()

    Args:
        name: The name of this block. A name can be used once.
        timeout: Seconds to wait at the end of the block. None: 300.
        processes: The processes that take part, by ``process_index()``. All of them pass the same ones. None: all
            processes.

    Raises:
        BarrierFailed: Another process failed. The message names it and its error.
        BarrierTimeout: Some processes did not reach the end in time. The message names them.
        BarrierReused: The name was used before.
        ValueError: As in ``sync_global_processes``.
    """
    try:
        yield
    except BaseException as error:
        if not takes_part_alone(processes):
            try:
                joined_cluster().gang.fail(name, error)
            except GracepointError as unreachable:
                logger.warning("could not notify the other processes of an error name=%s error=%s", name, unreachable)
        raise
    sync_global_processes(name, timeout=timeout, processes=processes)


def reached_preemption(step: int, *, if_unknown: bool | None = None) -> bool:
    """Returns whether this is the step at which all processes save because one of them is going to be preempted.

    This is a sync point. Call it after every step, with the same numbers in all processes. If a session is open, the
    session answers. Otherwise JAX's own preemption service is asked.

    Args:
        step: The number of steps done.
        if_unknown: The result if neither can answer. None raises ``CannotKnow`` instead. With False, a job whose
            preemption service is off trains until it is killed, without any warning.

    Raises:
        CannotKnow: No session is open, and JAX's preemption service does not run in this process.
    """
    ask_session = reached_preemption_hook()
    if ask_session is not None:
        return ask_session(step)
    if global_state.preemption_sync_manager is not None:
        from jax.experimental import multihost_utils

        return bool(multihost_utils.reached_preemption_sync_point(step))
    if if_unknown is None:
        raise CannotKnow(
            "reached_preemption(): expected an open session (gracepoint.attach) or JAX's preemption service, which "
            "runs in a cluster of several processes unless jax_enable_preemption_service is False; found neither"
        )
    return if_unknown


def takes_part_alone(processes: Collection[int] | None) -> bool:
    """Returns True if there is no other process to wait for."""
    return process_count() == 1 or (processes is not None and set(processes) == {process_index()})


def _nobody_to_wait_for(*, key: str, timeout_ms: int) -> None:
    pass
