"""The kinds of API objects, and what the operator needs to know about nodes and pods: small frozen records. Pure.

Decisions use these records, so that no rule depends on the shape of API objects. Times are seconds since the epoch
(``_at``), durations are seconds (``_s``). Workloads and their Jobs are read in ``workloads``.

If a field has a wrong type, the functions that read it raise ``Unreadable``, or an error that ``read_errors.reading``
turns into it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import ipaddress
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from gracepoint.wire import names
from gracepoint.wire.names import GROUP
from gracepoint_operator.read_errors import Unreadable, reading

#: Characters in the name of an object.
LONGEST_NAME = 253

_Shared = TypeVar("_Shared", bound=Hashable)


def parse_time(text: str | None) -> float | None:
    """Returns the seconds since the epoch of an RFC 3339 time. None if there is no time."""
    return None if not text else datetime.datetime.fromisoformat(text).timestamp()


def format_time(at: float) -> str:
    """Returns a time as RFC 3339 in UTC with microseconds, as the API's MicroTime."""
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def true_conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the conditions that are True, by type."""
    return {text(item["type"]): item for item in status.get("conditions") or () if item.get("status") == "True"}


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"expected a text, found {value!r:.80}")
    # JSON can hold half of a surrogate pair, which cannot be written to another object.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise Unreadable(f"expected Unicode text, found {value!r:.80}")
    return value


def object_name(value: Any) -> str:
    """Returns the name of an object, which may be empty. A longer one than objects can have fits into no record."""
    if len(name := text(value)) > LONGEST_NAME:
        raise Unreadable(f"expected at most {LONGEST_NAME} characters, found {len(name)}: {name:.80}")
    return name


@functools.lru_cache(maxsize=65536)
def shared(value: _Shared) -> _Shared:
    """Returns an equal value that was seen before, if there is one, so that equal values are in memory once."""
    return value


def read_labels(meta: Mapping[str, Any]) -> dict[str, str]:
    return {shared(text(key)): shared(text(value)) for key, value in (meta.get("labels") or {}).items()}


def owner_uid(meta: Mapping[str, Any]) -> str:
    """Returns the UID of the object that controls this one. Empty if there is none."""
    owners = (owner for owner in meta.get("ownerReferences") or () if owner.get("controller") is True)
    return next((text(owner["uid"]) for owner in owners), "")


def optional_number(value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(number := float(value)):
        raise Unreadable(f"expected a number, found {value!r:.80}")
    return number


def label_number(label: str, default: int) -> int:
    """Returns the number in a label, which has at most 63 characters."""
    return int(label) if label.isdecimal() and len(label) < 64 else default


#: What Karpenter and the cluster autoscaler look for before they choose to remove a node.
PROTECTING = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
#: Its value lists those that the operator has set, separated by commas.
SET_BY_US = f"{GROUP}/protected-by"
#: All that is read of a pod's annotations.
READ = (*PROTECTING, SET_BY_US)


def changes(present: Mapping[str, str], *, protect: bool) -> dict[str, str | None]:
    """Returns the annotations that have to change. A value of None removes the annotation. Empty if nothing has to.

    Users may set the annotations that protect pods from autoscalers themselves. So the operator notes in another
    annotation which ones it has set, and changes no others.

    Args:
        present: Those of ``READ`` that the pod has.
        protect: Whether the pod is to be protected.
    """
    set_by_operator = {key for key in present.get(SET_BY_US, "").split(",") if key in PROTECTING}
    if not protect:
        return dict.fromkeys([*sorted(set_by_operator & present.keys()), SET_BY_US]) if SET_BY_US in present else {}
    to_add = {key: value for key, value in PROTECTING.items() if key not in present}
    if not to_add:
        return {}
    return {**to_add, SET_BY_US: ",".join(sorted(set_by_operator | to_add.keys()))}


#: Of what the scheduler and the kubelet say of a pod that waits, so many characters are kept.
LONGEST_SAID = 300


class HeldUp(StrEnum):
    """Where a pod is held up before its program runs, or after it has ended."""

    UNSCHEDULED = "unscheduled"  # no node was found yet
    GATED = "gated"  # it has scheduling gates
    REFUSED = "refused"  # it has failed without having run a container
    INIT = "init"  # an init container runs, or waits
    CONTAINER = "container"  # a container waits
    SIDECAR = "sidecar"  # a container has ended, and another one runs
    ENDED = "ended"  # it has failed after a container has run; whether that is an error, its exit code says


#: The label that the API server gives to every namespace: its name.
LABEL_NAMESPACE_NAME = "kubernetes.io/metadata.name"
LABEL_JOB_NAME = "batch.kubernetes.io/job-name"
LABEL_JOB_UID = "batch.kubernetes.io/controller-uid"
LABEL_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
DEFAULT_GRACE_S = 30.0  # terminationGracePeriodSeconds if the API server has not set it

_SPOT_LABELS = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")


@dataclasses.dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node.

    Attributes:
        added_at: ``timeAdded``. Usually only NoExecute taints have it. None if it is missing.
    """

    key: str
    value: str
    effect: str
    added_at: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node.

    Attributes:
        spot: True for GKE's Spot and preemptible nodes, which cut the grace period of pods.
        holds_evictions: False if an administrator has said that nothing holds up evictions from it
            (``wire.names.LABEL_EVICTION_HOLD``).
        domains: The values of the labels of its failure domains, the widest first. A label that is missing is empty.
    """

    name: str
    uid: str
    spot: bool
    holds_evictions: bool = True
    domains: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace."""

    name: str
    uid: str
    labels: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration of a pod. If ``seconds`` is None, the taint is tolerated forever."""

    key: str
    operator: str
    value: str
    effect: str
    seconds: float | None

    def tolerates(self, taint: Taint) -> bool:
        """Returns whether it tolerates a taint, as ``Toleration.ToleratesTaint`` of k8s.io/api/core/v1."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or self.value == taint.value


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Which workload a pod belongs to, as its labels say.

    Attributes:
        workload_uid: UID of the workload. Empty if the pod belongs to none.
        restart_attempt: How often the workload had restarted when the pod was made. -1 if the label is not a number:
            such a pod belongs to no attempt.
        replicated_job: Name of the part of the workload that makes it. Empty if the workload has no parts.
        job_index: Number of its Job within that part.
    """

    workload_uid: str = ""
    restart_attempt: int = 0
    replicated_job: str = ""
    job_index: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Holdup:
    """What holds up a pod, as the scheduler and the kubelet say.

    Attributes:
        at: Where it is held up.
        reason: Theirs, in one word. Empty if they say none.
        message: Theirs, cut to ``LONGEST_SAID`` characters.
        container: The container that it is about. Empty: none.
        exit_code: Of ``HeldUp.SIDECAR`` and ``HeldUp.ENDED``: the exit code of the container that has ended.
    """

    at: HeldUp
    reason: str = ""
    message: str = ""
    container: str = ""
    exit_code: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """A pod.

    Attributes:
        node: Name of its node. Empty while it has none.
        created_at: When it was created. 0 if the object does not say.
        bound_at: When the scheduler bound it to ``node``. None while it is not bound, or if the object does not say.
        grace_s: Its own grace period, in seconds.
        deletion_at: When it will have been killed (``deletionTimestamp``, which includes the grace period). None if it
            is not being deleted.
        deletion_grace_s: The grace period of that deletion. None if it is not being deleted.
        phase: As in the status: Pending, Running, Succeeded or Failed.
        ready: Whether its condition Ready is True.
        started_at: When the last of its containers was started. None while one was not.
        ended_at: When the last of its containers ended, or when its kubelet refused it. None while one has not.
        membership: The workload to which it belongs.
        protection: Its annotations that autoscalers look at, and the operator's note about them.
        holdup: What holds it up, or how it has failed. None if all its containers run, or have ended well.
    """

    namespace: str
    name: str
    uid: str
    node: str
    labels: Mapping[str, str]
    created_at: float
    bound_at: float | None
    grace_s: float
    tolerations: tuple[Toleration, ...]
    deletion_at: float | None
    deletion_grace_s: float | None
    phase: str
    ready: bool
    started_at: float | None
    ended_at: float | None
    membership: Membership
    protection: tuple[tuple[str, str], ...] = ()
    holdup: Holdup | None = None

    @property
    def finished(self) -> bool:
        """True if all its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def workload_uid(self) -> str:
        return self.membership.workload_uid

    @property
    def restart_attempt(self) -> int:
        return self.membership.restart_attempt

    @property
    def job_name(self) -> str:
        return self.labels.get(LABEL_JOB_NAME, "")

    @property
    def job_uid(self) -> str:
        """UID of its Job. Empty if the pod does not say."""
        return self.labels.get(LABEL_JOB_UID, "")

    @property
    def policy(self) -> str:
        return self.labels.get(names.LABEL_POLICY, "")

    @property
    def helps(self) -> bool:
        """True if it is no process of the gang: it loads data, or starts the others."""
        return self.labels.get(names.LABEL_ROLE) == names.ROLE_HELPER

    @property
    def replicated_job(self) -> str:
        return self.membership.replicated_job

    @property
    def completion_index(self) -> int:
        """The completion index of the pod in its Job. 0 if it has none."""
        return label_number(self.labels.get(LABEL_COMPLETION_INDEX, "0"), 0)


