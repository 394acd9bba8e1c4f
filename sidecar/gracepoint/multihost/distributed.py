"""Joins and leaves a JAX cluster with ``jax.distributed``, and adds five things to it.

* A pod finds its place without the API server (``detect``). JAX's own detection on Kubernetes asks the API server,
  which most training pods are not allowed to do, and supports only a single Job. The same information is in the pod
  already: in the environment from our webhook, in the Job controller's completion index, and in the labels that JobSet
  sets on every pod. The environment has precedence over the labels. The number of processes is in neither, unless the
  pod was injected. The container sees the labels if the pod template has this:

      volumes:      [{name: podinfo, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]
      volumeMounts: [{name: podinfo, mountPath: /etc/podinfo}]

* The processes meet before JAX joins them (``rendezvous``), for as long as one is missing. JAX alone ends a process
  from C++ (SIGABRT) when its own timeout is over.
* JAX connects to process 0 directly, whatever proxy the environment names (``exempt_from_proxies``).
* Process 0 connects to the service in itself without looking up its own name, which the cluster's DNS may not know
  yet.
* ``shutdown`` first waits for the other processes at our own barrier, because a process that is late at JAX's barrier
  ends *all* processes with SIGABRT.

Everything runs in the calling thread except the threads of ``rendezvous``, and one request of ``shutdown`` that cannot
be interrupted. It has its own daemon thread ("gracepoint-shutdown"), which ends with the answer. The state of the
cluster is JAX's, and ``State`` reads it at each access, so it does not matter which code joined the cluster.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from gracepoint import machine, trace
from gracepoint.arguments import shown
from gracepoint.errors import ClusterError, SettingsError
from gracepoint.jax_isolation import setting
from gracepoint.multihost.barriers import StoreProcessGroup
from gracepoint.multihost.rendezvous import Gathering, Guest, Host, Introduction, leaving_on_sigterm, pauses, split
from gracepoint.multihost.store import JaxStore
from gracepoint.settings import Settings
from gracepoint.threads import forget_in_child
from gracepoint.wire.names import (
    ENV_JOB_COMPLETION_INDEX,
    JOBSET_LABEL_JOB_INDEX,
    JOBSET_LABEL_NAME,
    JOBSET_LABEL_REPLICATED_JOB,
    JOBSET_LABEL_RESTART_ATTEMPT,
    JOBSET_LABEL_UID,
    Env,
)


class State:
    """The state of the JAX cluster. Before ``initialize`` it is that of a single process."""

    @property
    def initialized(self) -> bool:
        """True while this process is joined to a cluster."""
        return self.client is not None

    @property
    def process_id(self) -> int:
        """This process's id in the coordination service. It may differ from ``jax.process_index()``."""
        index: int = jax_state().process_id
        return index

    @property
    def num_processes(self) -> int:
        count: int = jax_state().num_processes
        return count

    @property
    def coordinator_address(self) -> str | None:
        address: str | None = jax_state().coordinator_address
        return address

    @property
    def client(self) -> Any | None:
        """The coordination service's client. None if this process has not joined a cluster."""
        return jax_state().client

    @property
    def service(self) -> Any | None:
        """The coordination service. None in all processes but process 0."""
        return jax_state().service

    @property
    def preemption_sync_manager(self) -> Any | None:
        """JAX's preemption sync manager, which ``multihost_utils.reached_preemption_sync_point`` uses.

        None if JAX's preemption service is off.
        """
        return jax_state().preemption_sync_manager

    def initialize_preemption_sync_manager(self) -> None:
        """Starts JAX's preemption service in a cluster that was initialised without it. ``initialize`` does so itself.

        Raises:
            ClusterError: The service runs already; there is no cluster; or ``jax_enable_preemption_service`` is off.
        """
        if self.preemption_sync_manager is not None:
            raise ClusterError("the preemption sync manager is initialised already: once is enough, initialize() does")
        if self.client is None:
            raise ClusterError("the preemption sync manager needs a cluster: call initialize() first")
        jax_state().initialize_preemption_sync_manager()
        if self.preemption_sync_manager is None:
            raise ClusterError("jax_enable_preemption_service is False: set it before the preemption sync manager")


