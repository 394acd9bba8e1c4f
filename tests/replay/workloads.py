"""What trains in a replay: in what each workload differs from the example's JobSet, and what is around its jobs.

Processes: versitygw, as long as a job has its checkpoints there. Threads: those of the proxy in front of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from demo.forms import JOB, JOBSET, Form
from demo.snapshot import Json
from demo.training import apply_policy
from gracepoint.wire.names import GROUP
from tests.cluster import queues
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.servers import REGION, Server, open_s3
from tests.replay import trace
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.local import LocalCluster

#: Steps between two periodic saves. What nobody announces loses these at most, and those of a save that was under way.
EVERY_STEPS = 30
SNAPSHOT_STEPS = 10
KEEP_LAST = 2
#: The proxy in front of the store of a job's checkpoints. None: they are in a directory.
Store = FaultProxy | None


def _on_storage(spec: Json) -> None:
    spec["checkpoint"].update(everySteps=EVERY_STEPS, keepLast=KEEP_LAST)
    # A replay disturbs far more often than any cluster does.
    spec["exitBreaker"] = {"savedExits": 0}
    spec["cloudMetadata"] = ["GCE"]


def _in_memory(spec: Json) -> None:
    _on_storage(spec)
    spec["checkpoint"].update(writer="Worker", memory={"everySteps": SNAPSHOT_STEPS, "copies": 2})


def _in_a_keeper(spec: Json) -> None:
    _on_storage(spec)
    spec["checkpoint"]["writer"] = "Keeper"


def _without_saves(spec: Json) -> None:
    spec["checkpoint"].update(everySteps=0, everySeconds=0)


#: With snapshots in memory and a worker for saves, with storage alone, and with a keeper for saves; of runs that nobody
#: disturbs.
_MEMORY, _STORAGE, _KEEPER, _UNDISTURBED = "memory", "storage", "keeper", "undisturbed"
#: What changes the example's, by name. That of jobs with a bucket is made for each of them.
POLICIES: dict[str, Callable[[Json], None]] = {
    _STORAGE: _on_storage,
    _MEMORY: _in_memory,
    _KEEPER: _in_a_keeper,
    _UNDISTURBED: _without_saves,
}
#: Policy of jobs with a bucket, and the Secret with its keys.
_BUCKET = STORE_SECRET = "bucket"
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@contextlib.contextmanager
def _nothing(cluster: Cluster, namespace: str) -> Iterator[Store]:
    yield None


@contextlib.contextmanager
def _bucket(cluster: Cluster, namespace: str) -> Iterator[Store]:
    """A store on this machine, whose bucket is the folder of all checkpoints, and the policy that sends them there.

    So the objects of a job are the files of its folder, ``TrainingRun.checkpoints``, which pods do not use.
    """
    address = _local(cluster).record.network.host_ip
    with opened(cluster.shared_dir / "checkpoints", address) as (server, store):

        def to_bucket(spec: Json) -> None:
            _on_storage(spec)
            spec["checkpoint"]["directory"] = f"s3://{namespace}/{{jobset}}"
            spec["checkpoint"]["objectStore"] = {"endpoint": store.url, "region": REGION}

        keys = {name: server.environment()[name] for name in _KEYS}
        metadata = {"name": STORE_SECRET, "namespace": namespace}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": keys}
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(secret))
        # That of a store before this one is Ready already, also while the operator does not know the new address.
        old = f"checkpointpolicies.{GROUP}/{_BUCKET}"
        cluster.kubectl("delete", old, f"--namespace={namespace}", "--ignore-not-found")
        apply_policy(cluster, _BUCKET, namespace=namespace, change=to_bucket)
        yield store


@contextlib.contextmanager
def opened(buckets: Path, address: str) -> Iterator[tuple[Server, FaultProxy]]:
    """Starts a store of ``s3://`` whose buckets are the folders in ``buckets``, and a proxy in front of it.

    Args:
        buckets: Of the buckets, which are there.
        address: Where the proxy listens.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gracepoint-replay-") as folder,
        open_s3(Path(folder), buckets) as server,
        FaultProxy(server.url, address=address) as store,
    ):
        yield server, store


@contextlib.contextmanager
def _queue(cluster: Cluster, namespace: str) -> Iterator[Store]:
    """Kueue and its queue, which stay on the cluster."""
    queues.install(_local(cluster), namespace)
    yield None


def _local(cluster: Cluster) -> LocalCluster:
    if not isinstance(cluster, LocalCluster):
        raise ClusterError(
            "a store on this machine, or Kueue: expected a cluster that is made from sources, found another one"
        )
    return cluster


def _unchanged(body: Json) -> None:
    pass


def _with_credentials(template: Json) -> None:
    (container,) = template["spec"]["containers"]
    container["envFrom"] = [{"secretRef": {"name": STORE_SECRET}}]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What trains.

    Attributes:
        name: In traces and results.
        form: The kind of object.
        policy: Name of its policy.
        interval_steps: From one save to the next, or from one snapshot in memory to the next.
        change: Changes the object before it is created.
        change_pods: The same for the template of its pods.
        around: What is there while a job of it runs, on a cluster and in a namespace. What is in it for good stays.
        parts: What is built for it beside what every cluster is made of.
        own_cluster: Whether it needs a cluster of its own.
    """

    name: str
    form: Form = JOBSET
    policy: str
    interval_steps: int
    change: Callable[[Json], None] = _unchanged
    change_pods: Callable[[Json], None] = _unchanged
    around: Callable[[Cluster, str], AbstractContextManager[Store]] = _nothing
    parts: tuple[str, ...] = ()
    own_cluster: bool = False


WORKLOADS = {
    each.name: each
    for each in (
        Workload(name=trace.JOBSET, policy=_MEMORY, interval_steps=SNAPSHOT_STEPS),
        Workload(name=trace.JOB, form=JOB, policy=_STORAGE, interval_steps=EVERY_STEPS),
        # Without snapshots in memory, so that each start restores from the bucket.
        Workload(
            name=trace.BUCKET,
            policy=_BUCKET,
            interval_steps=EVERY_STEPS,
            change_pods=_with_credentials,
            around=_bucket,
            parts=("versitygw",),
            own_cluster=True,
        ),
        Workload(name=trace.KEPT, policy=_KEEPER, interval_steps=EVERY_STEPS),
        Workload(
            name=trace.QUEUED,
            policy=_MEMORY,
            interval_steps=SNAPSHOT_STEPS,
            change=queues.in_queue(),
            around=_queue,
            parts=("kueue",),
            own_cluster=True,
        ),
    )
}
#: What the others are held against in the end.
UNDISTURBED = Workload(name="undisturbed", policy=_UNDISTURBED, interval_steps=0)
