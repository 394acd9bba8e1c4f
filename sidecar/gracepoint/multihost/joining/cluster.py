"""Joining the JAX cluster, and the names of its processes.

A process has three numbers: the id with which it joined the coordination service, ``jax.process_index()`` (JAX may
order processes by their devices, and does so on TPU), and the JobSet's pod index. The library uses
``jax.process_index()`` everywhere. ``meet`` exchanges the three numbers once.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint.errors import AgreementError, SettingsError
from gracepoint.multihost.coordination.barriers import StoreProcessGroup
from gracepoint.multihost.coordination.store import InMemoryStore, JaxStore, KeyValueStore
from gracepoint.multihost.joining.detection import Place
from gracepoint.multihost.joining.distributed import DEACTIVATE, ENV_TPU, join_cluster
from gracepoint.multihost.joining.distributed_state import global_state
from gracepoint.multihost.joining.members import PodNames, ProcessNames, introduce
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.settings import Settings
from gracepoint.wire.names import ENV_JOB_COMPLETION_INDEX, Env

log = logging.getLogger(__name__)

_INITIALIZATION_TIMEOUT_S = 300
_MEETING_TIMEOUT_S = 300.0

# Number of calls of attach() in this process. It is the same in all processes, because every call is collective.
_meetings = 0


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What the processes know about each other after ``meet``."""

    gang: ProcessGroup
    store: KeyValueStore
    attempt: str  # unique for each start of the job, the same in all processes
    members: Sequence[ProcessNames]  # by process_index; read from the store when they are asked for
    me: ProcessNames
    client: Any | None  # JAX's coordination-service client; None for a single process
    host: int = 0  # process_index of the process that hosts the store
    last_started_unix_s: float | None = None  # when the last process was started; None: not known

    @property
    def start(self) -> str:
        """Identifies the start of the job. It is the same in all clusters of that start."""
        return self.attempt.rpartition("-")[0]


def join(settings: Settings, environ: Mapping[str, str] = os.environ) -> bool:
    """Joins the JAX cluster that the settings describe, or adopts one that is initialised already.

    Returns:
        True if this call initialised ``jax.distributed``.

    Raises:
        SettingsError: The pod belongs to an Indexed Job, but nothing says how many processes there are; or a
            part of the address or of the process id is missing.
    """
    if global_state.initialized:
        log.info("adopted the initialised jax.distributed")
        return False
    if settings.process_count == 1:
        return False
    if settings.process_count is None:
        if settings.completion_index is not None:
            raise SettingsError(
                f"{Env.PROCESS_COUNT}: expected the number of training processes, as {ENV_JOB_COMPLETION_INDEX}="
                f"{settings.completion_index} says that this pod belongs to an Indexed Job, found none. The pod was "
                f"not injected: label the JobSet with gracepoint.dev/policy before it is created and see that "
                f"the operator's webhook runs; or call gracepoint.multihost.initialize() before attach(); or, for a "
                f"job of one process, set {Env.PROCESS_COUNT}=1. Training as that many separate jobs is refused"
            )
        return False
    if ENV_TPU in environ:
        log.info("leaving the cluster's detection to jax reason=%s is set", ENV_TPU)
        join_cluster(Place(), initialization_timeout=_INITIALIZATION_TIMEOUT_S)
        return True
    place = Place(settings.coordinator_address, settings.process_count, settings.process_id)
    join_cluster(place, initialization_timeout=_INITIALIZATION_TIMEOUT_S, cluster_detection_method=DEACTIVATE)
    return True


def raise_jax_notice(client: Any) -> None:
    """Sends JAX's own preemption notice, because our signal handler has replaced the one of JAX.

    This is for training code that also calls ``multihost_utils.reached_preemption_sync_point``. The key and its format
    are those of XLA's preemption notifier. The notice has an effect once in the life of the coordination service.

    Args:
        client: JAX's coordination-service client. None for a single process, to which JAX sends no notice either.
    """
    if client is None or global_state.preemption_sync_manager is None:
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        client.key_value_set("RECEIVED_PREEMPTION_NOTICE", now)
    except RuntimeError as error:
        log.info("jax's own preemption notice was not raised error=%s", str(error).splitlines()[0])