global_state = State()


def jax_state() -> Any:
    """Returns JAX's own distributed state, which is not public. Loads JAX."""
    from jax._src import distributed

    return distributed.global_state


#: The path at which Kubernetes' documentation mounts a pod's labels.
POD_LABELS_FILE = "/etc/podinfo/labels"
#: The default of the policy.
DEFAULT_COORDINATOR_PORT = 8476
ENV_JAX_COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
ENV_JAX_COORDINATOR_PORT = "JAX_COORDINATOR_PORT"

# Labels of JobSet (api/jobset/v1alpha2) and of the Job controller (batch/v1) that only this module reads.
_LABEL_COORDINATOR = "jobset.sigs.k8s.io/coordinator"  # <pod hostname>.<subdomain>; absent if the JobSet has none
_LABEL_REPLICAS = "jobset.sigs.k8s.io/replicatedjob-replicas"
_LABEL_GLOBAL_REPLICAS = "jobset.sigs.k8s.io/global-replicas"
_LABEL_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

_ENV_OF_LABEL = {
    JOBSET_LABEL_NAME: Env.JOBSET_NAME,
    JOBSET_LABEL_UID: Env.JOBSET_UID,
    JOBSET_LABEL_REPLICATED_JOB: Env.REPLICATED_JOB,
    JOBSET_LABEL_JOB_INDEX: Env.JOB_INDEX,
    JOBSET_LABEL_RESTART_ATTEMPT: Env.RESTART_ATTEMPT,
    _LABEL_COMPLETION_INDEX: ENV_JOB_COMPLETION_INDEX,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in the cluster. None for each part that is not known."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    @property
    def is_known(self) -> bool:
        """True if nothing of it is missing."""
        return None not in (self.coordinator_address, self.num_processes, self.process_id)


@dataclasses.dataclass(frozen=True)
class JobAttempt:
    """The start of a job that this process belongs to.

    Attributes:
        job: UID of the JobSet or Job. None outside Kubernetes.
        attempt: Restarts of the JobSet when this pod was created.
        pod: Name of the pod, or of the machine.
        exit_code: Exit code of this process if it does not get in.
    """

    job: str | None
    attempt: int
    pod: str
    exit_code: int

    @classmethod
    def of(cls, settings: Settings) -> JobAttempt:
        pod = settings.pod_name or machine.host_name()
        return cls(settings.jobset_uid, settings.restart_attempt, pod, settings.not_joined_exit_code)


def read_labels(path: str) -> dict[str, str]:
    """Reads a pod's labels from the file of a downward-API volume, which has ``key="value"`` on each line.

    Empty if the file does not exist.
    """
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if line)
    return {key: value.strip('"') for key, _, value in pairs}


def detect(environ: Mapping[str, str], labels: Mapping[str, str], explicit: Place) -> Place | None:
    """Completes the parts of the place that were not given.

    Args:
        environ: The process's environment.
        labels: The pod's labels; see ``read_labels``.
        explicit: The parts that were given as arguments. They are not changed.

    Returns:
        The place. None if the pod belongs neither to a JobSet nor to an Indexed Job. In an Indexed Job without a
        JobSet, the process id is the completion index, and other parts that are not given stay None. In a JobSet, all
        three parts are set.

    Raises:
        SettingsError: The pod belongs to a JobSet, and a part cannot be determined. The message names it.
    """
    merged = _merged(environ, labels)
    if Env.JOBSET_NAME not in merged:
        if ENV_JOB_COMPLETION_INDEX not in merged:
            return None
        index = Settings.from_environment(merged).completion_index
        return dataclasses.replace(explicit, process_id=index if explicit.process_id is None else explicit.process_id)
    if explicit.num_processes is not None:
        merged[Env.PROCESS_COUNT] = str(explicit.num_processes)
    if Env.PROCESS_COUNT not in merged:
        raise SettingsError(
            f"num_processes: expected the number of training processes of JobSet {merged[Env.JOBSET_NAME]!r}, which "
            f"no label says, found none. Give it as an argument or as {Env.PROCESS_COUNT}; the operator's webhook "
            f"sets it in JobSets labelled with gracepoint.dev/policy"
        )
    settings = Settings.from_environment(_defaults(merged, labels) | merged)
    process_id = settings.process_id if explicit.process_id is None else explicit.process_id
    address = explicit.coordinator_address or _address(
        settings, labels, process_id, is_explicit=Env.COORDINATOR_JOB in merged
    )
    return Place(address, settings.process_count, process_id)


