"""Joins the JAX cluster, and exchanges the names of its processes.

A process has three numbers: the id with which it joined the coordination service, ``jax.process_index()`` (JAX may
order processes by their devices, and does so on TPU), and the JobSet's pod index. The library uses
``jax.process_index()`` everywhere. ``meet`` exchanges the three numbers once: the last process to arrive writes the
names of all to the store, in blocks. A process reads a block when a name in it is needed, for example for an error that
names a missing process, and keeps it. From the start, all know the names of the process that hosts the store: they are
needed if the store does not answer.

There are no threads here. The training thread joins and meets; any thread may read names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.util
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from gracepoint.errors import AgreementError, GracepointError, SettingsError
from gracepoint.jax_isolation import FALLBACK, cpu_by_fallback
from gracepoint.multihost.barriers import StoreProcessGroup
from gracepoint.multihost.distributed import DEACTIVATE, ENV_TPU, JobAttempt, Place, global_state, join_cluster
from gracepoint.multihost.rendezvous import (
    HEARTBEAT_S,
    Comparison,
    Introduction,
    compare,
    difference,
    not_joined,
    outdated,
)
from gracepoint.multihost.store import InMemoryStore, JaxStore, KeyValueStore
from gracepoint.process_group import ProcessGroup, SingleProcess
from gracepoint.settings import Settings
from gracepoint.wire.names import ENV_JOB_COMPLETION_INDEX, Env

logger = logging.getLogger(__name__)

_BLOCK = 256
_READ_S = 5.0


@dataclasses.dataclass(frozen=True)
class ProcessNames:
    """The names of one process."""

    process_index: int  # jax.process_index()
    service_id: int  # id in JAX's coordination service; process 0 hosts the service
    pod_name: str | None  # None outside a pod


class Members(Sequence[ProcessNames]):
    """The processes by ``process_index``.

    Reading any but the host raises ``StoreUnavailable`` if the store cannot be reached, and ``KeyTimeout`` if it does
    not answer in time.

    Args:
        store: Has the names.
        count: How many processes there are.
        host: The names of the process that hosts the store. None: they are read from it, too.
    """

    def __init__(self, store: KeyValueStore, count: int, host: ProcessNames | None = None) -> None:
        self._store = store
        self._count = count
        self._host = host
        self._blocks: dict[int, list[ProcessNames]] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> ProcessNames: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ProcessNames]: ...

    def __getitem__(self, index: int | slice) -> ProcessNames | Sequence[ProcessNames]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        number = range(self._count)[index]
        if self._host is not None and number == self._host.process_index:
            return self._host
        block, place = divmod(number, _BLOCK)
        if block not in self._blocks:
            rows = json.loads(self._store.get(f"names/{block}", timeout_s=_READ_S))
            self._blocks[block] = [ProcessNames(*names) for names in rows]
        return self._blocks[block][place]


class PodNames(Sequence[str | None]):
    """The pod names of some members, for messages. None where a process has no pod, or its name cannot be read."""

    def __init__(self, members: Sequence[ProcessNames]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self._members[index].pod_name
        except GracepointError as error:
            logger.info("the name of a process cannot be read process=%d error=%s", index, error)
            return None


@dataclasses.dataclass(frozen=True)
class Introduced:
    """What all processes learn when they meet.

    Attributes:
        nonce: The nonce of the process with id 0 in the coordination service.
        members: The processes.
        host: The process that hosts the store: the one with id 0 in the coordination service. Its ``process_index`` may
            be another number.
        miscounted: An injected number of processes that is not the real one. None if all are right.
        last_started_unix_s: When the last of them was started, in seconds since the epoch, by its machine's clock. None
            if a process does not know when it was started.
    """

    nonce: str
    members: Members
    host: ProcessNames
    miscounted: int | None
    last_started_unix_s: float | None


def introduce(
    me: ProcessNames,
    injected: int | None,
    nonce: str,
    *,
    start: JobAttempt,
    lacks: str = "",
    started_unix_s: float | None = None,
    gang: ProcessGroup,
    store: KeyValueStore,
    timeout_s: float,
) -> Introduced:
    """Brings the processes together once and exchanges their names, and when they were started. Collective.

    Args:
        me: This process.
        injected: The number of processes that was injected into this process. None if none was.
        nonce: A random text. Only that of the process with id 0 in the coordination service counts.
        start: The start of the job that this process belongs to.
        lacks: What this process lacks for the training, as a sentence. Empty if nothing.
        started_unix_s: When this process was started, in seconds since the epoch. None: it is not known.
        gang: The processes, by their ids in the coordination service.
        store: Takes the names.
        timeout_s: Seconds to wait for the others.

    Raises:
        AgreementError: The process indices are not 0 to N-1, or the versions differ. Raised in all processes.
        BarrierTimeout: A process did not arrive in time.
        NotJoined: The processes are of several attempts or jobs, or one lacks something. Raised in all processes.
    """
    count = gang.process_count

    def merge(texts: list[str]) -> str:
        messages = [json.loads(text) for text in texts]
        members = sorted((names for names, *_ in messages), key=lambda names: names[0])
        indices = [names[0] for names in members]
        if indices != list(range(count)):
            return json.dumps({"wrong": f"expected the process indices 0 to {count - 1} once each, found {indices}"})
        if problem := _problem([Introduction(*introduction) for *_, introduction, _ in messages]):
            return json.dumps(problem)
        if lacking := [lacks for *_, lacks in messages if lacks]:
            return json.dumps({"not_joined": "; ".join(lacking[:_AT_MOST])})
        for first in range(0, count, _BLOCK):
            store.set(f"names/{first // _BLOCK}", json.dumps(members[first : first + _BLOCK]))
        counts = [injected for _, injected, *_ in messages]
        wrong = next((number for number in counts if number is not None and number != count), None)
        starts = [started for _, _, _, started, *_ in messages]
        last_start = None if None in starts else max(starts)
        return json.dumps(
            {"nonce": messages[0][2], "miscounted": wrong, "last_start": last_start, "host": messages[0][0]}
        )

    import jax

    introduction = Introduction(gang.process_index, count, start.job, start.attempt, start.pod, jax.__version__)
    about = [dataclasses.astuple(me), injected, nonce, started_unix_s, dataclasses.astuple(introduction)]
    message = json.dumps([*about, f"{introduction} {lacks}" if lacks else ""])
    answer = json.loads(gang.reduce("members", message, merge, timeout_s=timeout_s))
    if "wrong" in answer:
        raise AgreementError(answer["wrong"])
    if "not_joined" in answer:
        raise not_joined(answer["not_joined"], start.exit_code)
    host = ProcessNames(*answer["host"])
    return Introduced(answer["nonce"], Members(store, count, host), host, answer["miscounted"], answer["last_start"])


def _problem(all_there: Sequence[Introduction]) -> dict[str, str] | None:
    """Returns why the processes of one JAX cluster cannot train together, as an answer to them. None if they can."""
    newest = max(all_there, key=lambda each: each.attempt)
    for each in all_there:
        verdict = compare(each, newest)
        if verdict is Comparison.FIRST_IS_OLD:
            also = ". It was in the same JAX cluster, so all of its processes end"
            return {"not_joined": outdated(each, newest) + also}
        if verdict is Comparison.OTHER_JOB:
            return {"not_joined": f"{each} is of job {each.job}, and {newest} of job {newest.job}, in one JAX cluster"}
        if verdict is Comparison.DIFFERS:
            return {"wrong": difference(each, newest)}
    return None


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


def join(
    settings: Settings,
    environ: Mapping[str, str] = os.environ,
    waiting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    until: contextlib.ExitStack | None = None,
) -> bool:
    """Joins the JAX cluster that the settings describe, or adopts one that is initialised already.

    Args:
        settings: This process's settings.
        environ: The process's environment.
        waiting: Entered while this process waits for others that are not there.
        until: Until it is closed, this process ends if another one dies, before JAX would abort it. None: until JAX has
            joined the processes. Later on such a death is noted (``distributed.lost_process``).

    Returns:
        True if this call initialised ``jax.distributed``.

    Raises:
        AgreementError: The processes have other numbers of processes, or other versions.
        NotJoined: This process does not get in, for a reason that is not the program's.
        SettingsError: The pod belongs to an Indexed Job, but nothing says how many processes there are; or a
            part of the address or of the process id is missing.
    """
    if global_state.initialized:
        logger.info("adopted the initialised jax.distributed")
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
    start = JobAttempt.of(settings)
    how: dict[str, Any] = {"wait_s": settings.join_timeout_s or None, "waiting": waiting}
    if ENV_TPU in environ:
        logger.info("leaving the cluster's detection to jax reason=%s is set", ENV_TPU)
        injected = Place()
        with contextlib.suppress(SettingsError):  # the pod was not injected: JAX alone knows the place
            injected = Place(settings.coordinator_address, settings.process_count, settings.process_id)
        if injected.is_known:
            how["heartbeat_timeout_seconds"] = HEARTBEAT_S
        joined = join_cluster(Place(), start, meet_as=injected, **how)
    else:
        place = Place(settings.coordinator_address, settings.process_count, settings.process_id)
        how["heartbeat_timeout_seconds"] = HEARTBEAT_S
        joined = join_cluster(place, start, cluster_detection_method=DEACTIVATE, **how)
    if until is None:
        joined.attached()
    else:
        until.callback(joined.attached)
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
        logger.info("jax's own preemption notice was not raised error=%s", str(error).splitlines()[0])


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
        NotJoined: Processes are of several attempts or jobs; or one was given accelerators that JAX does not find.
            Raised in all processes.
        SettingsError: This process was given accelerators for which JAX's package is missing.
    """
    import jax

    global _meetings
    _meetings += 1
    state, start = global_state, JobAttempt.of(settings)
    job = f"{settings.jobset_uid or 'local'}-{settings.restart_attempt}"
    if state.client is None or state.num_processes == 1:
        _check_count(
            [settings.process_count], 1, "jax.distributed" if state.initialized else None, settings.min_processes
        )
        if lacks := lacking_accelerators(os.environ, in_pod=settings.pod_name is not None):
            raise not_joined(f"this process {lacks}", start.exit_code)
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
    try:
        lacks = lacking_accelerators(os.environ, in_pod=settings.pod_name is not None)
    except SettingsError as error:
        everybody.fail("members", error)
        raise
    introduced = introduce(
        me,
        settings.process_count,
        secrets.token_hex(4),
        start=start,
        lacks=lacks,
        started_unix_s=started_unix_s,
        gang=everybody,
        store=hall,
        timeout_s=_MEETING_TIMEOUT_S,
    )
    everybody.retire("backend")
    _check_count([introduced.miscounted], count, "jax.distributed", settings.min_processes)
    attempt = f"{job}-{introduced.nonce}"
    store = JaxStore(state.client, f"gracepoint/{attempt}")
    gang = StoreProcessGroup(store, me.process_index, count, names=PodNames(introduced.members))
    host = introduced.host.process_index
    return Meeting(gang, store, attempt, introduced.members, me, state.client, host, introduced.last_started_unix_s)