def read_taint(entry: Mapping[str, Any]) -> Taint:
    """Reads an entry of a node's ``spec.taints``.

    Raises:
        Unreadable: It is not a taint.
    """
    with reading("a taint"):
        return Taint(
            key=text(entry["key"]),
            value=text(entry.get("value") or ""),
            effect=text(entry.get("effect") or ""),
            added_at=parse_time(entry.get("timeAdded")),
        )


def read_node(body: Mapping[str, Any], spread: Sequence[str] = ()) -> Node:
    """Reads a node.

    Args:
        body: The object as the API server gives it.
        spread: The labels of failure domains, the widest first.

    Raises:
        Unreadable: It is not a node.
    """
    with reading("a node"):
        meta = body["metadata"]
        labels = read_labels(meta)
        return Node(
            name=text(meta["name"]),
            uid=text(meta["uid"]),
            spot=any(labels.get(label) == "true" for label in _SPOT_LABELS),
            holds_evictions=labels.get(names.LABEL_EVICTION_HOLD) != names.EVICTION_HOLD_OFF,
            domains=shared(tuple(labels.get(label, "") for label in spread)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotServerPod:
    """The pod of a snapshot server.

    Attributes:
        uid: UID of the pod. What it holds ends with it.
        node: Name of its node. Empty while it has none.
        host: Its IP address. Empty while it has none.
        ready: Whether it serves.
        ending: Whether it is being deleted: what it holds can still be read, and it takes nothing more.
        installation: The value of its label: whose it is.
    """

    uid: str
    node: str
    host: str
    ready: bool
    ending: bool
    installation: str

    @property
    def serves(self) -> bool:
        """Whether it can be asked."""
        return bool(self.ready and self.node and self.host)


def read_snapshot_server(body: Mapping[str, Any]) -> SnapshotServerPod:
    """Reads the pod of a snapshot server.

    Raises:
        Unreadable: It is not a pod.
    """
    with reading("a snapshot server"):
        meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        return SnapshotServerPod(
            uid=text(meta["uid"]),
            node=shared(object_name(spec.get("nodeName") or "")),
            host=str(ipaddress.ip_address(text(status["podIP"]))) if status.get("podIP") else "",
            ready="Ready" in true_conditions(status),
            ending=meta.get("deletionTimestamp") is not None,
            installation=shared(read_labels(meta).get(names.LABEL_SNAPSHOT_SERVER, "")),
        )


def read_namespace(body: Mapping[str, Any]) -> Namespace:
    """Reads a namespace.

    Raises:
        Unreadable: It is not a namespace.
    """
    with reading("a namespace"):
        meta = body["metadata"]
        return Namespace(name=text(meta["name"]), uid=text(meta["uid"]), labels=read_labels(meta))


def read_pod(body: Mapping[str, Any], membership_of: Callable[[Mapping[str, str]], Membership]) -> Pod:
    """Reads a pod.

    Args:
        body: The object as the API server gives it.
        membership_of: Finds the workload in the labels of a pod; see ``workloads``.

    Raises:
        Unreadable: It is not a pod.
    """
    with reading("a pod"):
        meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        conditions, labels = true_conditions(status), read_labels(meta)
        containers = [entry.get("state") or {} for entry in status.get("containerStatuses") or ()]
        scheduled = conditions.get("PodScheduled")
        holdup = _read_holdup(spec, status)
        if holdup is not None and holdup.at is HeldUp.REFUSED:
            # Its kubelet writes no other time. After a reboot of its machine it may refuse a pod that ran, and then it
            # drops all that the status said of that.
            ended_at = written_at(body, "f:status", "f:reason")
        else:
            ended_at = _last([_time_of(state, "finishedAt", "terminated") for state in containers])
        return Pod(
            namespace=shared(text(meta["namespace"])),
            name=text(meta["name"]),
            uid=text(meta["uid"]),
            node=shared(object_name(spec.get("nodeName") or "")),
            labels=labels,
            created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
            bound_at=parse_time(scheduled.get("lastTransitionTime")) if scheduled else None,
            grace_s=optional_number(spec.get("terminationGracePeriodSeconds"), DEFAULT_GRACE_S),
            tolerations=shared(
                tuple(
                    Toleration(
                        key=text(item.get("key") or ""),
                        operator=text(item.get("operator") or "Equal"),
                        value=text(item.get("value") or ""),
                        effect=text(item.get("effect") or ""),
                        seconds=optional_number(item.get("tolerationSeconds"), None),
                    )
                    for item in spec.get("tolerations") or ()
                )
            ),
            deletion_at=parse_time(meta.get("deletionTimestamp")),
            deletion_grace_s=optional_number(meta.get("deletionGracePeriodSeconds"), None),
            phase=shared(text(status.get("phase") or "Pending")),
            ready="Ready" in conditions,
            started_at=_last([_time_of(state, "startedAt", "running", "terminated") for state in containers]),
            ended_at=ended_at,
            membership=shared(membership_of(labels)),
            protection=_protection(meta.get("annotations") or {}),
            holdup=holdup,
        )


def _read_holdup(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Holdup | None:
    """Reads what holds up a pod. Equal ones are in memory once: a thousand pods may wait for the same."""
    holdup = _holdup(spec, status)
    return None if holdup is None else shared(holdup)


def written_at(body: Mapping[str, Any], *path: str) -> float | None:
    """Returns when the owner of a field last wrote the object: the field had its value by then.

    Args:
        body: The object as the API server gives it.
        path: The field, as ``managedFields`` names its parts.
    """
    metadata = body.get("metadata")
    entries = metadata.get("managedFields") if isinstance(metadata, Mapping) else None
    times = []
    for entry in entries if isinstance(entries, list | tuple) else ():
        owned: Any = entry.get("fieldsV1") or {}
        for part in path:
            owned = owned.get(part) if isinstance(owned, Mapping) else None
        if owned is not None:
            times.append(parse_time(entry.get("time")))
    return max((time for time in times if time is not None), default=None)


def _holdup(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Holdup | None:
    phase = status.get("phase") or "Pending"
    main, init = status.get("containerStatuses") or (), status.get("initContainerStatuses") or ()
    if phase == "Failed":
        # The garbage collector fails pods of nodes that are gone, with the states as the kubelet wrote them last.
        ran = any(_has_run(entry) or (entry.get("state") or {}).get("running") for entry in (*main, *init))
        return _ended(_training(spec, main)) if ran else _said(HeldUp.REFUSED, status)
    if phase == "Succeeded" or any(_has_failed(entry) for entry in init):
        return None
    if any(_has_run(entry) for entry in main):
        return _beside(spec, main) if phase == "Running" else None
    if not spec.get("nodeName"):
        scheduled = _condition(status, "PodScheduled")
        return _said(HeldUp.GATED if scheduled.get("reason") == "SchedulingGated" else HeldUp.UNSCHEDULED, scheduled)
    sidecars = {item.get("name") for item in spec.get("initContainers") or () if item.get("restartPolicy") == "Always"}
    for entry in init:
        if (waits := _waits_in_init(entry, is_sidecar=entry.get("name") in sidecars)) is not None:
            return waits
    for entry in main:
        if (state := (entry.get("state") or {}).get("waiting")) is not None:
            return _said(HeldUp.CONTAINER, state, text(entry.get("name") or ""))
    return None if main or phase == "Running" else Holdup(HeldUp.CONTAINER)  # its kubelet has not looked at it


def _has_run(entry: Mapping[str, Any]) -> bool:
    """True if a container has ended, or has been started again: its program, or the start of that, has failed."""
    states = ((entry.get("state") or {}).get("terminated"), (entry.get("lastState") or {}).get("terminated"))
    return any(states) or bool(entry.get("restartCount"))


def _has_failed(entry: Mapping[str, Any]) -> bool:
    """True if an init container has failed: that is a program's error, too."""
    states = ((entry.get("state") or {}).get("terminated"), (entry.get("lastState") or {}).get("terminated"))
    return any(state and state.get("exitCode") for state in states)


def _ended(main: Sequence[Mapping[str, Any]]) -> Holdup | None:
    """How a container of a pod has ended that has failed. None if it is not known, or if one was started again."""
    for entry in main:
        terminated = (entry.get("state") or {}).get("terminated") or {}
        if terminated.get("exitCode") and not any(_was_restarted(item) for item in main):
            holdup = _said(HeldUp.ENDED, terminated, text(entry.get("name") or ""))
            return dataclasses.replace(holdup, exit_code=int(optional_number(terminated["exitCode"], 0)))
    return None


def _was_restarted(entry: Mapping[str, Any]) -> bool:
    """True if a container was started again.

    A kubelet that does not know a container that ran, as its machine is a fresh one, counts a restart, and starts none
    (k8s.io/kubernetes/pkg/kubelet/kubelet_pods.go, ``convertToAPIContainerStatuses``).
    """
    is_lost = ((entry.get("state") or {}).get("terminated") or {}).get("reason") == "ContainerStatusUnknown"
    return bool(optional_number(entry.get("restartCount"), 0) > is_lost)


def _waits_in_init(entry: Mapping[str, Any], *, is_sidecar: bool) -> Holdup | None:
    """What an init container waits for, or that it runs. None if it has ended, or is a sidecar that was started."""
    state = entry.get("state") or {}
    if state.get("terminated") or (is_sidecar and entry.get("started")):
        return None
    return _said(HeldUp.INIT, state.get("waiting") or {}, text(entry.get("name") or ""))


def _training(spec: Mapping[str, Any], main: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The statuses of the container that trains, which has the operator's URL; of all if none has it."""
    trains = {
        item.get("name")
        for item in spec.get("containers") or ()
        if any(variable.get("name") == names.Env.OPERATOR_URL for variable in item.get("env") or ())
    }
    return [entry for entry in main if entry.get("name") in trains] if trains else main


def _beside(spec: Mapping[str, Any], main: Sequence[Mapping[str, Any]]) -> Holdup | None:
    """The container that runs on beside the training, which has ended. None if there is none, or one started again."""
    terminated = [state for entry in _training(spec, main) if (state := (entry.get("state") or {}).get("terminated"))]
    running = [text(entry.get("name") or "") for entry in main if (entry.get("state") or {}).get("running")]
    if not (terminated and running) or any(entry.get("restartCount") for entry in main):
        return None
    return Holdup(
        HeldUp.SIDECAR, container=running[0], exit_code=int(optional_number(terminated[0].get("exitCode"), 0))
    )


def _said(at: HeldUp, state: Mapping[str, Any], container: str = "") -> Holdup:
    reason, message = text(state.get("reason") or ""), text(state.get("message") or "")
    return Holdup(at, reason[:LONGEST_NAME], " ".join(message.split())[:LONGEST_SAID], container[:LONGEST_NAME])


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition, whatever its status is. Empty if there is none."""
    return next((item for item in status.get("conditions") or () if item.get("type") == kind), {})


def _protection(annotations: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    present = [key for key in READ if key in annotations]
    protection: tuple[tuple[str, str], ...] = shared(tuple((key, text(annotations[key])) for key in present))
    return protection


def _time_of(state: Mapping[str, Any], field: str, *names_of_states: str) -> float | None:
    """Returns a time in the state of a container, which has one entry. None if it is in another state."""
    return next((parse_time(state[name].get(field)) for name in names_of_states if state.get(name)), None)


def _last(times: Sequence[float | None]) -> float | None:
    """Returns the latest time. None if there are none, or one of them has not come."""
    past = [at for at in times if at is not None]
    return max(past) if past and len(past) == len(times) else None


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of objects that the operator uses, and its path in the API."""

    prefix: str  # "/api/v1" or "/apis/<group>/<version>"; without the version if any version will do
    plural: str
    any_version: bool = False  # True: the version that the cluster prefers is read
    subset: str = ""  # distinguishes kinds at the same place that are watched with different label selectors
    namespaced: bool = True

    @property
    def title(self) -> str:
        """The plural, with the subset if there is one. Different for all kinds that are watched."""
        return f"{self.plural}-{self.subset}" if self.subset else self.plural

    @property
    def group(self) -> str:
        """The API group. Empty for the core group."""
        return self.prefix.split("/")[2] if self.prefix.startswith("/apis/") else ""

    @property
    def version(self) -> str | None:
        """The version in its group. None if any will do."""
        return None if self.any_version else self.prefix.rpartition("/")[2]

    @property
    def api_version(self) -> str:
        """Group and version, as in ``apiVersion`` of objects and references."""
        return self.prefix.removeprefix("/apis/").removeprefix("/api/")

    def of_version(self, group_version: str) -> Kind:
        """Returns the same kind in a version of its group."""
        return dataclasses.replace(self, prefix=f"/apis/{group_version}", any_version=False)

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        parts = [self.prefix]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/".join(parts)


_GRACEPOINT = f"/apis/{names.GROUP}/{names.API_VERSION}"
NAMESPACES = Kind("/api/v1", "namespaces", namespaced=False)
CONFIG_MAPS = Kind("/api/v1", "configmaps")
SECRETS = Kind("/api/v1", "secrets")
MUTATING_WEBHOOKS = Kind("/apis/admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", namespaced=False)
VALIDATING_WEBHOOKS = Kind("/apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", namespaced=False)
NODES = Kind("/api/v1", "nodes", namespaced=False)
PODS = Kind("/api/v1", "pods")
#: The pods of snapshot servers, in the operator's own namespace. Watched only if there are any.
SNAPSHOT_SERVERS = Kind("/api/v1", "pods", subset="snapshot-servers")
JOBS = Kind("/apis/batch/v1", "jobs")
CRDS = Kind("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)
POD_DISRUPTION_BUDGETS = Kind("/apis/policy/v1", "poddisruptionbudgets")
#: Kinds of Karpenter and Kueue. A cluster may lack them, or get them later. The fields that are read from Kueue's kind
#: are the same in v1beta1 and v1beta2 except for one name.
NODE_CLAIMS = Kind("/apis/karpenter.sh/v1", "nodeclaims", namespaced=False)
KUEUE_WORKLOADS = Kind("/apis/kueue.x-k8s.io", "workloads", any_version=True)
#: Dynamic resource allocation: which pods use which devices, and the taints of devices. Watched only if configured.
RESOURCE_CLAIMS = Kind("/apis/resource.k8s.io/v1", "resourceclaims")
RESOURCE_SLICES = Kind("/apis/resource.k8s.io/v1", "resourceslices", namespaced=False)
DEVICE_TAINT_RULES = Kind("/apis/resource.k8s.io/v1", "devicetaintrules", namespaced=False)
DEVICES = frozenset({RESOURCE_CLAIMS, RESOURCE_SLICES, DEVICE_TAINT_RULES})
POLICIES = Kind(_GRACEPOINT, "checkpointpolicies")
CLUSTER_POLICIES = Kind(_GRACEPOINT, "clustercheckpointpolicies", namespaced=False)
PREEMPTIONS = Kind(_GRACEPOINT, "preemptions")
REQUESTS = Kind(_GRACEPOINT, "preemptionrequests")
EVENTS = Kind("/apis/events.k8s.io/v1", "events")
SUBJECT_ACCESS_REVIEWS = Kind("/apis/authorization.k8s.io/v1", "subjectaccessreviews", namespaced=False)
TOKEN_REVIEWS = Kind("/apis/authentication.k8s.io/v1", "tokenreviews", namespaced=False)
LEASES = Kind("/apis/coordination.k8s.io/v1", "leases")