def _merged(environ: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    merged = {env: labels[label] for label, env in _ENV_OF_LABEL.items() if label in labels}
    return merged | {name: value for name, value in environ.items() if value}


def _defaults(merged: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Returns JobSet's own defaults for a pod that was not injected, as environment variables."""
    defaults = {
        Env.COORDINATOR_PORT: merged.get(ENV_JAX_COORDINATOR_PORT, str(DEFAULT_COORDINATOR_PORT)),
        Env.SUBDOMAIN: merged[Env.JOBSET_NAME],
    }
    replicas = labels.get(_LABEL_REPLICAS)
    if replicas is None or replicas != labels.get(_LABEL_GLOBAL_REPLICAS):
        return defaults  # there are other replicatedJobs, and no label says which of them train
    count = merged[Env.PROCESS_COUNT]
    if not count.isdecimal() or int(count) % int(replicas):
        raise SettingsError(
            f"num_processes: expected a multiple of the {replicas} Jobs of JobSet {merged[Env.JOBSET_NAME]!r}, found "
            f"{count}"
        )
    return defaults | {
        Env.PODS_PER_JOB: str(int(count) // int(replicas)),
        Env.COORDINATOR_JOB: labels[JOBSET_LABEL_REPLICATED_JOB],
    }


def _address(settings: Settings, labels: Mapping[str, str], process_id: int, *, is_explicit: bool) -> str:
    """Returns the address of process 0.

    The JobSet's own ``coordinator`` has precedence over defaults. If ``is_explicit`` is True, the environment names the
    replicatedJob of process 0, which has precedence over ``coordinator``.
    """
    host = labels.get(_LABEL_COORDINATOR)
    if is_explicit or host is None:
        return settings.coordinator_address
    own = f"{settings.jobset_name}-{settings.replicated_job}-{settings.job_index}-{settings.completion_index}"
    if process_id == 0 and host.partition(".")[0] != own:
        raise SettingsError(
            f"{_LABEL_COORDINATOR}: expected the pod of process 0, {own}, as JAX's coordination service runs there, "
            f"found {host}. Correct the JobSet's spec.coordinator, or give coordinator_address"
        )
    return f"{host}:{settings.coordinator_port}"


_KNOCK_S = 1.0


def wait_for_coordinator(address: str, *, timeout_s: float) -> None:
    """Waits until JAX's coordination service listens at ``host:port``. All processes are there by then.

    JAX's own client would look for it only once a second.

    Raises:
        ClusterError: Nothing listens there within the timeout. The message says why the last attempt failed.
        SettingsError: The address has no port.
    """
    where, began, next_s = split(address), time.monotonic(), pauses()
    while True:
        try:
            with socket.create_connection(where, timeout=_KNOCK_S):
                return
        except OSError as error:  # refused, no route, timeout
            waited_s = time.monotonic() - began
            pause_s = next_s(waited_s)
            if waited_s + pause_s > timeout_s:
                raise ClusterError(
                    f"waited {waited_s:.0f} s for the coordination service of process 0 at {address}, which did not "
                    f"answer: {error}. All processes had met before: see the log of process 0"
                ) from error
        time.sleep(pause_s)


logger = logging.getLogger(__name__)

#: Set by GKE on TPU. JAX's own detection is used then, because it knows the slice.
ENV_TPU = "TPU_WORKER_HOSTNAMES"
#: Values of ``cluster_detection_method``: only the detection of this module, and no detection. Other names are JAX's.
JOBSET, DEACTIVATE = "jobset", "deactivate"
_MISSING = "{name}: expected a value, found none: give it to initialize(), or see where it looks for it"
_LOOPBACK = "127.0.0.1"
#: JAX's variable for the address to which process 0 binds.
_ENV_JAX_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
#: gRPC connects through the proxy that one of these names, also to addresses of this machine, unless the first of the
#: second ones that is set lists the host. It reads no others, and none in capital letters.
_ENV_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_ENV_NO_PROXY = ("no_grpc_proxy", "no_proxy")
#: Seconds that JAX may take to join processes of which all are there.
JAX_JOINS_S = 300
#: JAX's own timeout is so much longer than ours: at its end JAX would abort this process.
_JAX_LATER_S = 60

#: What says which start of which job this is.
_OF_START = (Env.JOBSET_UID, Env.RESTART_ATTEMPT, Env.POD_NAME, Env.NOT_JOINED_EXIT_CODE)

# Number of calls of shutdown() in this cluster. It is the key of the barrier, because every call is collective.
_shutdowns = 0
# The processes of the cluster that this process is in. None: it is in none, or joined by other code.
_gathering: Gathering | None = None


def watch_lost(goes_on: Callable[[], bool] | None, has_stalled: Callable[[], bool] = lambda: True) -> None:
    """As ``Gathering.watch``, for the cluster of this process."""
    if _gathering is not None and not (goes_on and setting("jax_enable_recoverability")):
        _gathering.watch(goes_on, has_stalled)


def suspect_loss(suspects: bool) -> None:
    """As ``Gathering.suspect``, for the cluster of this process."""
    if _gathering is not None:
        _gathering.suspect(suspects)


def need_nobody() -> None:
    """Says that this process has finished its training: if it still ends by the end of process 0, it is JAX's abort."""
    if _gathering is not None:
        _gathering.needs_process_0 = lambda: False


def lost_process(within_s: float) -> str:
    """Returns, as the beginning of a sentence, which other process of the cluster has died. Empty: none is known to.

    Args:
        within_s: Seconds to wait for that news.
    """
    return "" if _gathering is None else _gathering.lost(within_s)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 300,
    *,
    cluster_detection_method: str | None = None,
    heartbeat_timeout_seconds: int = 100,
    shutdown_timeout_seconds: int = 300,
    coordinator_bind_address: str | None = None,
    partition_index: int | None = None,
    recoverable: bool | None = None,
    pod_labels_file: str = POD_LABELS_FILE,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Joins the JAX cluster. Call it once, before any JAX computation.

    Arguments that are not given are taken from ``JAX_COORDINATOR_ADDRESS``, then from the pod (``detect``), then
    from JAX's own detection (Slurm, MPI, TPU). ``attach`` uses the cluster that this function has initialised. An
    injected pod need not call this function.

    Args:
        coordinator_address: ``host:port`` of process 0, at which it starts the coordination service.
        num_processes: The number of processes.
        process_id: The id of this process, 0 to ``num_processes - 1``.
        local_device_ids: The devices of the host that this process uses. None: all.
        initialization_timeout: Seconds to wait for processes that are not there. JAX may take as many again.
        cluster_detection_method: None: all of the above. "jobset": only the pod. "deactivate": only the arguments.
            Otherwise the name of one of JAX's methods.
        heartbeat_timeout_seconds: Seconds of silence after which a process counts as dead.
        shutdown_timeout_seconds: Seconds that JAX's own shutdown waits for the other processes.
        coordinator_bind_address: The address to which process 0 binds. None: all interfaces, at the port of
            ``coordinator_address``.
        partition_index: The slice of this process's devices, if slices are numbered by hand. Give it in all processes
            or in none.
        recoverable: Whether the other processes continue when a process other than process 0 dies
            (``jax_enable_recoverability``). None leaves JAX's setting unchanged.
        pod_labels_file: The file with the pod's labels, written by the downward API.
        environ: The process's environment.

    Raises:
        AgreementError: The processes have other numbers of processes, or other versions.
        ClusterError: The function was called twice, or after JAX's backend was initialised; or this version of JAX does
            not support recoverability.
        NotJoined: A process does not come in time; or this one is of an earlier attempt of the job.
        SettingsError: A part is missing or out of range.
        TypeError: ``num_processes`` or ``process_id`` is not an integer.
    """
    _check_not_begun()
    explicit = Place(coordinator_address or environ.get(ENV_JAX_COORDINATOR_ADDRESS) or None, num_processes, process_id)
    place, method = explicit, cluster_detection_method
    if method in (None, JOBSET) and ENV_TPU not in environ:
        detected = detect(environ, read_labels(pod_labels_file), explicit)
        if detected is not None:
            place, method = detected, DEACTIVATE
        elif method == JOBSET:
            raise SettingsError(
                f"cluster_detection_method: expected a pod of a JobSet or Indexed Job, found neither in the "
                f"environment nor in {pod_labels_file}. Show the container its labels by the downward API"
            )
    if method == DEACTIVATE or None not in (place.coordinator_address, place.num_processes, place.process_id):
        _check(place)
    _warn_of_loopback(place, environ)
    if recoverable is not None:
        _set_recoverable(recoverable)
    merged = _merged(environ, read_labels(pod_labels_file))
    joined = join_cluster(
        place,
        JobAttempt.of(Settings.from_environment({name: merged[name] for name in _OF_START if name in merged})),
        wait_s=initialization_timeout,
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
        local_device_ids=local_device_ids,
        cluster_detection_method=method,
        coordinator_bind_address=coordinator_bind_address,
        partition_index=partition_index,
    )
    joined.attached()


def join_cluster(
    place: Place,
    start: JobAttempt,
    *,
    wait_s: float | None,
    initialization_timeout: int = JAX_JOINS_S,
    meet_as: Place | None = None,
    waiting: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    **options: Any,
) -> Gathering:
    """Waits until all processes are there, then calls ``jax.distributed.initialize``.

    If the place is known to JAX's own detection alone, the processes do not meet before. This process ends with its
    exit code nevertheless, and not by JAX, if JAX does not join them in time.

    Args:
        place: What JAX is told.
        start: The start of the job.
        wait_s: Seconds to wait for processes that are not there. None: no limit.
        initialization_timeout: Seconds that JAX may take once all are there.
        meet_as: The place at which the processes meet, if it is not the one that JAX is told.
        waiting: Entered while this process waits for others that are not there.
        options: Further arguments of ``jax.distributed.initialize``.

    Returns:
        What ends this process if another one dies. The caller ends it.

    Raises:
        AgreementError: The processes cannot train together.
        NotJoined: This process does not get in, for a reason that is not the program's.
    """
    import jax

    at = meet_as or place
    bind_address = options.get("coordinator_bind_address") or os.environ.get(_ENV_JAX_BIND_ADDRESS)
    exempt_from_proxies(at.coordinator_address or place.coordinator_address, os.environ)
    gathering = Gathering([], start.exit_code)
    if at.is_known and (at.num_processes or 0) > 1:
        with trace.span("wait for the other processes"), waiting(), leaving_on_sigterm(start.exit_code):
            gathering = _gathered(at, start, wait_s, bind_address, jax.__version__)
    with gathering.joining(initialization_timeout):
        if place.coordinator_address is not None and place.process_id:
            with trace.span("wait for process 0"):
                # Longer than ``joining`` waits, which ends this process by the exit code for it.
                wait_for_coordinator(place.coordinator_address, timeout_s=initialization_timeout + _JAX_LATER_S)
        logger.info(
            "joining the JAX cluster address=%s process=%s of=%s",
            place.coordinator_address,
            place.process_id,
            place.num_processes,
        )
        address = _to_connect_to(place, bind_address)
        jax.distributed.initialize(
            address,
            place.num_processes,
            place.process_id,
            initialization_timeout=initialization_timeout + _JAX_LATER_S,
            **options,
        )
    if address != place.coordinator_address:
        jax_state().coordinator_address = place.coordinator_address  # what others read is the address for all
    _remember(gathering, hosts_service=meet_as is None)
    return gathering


def _remember(gathering: Gathering, *, hosts_service: bool) -> None:
    """Watches who dies as long as this process is in the cluster.

    Args:
        gathering: The processes.
        hosts_service: Whether JAX's service is at the place of the meeting. On TPU it has another port.
    """
    global _gathering
    _gathering, client = gathering, jax_state().client
    # Whoever has called jax.distributed.shutdown() needs nobody.
    gathering.needs_process_0 = lambda: hosts_service and client is not None and jax_state().client is client
    forget_in_child(gathering, Gathering.forget)
    atexit.register(_leave_unless_failed)


def _leave_unless_failed() -> None:
    """At the interpreter's end: to the others, this process has died unless it ends well."""
    if _gathering is not None and getattr(sys, "last_value", None) is None:
        _gathering.leaving()


def _gathered(
    at: Place, start: JobAttempt, wait_s: float | None, bind_address: str | None, jax_version: str
) -> Gathering:
    """Waits until all processes are there."""
    address, process_id, count = at.coordinator_address, at.process_id, at.num_processes
    assert address is not None
    assert process_id is not None
    assert count is not None
    me = Introduction(process_id, count, start.job, start.attempt, start.pod, jax_version)
    if process_id:
        return Gathering([Guest(me, address, wait_s, start.exit_code).gather()], start.exit_code)
    listens_at = bind_address or f":{split(address)[1]}"
    return Gathering(Host(me, listens_at, wait_s, start.exit_code).gather(), start.exit_code)


def exempt_from_proxies(address: str | None, environ: MutableMapping[str, str]) -> None:
    """Has gRPC, with which JAX joins the processes, connect to the coordinator directly if the environment has a proxy.

    A proxy is for what is outside the cluster, and would not reach a pod by its name. Only gRPC reads the variable.
    """
    proxies = [name for name in _ENV_PROXIES if environ.get(name)]
    hosts = [] if address is None else [split(address)[0], _LOOPBACK]
    hosts += [name for name in environ.get(ENV_TPU, "").split(",") if name]
    listed = next((environ[name] for name in _ENV_NO_PROXY if name in environ), "")
    missing = [host for host in dict.fromkeys(hosts) if host not in listed.split(",")]
    if proxies and missing:
        environ[_ENV_NO_PROXY[0]] = ",".join([*filter(None, [listed]), *missing])
        logger.info("JAX connects to these directly, not by the proxy of %s: %s", proxies[0], ", ".join(missing))


def _to_connect_to(place: Place, bind_address: str | None) -> str | None:
    """Returns the address at which this process connects to the coordination service.

    Process 0 hosts the service, and uses the loopback interface. The name of a new pod can be looked up only some
    hundred milliseconds after its processes run. If the first look-up fails, gRPC waits a second before the next one,
    and all processes wait for process 0.
    """
    host, _, port = (place.coordinator_address or "").rpartition(":")
    if place.process_id != 0 or not host or _is_loopback(host) or bind_address or _has_certificates():
        return place.coordinator_address
    return f"{_LOOPBACK}:{port}"


def _has_certificates() -> bool:
    """Returns whether the coordination service has mutual TLS, which JAX has from 0.12 on.

    Its certificates are checked against the address, so another address is another place.
    """
    import jax

    return bool(getattr(jax.config, "jax_mtls_cert_file", None))


def shutdown(timeout_s: float = 300.0) -> None:
    """Leaves the cluster, together with the other processes. Has no effect if no cluster was joined. Safe to repeat.

    Collective. A process that ends without this call takes part in JAX's own shutdown at exit, but the processes that
    call this function wait for it here.

    Args:
        timeout_s: Seconds to wait for the other processes.

    Raises:
        BarrierTimeout: Some processes did not arrive in time. The message names them by their ids in the coordination
            service. This process stays in the cluster and may call again.
    """
    import jax

    global _shutdowns, _gathering
    state = jax_state()
    if state.client is None:
        return
    _shutdowns += 1
    store = JaxStore(state.client, "gracepoint/shutdown")
    began = time.monotonic()
    StoreProcessGroup(store, state.process_id, state.num_processes).barrier(str(_shutdowns), timeout_s=timeout_s)
    if state.process_id == 0 and setting("jax_enable_recoverability"):
        _wait_until_alone(state, timeout_s - (time.monotonic() - began))
    jax.distributed.shutdown()
    _shutdowns = 0
    if _gathering is not None:
        _gathering.end()
        _gathering = None


def _wait_until_alone(state: Any, timeout_s: float) -> None:
    """Keeps process 0, which hosts the service, until the others have left. With recoverability, JAX does not wait.

    The service answers a request for the live nodes once every live process has sent one. Only process 0 sends one, so
    the answer comes when the other processes have left.
    """
    asking = threading.Thread(
        target=state.client.get_live_nodes,
        args=(list(range(state.num_processes)),),
        name="gracepoint-shutdown",
        daemon=True,
    )
    asking.start()
    asking.join(max(0.0, timeout_s))
    if asking.is_alive():
        logger.warning("not all other processes have left the cluster, which ends with this one waited_s=%g", timeout_s)


def _check_not_begun() -> None:
    from jax._src import xla_bridge

    if global_state.initialized:
        raise ClusterError(
            "initialize(): the JAX cluster was joined before, by this function or by jax.distributed.initialize(). "
            "Call one of them, once; attach() adopts it"
        )
    if xla_bridge.backends_are_initialized():
        raise ClusterError(
            "initialize(): JAX's backend is in use already, for this process alone. Call it before any computation, "
            "and before jax.devices() and the like"
        )


def _check(place: Place) -> None:
    if place.coordinator_address is None:
        raise SettingsError(_MISSING.format(name="coordinator_address"))
    count, process_id = _integer("num_processes", place.num_processes), _integer("process_id", place.process_id)
    if not 0 <= process_id < count:
        raise SettingsError(f"process_id: expected 0 to num_processes - 1, found {process_id} of {count}")


def _warn_of_loopback(place: Place, environ: Mapping[str, str]) -> None:
    """Logs a warning if processes in other pods cannot reach the coordinator."""
    host = (place.coordinator_address or "").rpartition(":")[0]
    in_a_pod = "KUBERNETES_SERVICE_HOST" in environ
    if in_a_pod and (place.num_processes or 1) > 1 and _is_loopback(host):
        logger.warning(
            "address=%s is a loopback address: processes in other pods cannot reach it; expected a name or address of "
            "process 0's pod",
            place.coordinator_address,
        )


def _is_loopback(host: str) -> bool:
    name = host.strip("[]")
    return name in ("localhost", "::1") or name.startswith("127.")


def _integer(name: str, value: int | None) -> int:
    if value is None:
        raise SettingsError(_MISSING.format(name=name))
    if not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, found {shown(value)}")
    return value


def _set_recoverable(recoverable: bool) -> None:
    import jax

    try:
        jax.config.update("jax_enable_recoverability", recoverable)
    except AttributeError as error:
        raise ClusterError(f"recoverable: jax {jax.__version__} has no jax_enable_recoverability") from error