def meet(
    settings: Settings,
    on_gang: Callable[[ProcessGroup], None] = lambda gang: None,
    started_unix_s: float | None = None,
) -> Meeting:
    """Brings the processes of an initialised cluster together once. Exchanges their names, and when they were started.

    Collective. Initialises JAX's backend.

    Args:
        settings: This process's settings.
        on_gang: Called with the processes, by their ids in the coordination service, before this process waits for
            them.
        started_unix_s: When this process was started, in seconds since the epoch. None: it is not known.

    Raises:
        AgreementError: JAX's processes are not those of the coordination service, or their number is not the one that
            was injected. Raised in all processes.
        BarrierTimeout: A process did not arrive in time.
    """
    import jax

    global _meetings
    _meetings += 1
    state = global_state
    job = f"{settings.jobset_uid or 'local'}-{settings.restart_attempt}"
    if state.client is None or state.num_processes == 1:
        _check_count(
            [settings.process_count], 1, "jax.distributed" if state.initialized else None, settings.min_processes
        )
        attempt = f"{job}-{secrets.token_hex(4)}"
        me = ProcessNames(0, 0, settings.pod_name)
        return Meeting(SingleProcess(), InMemoryStore(), attempt, (me,), me, None, last_started_unix_s=started_unix_s)

    count = state.num_processes
    hall = JaxStore(state.client, f"gracepoint/meeting/{_meetings}")
    everybody = StoreProcessGroup(hall, state.process_id, count)
    on_gang(everybody)
    with everybody.waiting.expecting("backend"):
        started = jax.process_count()
    if started != count:
        raise AgreementError(
            f"jax.process_count() is {started}, but the coordination service has {count} processes: "
            f"the backend was initialised before jax.distributed, or it does not span the cluster"
        )
    me = ProcessNames(jax.process_index(), state.process_id, settings.pod_name)
    found = introduce(
        me,
        settings.process_count,
        secrets.token_hex(4),
        started_unix_s=started_unix_s,
        gang=everybody,
        store=hall,
        timeout_s=_MEETING_TIMEOUT_S,
    )
    everybody.retire("backend")
    _check_count([found.miscounted], count, "jax.distributed", settings.min_processes)
    attempt = f"{job}-{found.nonce}"
    store = JaxStore(state.client, f"gracepoint/{attempt}")
    gang = StoreProcessGroup(store, me.process_index, count, names=PodNames(found.members))
    host = found.host.process_index
    return Meeting(gang, store, attempt, found.members, me, state.client, host, found.last_started_unix_s)


def _check_count(injected: Sequence[int | None], joined: int, by: str | None, least: int) -> None:
    """Raises AgreementError unless the cluster has as many processes as the webhook injected into each of them.

    Args:
        injected: The number that was injected into each process. None if none was.
        joined: How many processes the cluster has.
        by: What initialised the cluster. None if nothing did.
        least: The least number of processes, if their number may change. 0: it may not.
    """
    if joined < least:
        raise AgreementError(
            f"{Env.MIN_PROCESSES}={least}: expected as many processes as the policy's spec.training.minProcesses says, "
            f"found {joined}. Start more of them, or lower that number and create the job anew"
        )
    wrong = next((count for count in injected if count is not None and count != joined), None)
    if wrong is None:
        return
    if least:
        # Several clusters of one start cannot overwrite each other: only one of them can claim the directory.
        log.warning("the size of the job was changed injected=%d joined=%d", wrong, joined)
        return
    found = f"the cluster that {by} was initialised with has {joined}" if by else "jax.distributed was not initialised"
    raise AgreementError(
        f"{Env.PROCESS_COUNT}={wrong}: the operator's webhook counted {wrong} training processes in this job, but "
        f"{found}. Several clusters of one job would each take themselves for the whole of it, and overwrite each "
        f"other's checkpoints. Let attach() join the cluster, or call gracepoint.multihost.initialize() without "
        f"arguments before it; where jax.distributed.initialize() is called, give it num_processes={wrong} and the "
        f"same coordinator_address in all pods. If {joined} is right, the JobSet was changed after it was created: "
        f"create it anew, or allow it by the policy's spec.training.minProcesses"
    )