# Environment variable -> what its value begins with if a device plugin has set it. Images set
# NVIDIA_VISIBLE_DEVICES=all without any device.
_GIVEN = {
    "NVIDIA_VISIBLE_DEVICES": re.compile("GPU-|MIG-"),
    "TPU_WORKER_HOSTNAMES": re.compile("."),
    "TPU_ACCELERATOR_TYPE": re.compile("."),
}
#: Device files that a pod has only if it was given devices. Plugins that use CDI set no variable.
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*")


def lacking_accelerators(environ: Mapping[str, str], *, in_pod: bool, devices: Path = Path("/dev")) -> str:
    """Returns, as the rest of a sentence, that this container was given accelerators that JAX does not find.

    For a start of which no checkpoint may say what the job computed on before.

    Args:
        environ: The process's environment.
        in_pod: Whether this is a pod. Elsewhere the machine's own devices say nothing.
        devices: The folder of device files.

    Raises:
        SettingsError: JAX's package for such devices is missing, which another start would not change.
    """
    accelerators = [f"{name}={value}" for name in _GIVEN if _GIVEN[name].match(value := environ.get(name, ""))]
    has_package = any(importlib.util.find_spec(name) is not None for name in ("jax_plugins", "libtpu"))
    if in_pod and has_package:
        accelerators += [str(file) for pattern in _DEVICE_FILES for file in sorted(devices.glob(pattern))]
    if not accelerators or not cpu_by_fallback():
        return ""
    shown = ", ".join(accelerators[:_AT_MOST])
    if not has_package:
        raise SettingsError(f"{shown} gives this container accelerators, and JAX finds cpu alone. {FALLBACK}")
    return f"was given accelerators ({shown}), and JAX finds cpu alone. {FALLBACK}"


#: Devices that a message names.
_AT_MOST = 8


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
            f"found {joined}. Start more of them, or lower that number and create the job again"
        )
    wrong = next((count for count in injected if count is not None and count != joined), None)
    if wrong is None:
        return
    if least:
        # Several clusters of one start cannot overwrite each other: only one of them can claim the directory.
        logger.warning("the size of the job was changed injected=%d joined=%d", wrong, joined)
        return
    state = f"the cluster that {by} was initialised with has {joined}" if by else "jax.distributed was not initialised"
    raise AgreementError(
        f"{Env.PROCESS_COUNT}={wrong}: the operator's webhook counted {wrong} training processes in this job, but "
        f"{state}. Several clusters of one job would each take themselves for the whole of it, and overwrite each "
        f"other's checkpoints. Let attach() join the cluster, or call gracepoint.multihost.initialize() without "
        f"arguments before it; where jax.distributed.initialize() is called, give it num_processes={wrong} and the "
        f"same coordinator_address in all pods. If {joined} is right, the JobSet was changed after it was created: "
        f"create it again, or allow it by the policy's spec.training.minProcesses"
    )
