"""The objects of a large cluster, as the API server stores them. Pure.

Training pods have about 20 kB, with their sidecars, environment and ``managedFields``; other pods about 8 kB; nodes
about 16 kB, most of it the list of images. Everything is computed from the size alone, so each run has the same names
and UIDs.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import uuid
from collections.abc import Iterator

from benchmarks.operator_scale_bodies import (
    ACCOUNT,
    GRACE_S,
    PODS_A_JOB,
    POLICY,
    SERVERS,
    Json,
    job,
    jobset,
    node,
    server_pod,
    training_pod,
    web_pod,
)
from gracepoint.wire import names
from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator.model.preemption_record import preemption_name
from gracepoint_operator.resources import (
    Acknowledgements,
    CheckpointPolicy,
    Condition,
    ConditionStatus,
    PolicyCopy,
    PreemptionSpec,
    PreemptionStatus,
    Replica,
    StageTime,
    WorkloadReference,
)

__all__ = ["ACCOUNT", "Gang", "Size", "gangs", "stored", "uid_of", "unrelated_pods"]

_NAMESPACES = 20
#: A policy's status has room for 50.
_JOBSETS_A_NAMESPACE = 40
_OTHER_NAMESPACES = 50
_PODS_A_NODE = 4
_UUIDS = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")


@dataclasses.dataclass(frozen=True)
class Size:
    """How many objects there are. ``pods`` and ``big`` count training pods; ``big`` is the number in one JobSet."""

    nodes: int
    pods: int
    jobsets: int
    unrelated: int
    records: int
    big: int

    @staticmethod
    def of(scale: float) -> Size:
        """Returns the size of the goals, times ``scale``."""
        full = (5_000, 20_000, 500, 30_000, 5_000, 4_000)
        return Size(*(max(2, round(number * scale)) for number in full))


@dataclasses.dataclass(frozen=True)
class Gang:
    """A JobSet with its pods.

    Attributes:
        first: Number of its first pod, of all training pods.
    """

    namespace: str
    name: str
    first: int
    count: int

    @property
    def uid(self) -> str:
        return uid_of("jobset", self.namespace, self.name)

    def pod_name(self, index: int) -> str:
        return f"{self.job_name(index // PODS_A_JOB)}-{index % PODS_A_JOB}-x7k2q"

    def job_name(self, job: int) -> str:
        return f"{self.name}-workers-{job}"

    def pod_uid(self, index: int) -> str:
        return uid_of("pod", self.namespace, self.pod_name(index))

    def node(self, index: int) -> str:
        return node_name((self.first + index) // _PODS_A_NODE)


def gangs(size: Size) -> list[Gang]:
    """Returns the JobSets. The first one is the big one."""
    counts = [size.big]
    others = size.jobsets - 1
    each = (size.pods - size.big) // others // _PODS_A_NODE * _PODS_A_NODE  # so that no two JobSets share a node
    counts += [each] * others
    counts[-1] += size.pods - sum(counts)
    found, first, namespaces = [], 0, _training_namespaces(size)
    for number, count in enumerate(counts):
        found.append(Gang(namespaces[number % len(namespaces)], f"train-{number:04}", first, count))
        first += count
    return found


def node_name(number: int) -> str:
    return f"gke-cluster-a3-mega-{number:05}"


def uid_of(*parts: str) -> str:
    return str(uuid.uuid5(_UUIDS, "/".join(parts)))


def stored(size: Size, now: float, *, snapshots: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yields the key in etcd and the value of each object.

    Args:
        size: How many there are.
        now: Seconds since the epoch; all objects are older.
        snapshots: Whether each node has a snapshot server, and all policies want snapshots.
    """
    made = _stamp(now - 600)  # after the old records, which are of pods that are gone
    for namespace in (*_training_namespaces(size), *(f"web-{number}" for number in range(_OTHER_NAMESPACES))):
        meta = {**_meta("namespace", "", namespace, made), "labels": {"kubernetes.io/metadata.name": namespace}}
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": meta, "status": {"phase": "Active"}}
        yield f"/registry/namespaces/{namespace}", _encoded(body)
    for namespace in _training_namespaces(size):
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": _meta("account", namespace, ACCOUNT, made),
        }
        yield f"/registry/serviceaccounts/{namespace}/{ACCOUNT}", _encoded(account)
        policy = _policy(namespace, made)
        if snapshots:
            policy["spec"]["checkpoint"]["memory"] = {"everySteps": 20}
        yield f"/registry/{names.GROUP}/checkpointpolicies/{namespace}/{POLICY}", _encoded(policy)
    of_node, of_server = _Template(node(made)), _Template(server_pod(made))
    for number in range(max(size.nodes, -(-size.pods // _PODS_A_NODE))):
        name = node_name(number)
        yield f"/registry/minions/{name}", of_node.filled(NAME=name, UID=uid_of("node", name))
        if snapshots:
            server = f"{SERVERS}-{number:05}"
            # The machine's own addresses: something answers there.
            at = {"NODE": name, "ADDRESS": f"127.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"}
            uid = uid_of("pod", "default", server)
            yield f"/registry/pods/default/{server}", of_server.filled(NAME=server, NAMESPACE="default", UID=uid, **at)
    pod, of_gang_job = (_Template(make(made)) for make in (training_pod, job))
    whole = {count: _Template(jobset(made, _jobs(count))) for count in {gang.count for gang in gangs(size)}}
    for gang in gangs(size):
        of_gang = {"NAMESPACE": gang.namespace, "GANG": gang.name, "GANGUID": gang.uid}
        place = f"{gang.namespace}/{gang.name}"
        yield f"/registry/jobset.x-k8s.io/jobsets/{place}", whole[gang.count].filled(**of_gang)
        for number in range(_jobs(gang.count)):
            name = gang.job_name(number)
            uid = uid_of("job", gang.namespace, name)
            text = of_gang_job.filled(NAME=name, UID=uid, JOBINDEX=str(number), **of_gang)
            yield f"/registry/jobs/{gang.namespace}/{name}", text
        for index in range(gang.count):
            name, job_name = gang.pod_name(index), gang.job_name(index // PODS_A_JOB)
            value = pod.filled(
                NAME=name,
                UID=gang.pod_uid(index),
                JOB=job_name,
                JOBUID=uid_of("job", gang.namespace, job_name),
                JOBINDEX=str(index // PODS_A_JOB),
                INDEX=str(index % PODS_A_JOB),
                NODE=gang.node(index),
                ADDRESS=f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}",
                **of_gang,
            )
            yield f"/registry/pods/{gang.namespace}/{name}", value
    yield from _unrelated(size, made)
    yield from _records(size, now)


def unrelated_pods(size: Size) -> list[tuple[str, str]]:
    """Namespaces and names of the pods that train nothing."""
    return [
        (f"web-{number % _OTHER_NAMESPACES}", f"front-{number:05}-6f9c8d7b5-q2w3e") for number in range(size.unrelated)
    ]


def _unrelated(size: Size, made: str) -> Iterator[tuple[str, bytes]]:
    pod = _Template(web_pod(made))
    for number, (namespace, name) in enumerate(unrelated_pods(size)):
        value = pod.filled(
            NAME=name,
            NAMESPACE=namespace,
            UID=uid_of("pod", namespace, name),
            NODE=node_name(number % size.nodes),
            ADDRESS=f"10.{64 + (number >> 16)}.{number >> 8 & 255}.{number & 255}",
        )
        yield f"/registry/pods/{namespace}/{name}", value


def _records(size: Size, now: float) -> Iterator[tuple[str, bytes]]:
    known = gangs(size)
    for number in range(size.records):
        gang, epoch = known[number % len(known)], number // len(known) + 1
        name = preemption_name(gang.name, gang.uid, epoch)
        body = _record(gang, name, epoch, now - 3_600.0 * (1 + size.records // len(known) - epoch) - 3_600)
        yield f"/registry/{names.GROUP}/preemptions/{gang.namespace}/{name}", _encoded(body)


def _jobs(pods: int) -> int:
    return -(-pods // PODS_A_JOB)


class _Template:
    """An object with ``@NAMES@`` in it, which are replaced in its JSON."""

    def __init__(self, body: Json) -> None:
        self._text = json.dumps(body, separators=(",", ":"))

    def filled(self, **values: str) -> bytes:
        text = self._text
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        return text.encode()


def _encoded(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _training_namespaces(size: Size) -> list[str]:
    return [f"team-{number}" for number in range(max(_NAMESPACES, size.jobsets // _JOBSETS_A_NAMESPACE))]


def _stamp(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)


def _meta(kind: str, namespace: str, name: str, made: str) -> Json:
    placed = {"namespace": namespace} if namespace else {}
    return {"name": name, **placed, "uid": uid_of(kind, namespace, name), "creationTimestamp": made, "generation": 1}


def _policy(namespace: str, made: str) -> Json:
    return {
        "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
        "kind": CheckpointPolicy.kind_name,
        "metadata": _meta("policy", namespace, POLICY, made),
        "spec": {"checkpoint": {"directory": "/checkpoints/{jobset}"}},
    }


def _record(gang: Gang, name: str, epoch: int, at: float) -> Json:
    """A preemption that ended with a checkpoint."""
    directory = {"checkpoint": {"directory": "/checkpoints/{jobset}"}}
    policy = CheckpointPolicy.of({**_policy(gang.namespace, _stamp(at)), "spec": directory})
    pods = [gang.pod_name(index) for index in range(min(_PODS_A_NODE, gang.count))]
    spec = PreemptionSpec(
        workload=WorkloadReference(name=gang.name, uid=gang.uid),
        epoch=epoch,
        restart_attempt=0,
        newest_pod_at=_time(at - 3_600),
        cause="SpotTermination",
        signal="taint cloud.google.com/impending-node-termination:NoSchedule",
        confidence=Confidence.SURE,
        cancelable=False,
        nodes=[gang.node(0)],
        pods=pods,
        observed_at=_time(at),
        deadline=_time(at + GRACE_S),
        mode=Mode.ENFORCE,
        policy=PolicyCopy(name=POLICY, spec=policy.spec.in_force),
    )
    lines = [f"{gang.job_name(0)}-[0-{min(gang.count, PODS_A_JOB) - 1}]"]
    told = Replica(
        name="gracepoint-operator-7d9f8c6b5-abcde",
        told=gang.count,
        acknowledged=gang.count,
        told_at=_time(at),
        acknowledged_at=_time(at + 1),
        told_pods=lines,
        acknowledged_pods=lines,
    )
    saved = ("noticeSent", "firstAck", "lastAck", "frozen", "agreed", "drained", "written", "durable", "committed")
    stages = (*saved, "exited", "podsBack", "restored", "training")
    status = PreemptionStatus(
        phase=Phase.COMMITTED,
        message="step 4000 is committed, 0 completed steps are lost",
        ordinal=4_001,
        step=4_000,
        bytes=10**12,
        processes=gang.count,
        choice="SaveNow",
        choice_reason="a save takes 21.4 s with its margin, and 60.0 s are left until the deadline",
        steps_lost=0,
        restored_step=4_000,
        seconds_to_spare=40.0,
        acknowledgements=Acknowledgements(expected=gang.count, received=gang.count),
        timings=[
            StageTime(
                stage=stage, seconds=number * 1.5, p50_seconds=number, max_seconds=number, time=_time(at + number)
            )
            for number, stage in enumerate(stages)
        ],
        conditions=[
            Condition(
                type="Ended",
                status=ConditionStatus.TRUE,
                reason="Committed",
                message="step 4000 is committed, 0 completed steps are lost",
                last_transition_time=_time(at + 30),
            )
        ],
        replicas=[told, told.model_copy(update={"name": "gracepoint-operator-7d9f8c6b5-fghij"})],
    )
    meta = _meta("preemption", gang.namespace, name, _stamp(at))
    labels = {names.LABEL_POLICY: POLICY, names.JOBSET_LABEL_NAME: gang.name, names.JOBSET_LABEL_UID: gang.uid}
    return {
        "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
        "kind": "Preemption",
        "metadata": {**meta, "labels": labels},
        "spec": spec.to_json(),
        "status": status.to_json(),
    }
