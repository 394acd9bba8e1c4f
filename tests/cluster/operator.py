"""Starting, stopping and killing the installed operator, and speaking to it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator

from demo.install import OPERATOR_NAMESPACE, ROOT, wait_for_webhooks
from demo.snapshot import Json
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until
from tests.testcluster.waiting import wait_for_rollout

DEPLOYMENT = "deployment/gracepoint"
_SELECTOR = "app.kubernetes.io/name=gracepoint"
#: Of a pod that a kubelet has ended, the object may stay for long after its replica.
_RUNS = "--field-selector=status.phase=Running"


@contextlib.contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    """No replica runs inside of this."""
    _scale(cluster, 0)
    try:
        cluster.kubectl(
            *("wait", "pod", f"--selector={_SELECTOR}", _RUNS, f"--namespace={OPERATOR_NAMESPACE}"),
            *("--for=delete", "--timeout=60s"),
            timeout_s=70,
        )
        yield
    finally:
        _scale(cluster, 2)
        ready(cluster)


@contextlib.contextmanager
def outliving(cluster: Cluster) -> Iterator[None]:
    """Replicas may be ended inside of this, as with their node. All serve again after it."""
    try:
        yield
    finally:
        # The objects of pods that a kubelet has ended stay, also when their Deployment is scaled down.
        ended = "--field-selector=status.phase!=Running,status.phase!=Pending"
        cluster.kubectl("delete", "pod", f"--selector={_SELECTOR}", f"--namespace={OPERATOR_NAMESPACE}", ended)
        ready(cluster)


def restart_abruptly(cluster: Cluster) -> set[str]:
    """Kills all replicas at once, without a goodbye; the Deployment brings new ones. Returns the names of the dead."""
    query = ("get", "pod", f"--selector={_SELECTOR}", f"--namespace={OPERATOR_NAMESPACE}")
    names = cluster.kubectl(*query, "--output=jsonpath={.items[*].metadata.name}").stdout.split()
    cluster.kubectl(
        *("delete", "pod", f"--selector={_SELECTOR}", f"--namespace={OPERATOR_NAMESPACE}"),
        *("--force", "--grace-period=0", "--wait=false"),
    )
    return set(names)


def renew(cluster: Cluster) -> None:
    """Replaces every replica, one after another."""
    cluster.kubectl("rollout", "restart", DEPLOYMENT, f"--namespace={OPERATOR_NAMESPACE}")
    ready(cluster)


def ready(cluster: Cluster) -> None:
    """Waits until every replica serves."""
    wait_for_rollout(cluster, DEPLOYMENT, namespace=OPERATOR_NAMESPACE, timeout_s=90)
    wait_for_webhooks(cluster)


def spread(cluster: Cluster) -> None:
    """Moves a replica if all are on one node, as after another node was away."""
    pods = _running(cluster)
    if len({pod["spec"]["nodeName"] for pod in pods}) == 1:
        cluster.kubectl("delete", "pod", pods[0]["metadata"]["name"], f"--namespace={OPERATOR_NAMESPACE}")
        ready(cluster)


def let_delete_pods(cluster: Cluster) -> None:
    """Gives it the right to. It does so only for policies that say so."""
    cluster.helm(
        *("upgrade", "gracepoint", str(ROOT / "charts" / "gracepoint"), f"--namespace={OPERATOR_NAMESPACE}"),
        *("--reuse-values", "--set=podDeletion.enabled=true", "--wait", "--timeout=120s"),
        timeout_s=150,
    )
    wait_for_webhooks(cluster)


def _scale(cluster: Cluster, replicas: int) -> None:
    cluster.kubectl("scale", DEPLOYMENT, f"--namespace={OPERATOR_NAMESPACE}", f"--replicas={replicas}")


def refused(counts: dict[str, float]) -> float:
    """How many requests have been refused on the channel, for all reasons."""
    return sum(count for name, count in counts.items() if name.startswith("gracepoint_channel_requests_refused_total{"))


def wait_for_count(cluster: Cluster, what: str, shown: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Waits until the metrics show what has happened: each replica shows the same text for some seconds."""
    counts: dict[str, float] = {}

    def shows() -> bool:
        counts.clear()
        counts.update(counted(cluster))
        return shown(counts)

    wait_until(f"the metrics to show {what}", shows, timeout_s=60, every_s=1, hint=lambda: str(counts))
    return counts


def counted(cluster: Cluster) -> dict[str, float]:
    """The metrics of all replicas, summed, by name with labels. They may be some seconds old."""
    counts: dict[str, float] = {}
    for replica in by_replica(cluster):
        for name, count in replica.items():
            counts[name] = counts.get(name, 0) + count
    return counts


def by_replica(cluster: Cluster) -> list[dict[str, float]]:
    """The metrics of each replica, by name with labels. They may be some seconds old."""
    found = []
    for pod in _running(cluster):
        path = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{pod['metadata']['name']}:8080/proxy/metrics"
        text = cluster.kubectl("get", "--raw", path).stdout
        found.append({name: float(count) for name, count in re.findall(r"^(gracepoint_.+) (\S+)$", text, re.M)})
    return found


def _running(cluster: Cluster) -> list[Json]:
    """The pods of the replicas that run."""
    query = ("get", "pod", f"--selector={_SELECTOR}", _RUNS, f"--namespace={OPERATOR_NAMESPACE}", "--output=json")
    found: list[Json] = json.loads(cluster.kubectl(*query).stdout)["items"]
    return found
