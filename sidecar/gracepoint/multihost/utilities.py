"""Small questions and meetings for training code: who am I, wait for all, is it time to save.

Everything here may be called without a session, once JAX's cluster is joined (or in a single process), and works
in terms of ``jax.process_index()``. Barriers run over the coordination service's store (``barriers``), not over the
devices: they have timeouts that say who is missing, and may be used in background threads, where a collective of the
devices would have to come in the same order as those of training. For that one, as Orbax's default has it:
``barrier_sync_fn=lambda *, key, timeout_ms: multihost_utils.sync_global_devices(key)``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from typing import Protocol

from gracepoint.errors import CannotKnow, GracepointError
from gracepoint.multihost.current import reached_preemption_hook
from gracepoint.multihost.everybody import everybody
from gracepoint.multihost.state import global_state

logger = logging.getLogger(__name__)

DEFAULT_BARRIER_TIMEOUT_S = 300
SYNC_DURATION_EVENT = "/jax/checkpoint/sync_global_devices_duration_sec"


class BarrierSyncFn(Protocol):
    """Brings processes together at ``key``."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Blocks until all have come.

        Raises:
            BarrierError: They have not, within ``timeout_ms``; or the key was used before.
        """


def process_index() -> int:
    """``jax.process_index()``; the coordination service's own id is ``global_state.process_id``."""
    import jax

    return int(jax.process_index())


def process_count() -> int:
    """``jax.process_count()``."""
    import jax

    return int(jax.process_count())


def is_primary_host(primary_host: int | None) -> bool:
    """True in process ``primary_host``; with None, where each host writes on its own, in every process."""
    return primary_host is None or primary_host == process_index()


def get_barrier_sync_fn(*, processes: Collection[int] | None = None) -> BarrierSyncFn:
    """A barrier over the coordination service, for any thread; at the same time, each with keys of its own.

    Args:
        processes: Those that take part, by ``process_index()``, the same ones in each of them; None for all.

    Returns:
        A function that all of them call with the same key, once; it does nothing where there is only one process.

    Raises:
        ValueError: This process is not in ``processes``, or one there does not exist. ``NoCluster``, which is one,
            where there are several processes and no coordination service.
    """
    if takes_part_alone(processes):
        return _nobody_to_wait_for
    gang = everybody().gang
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
    """Waits until all processes have come here. Skipped where there is only one.

    Args:
        name: Of this barrier, used once.
        timeout: Seconds; 300 by default.
        processes: Those that take part, by ``process_index()``, the same ones in each of them; None for all.
        barrier_sync_fn: Waits in place of ``get_barrier_sync_fn(processes=processes)``.
        record_event_name: Under which ``jax.monitoring`` is told how many seconds it took.

    Raises:
        BarrierTimeout: Not all came in time; names who is missing.
        BarrierReused: The name was used before.
        ValueError: This process is not in ``processes``, one there does not exist, or the timeout is not positive.
    """
    import jax

    timeout_s = DEFAULT_BARRIER_TIMEOUT_S if timeout is None else timeout
    if timeout_s <= 0:
        raise ValueError(f"timeout: expected seconds above 0, or None for {DEFAULT_BARRIER_TIMEOUT_S}, found {timeout}")
    if takes_part_alone(processes):
        return
    wait = barrier_sync_fn or get_barrier_sync_fn(processes=processes)
    began = time.monotonic()
    if barrier_sync_fn is not None:  # the built-in one tells it itself
        logger.info("process %d is at barrier %r, for %g s at most", process_index(), name, timeout_s)
    wait(key=name, timeout_ms=int(timeout_s * 1000))
    jax.monitoring.record_event_duration_secs(record_event_name, time.monotonic() - began)


@contextlib.contextmanager
def failing_together(
    name: str, *, timeout: float | None = None, processes: Collection[int] | None = None
) -> Iterator[None]:
    """A block of work that succeeds in all processes or fails in all. Collective.

    At the end of the block each process waits for the others, as in ``sync_global_processes``. If an error leaves the
    block in one process, the others are told: their wait ends at once, or as soon as they come to the end of the
    block. A process that is inside of a collective of the devices is not interrupted. With one process the block is
    all there is.

        with multihost.failing_together("arrays written"):
            for future in handler.serialize(values, infos):
                future.result()

    Args:
        name: Of this block, used once.
        timeout: Seconds that the end of the block waits; 300 by default.
        processes: Those that take part, by ``process_index()``, the same ones in each of them; None for all.

    Raises:
        BarrierFailed: Another process failed; names it and its error.
        BarrierTimeout: Not all came to the end in time; names who is missing.
        BarrierReused: The name was used before.
        ValueError: As in ``sync_global_processes``.
    """
    try:
        yield
    except BaseException as error:
        if not takes_part_alone(processes):
            try:
                everybody().gang.fail(name, error)
            except GracepointError as unreachable:
                logger.warning("the other processes could not be told of an error name=%s error=%s", name, unreachable)
        raise
    sync_global_processes(name, timeout=timeout, processes=processes)


def reached_preemption(step: int, *, if_unknown: bool | None = None) -> bool:
    """Whether this is the step at which all processes save, because one of them is going to be preempted.

    A sync point, to be passed after every step, in all processes with the same numbers. With a session, it is the
    session's; without one, JAX's own preemption service is asked.

    Args:
        step: How many steps are done.
        if_unknown: The answer where nobody can know. None raises instead: with False, a job whose preemption
            service is off trains until it is killed, and nothing says so.

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
    """True where there is nobody to wait for."""
    return process_count() == 1 or (processes is not None and set(processes) == {process_index()})


def _nobody_to_wait_for(*, key: str, timeout_ms: int) -> None:
    pass
