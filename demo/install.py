"""Puts Gracepoint on a cluster the way a user does: images from the Dockerfiles, the operator by Helm."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from demo.logs import PodLogs
from gracepoint.wire.names import LABEL_POLICY
from tests.testcluster.api import Cluster, NotSupported
from tests.testcluster.shell import wait_until
from tests.testcluster.wheelhouse import pinned

ROOT = Path(__file__).parents[1]
OPERATOR_NAMESPACE = "gracepoint-system"
REGISTRY = "gracepoint.test"


@dataclasses.dataclass(frozen=True)
class Images:
    """Names that pods use for the two images."""

    operator: str
    trainer: str


def build_images(cluster: Cluster, say: Callable[[str], None], *, registry: str = REGISTRY) -> Images:
    """Builds both images and puts them on every node; what is there already is not built again.

    Args:
        cluster: Whose nodes get them.
        say: Where news go.
        registry: First part of their names; for a cluster that pulls its images it is where they were pushed.
    """
    trainer = "examples/transformer/Dockerfile"
    pins = pinned(ROOT / "operator/requirements.txt")
    return Images(
        operator=_image(cluster, f"{registry}/operator:demo", "operator/Dockerfile", say, requirements=pins),
        trainer=_image(cluster, f"{registry}/transformer:demo", trainer, say, extras=("jax", "gcs", "s3")),
    )


def _image(
    cluster: Cluster,
    tag: str,
    dockerfile: str,
    say: Callable[[str], None],
    *,
    extras: Sequence[str] = (),
    requirements: Sequence[str] = (),
) -> str:
    say(f"image {tag} from {dockerfile}")
    try:
        return cluster.build_image(tag, ROOT / dockerfile, ROOT, extras=extras, requirements=requirements)
    except NotSupported as reason:  # a cluster that exists: its nodes must have the image, or be able to pull it
        say(f"not built here ({reason}); the cluster must have it")
        return tag


def install_operator(cluster: Cluster, image: str, settings: Sequence[str] = ()) -> None:
    """Installs or upgrades the operator from the project's chart and waits until it serves.

    Args:
        cluster: Where.
        image: Its image.
        settings: Values of the chart, ``name=value``. All others have their defaults.
    """
    repository, _, tag = image.rpartition(":")
    cluster.helm(
        *("upgrade", "--install", "gracepoint", str(ROOT / "charts" / "gracepoint")),
        *(f"--namespace={OPERATOR_NAMESPACE}", "--create-namespace"),
        *(f"--set=image.repository={repository}", f"--set=image.tag={tag}"),
        *(f"--set={setting}" for setting in settings),
        *("--wait", "--timeout=120s"),
        timeout_s=150,
    )
    wait_for_webhooks(cluster)


def wait_for_webhooks(cluster: Cluster, *, within_s: float = 60.0) -> None:
    """Waits until the API server reaches the operator's webhooks: a moment after its replicas are ready, as every
    node has to learn first where they are."""
    trial = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "trial", "namespace": "default", "labels": {LABEL_POLICY: "none"}},
        "spec": {"replicatedJobs": []},
    }
    said = ""

    def answered() -> bool:
        nonlocal said
        said = cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(trial), check=False).stderr
        return "expected the name of a CheckpointPolicy" in said

    wait_until(
        "the API server to reach the operator's webhooks",
        answered,
        timeout_s=within_s,
        hint=lambda: f"\n{said}",
    )


def make_namespace(cluster: Cluster, name: str) -> None:
    """Makes a namespace unless it is there."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))


def save_logs(cluster: Cluster, logs: PodLogs, namespace: str) -> None:
    """Keeps all that helps to find out what went wrong: the operator's logs, objects, events."""
    logs.finish(timeout_s=2)
    kinds = "jobsets.jobset.x-k8s.io,jobs,pods,preemptions,checkpointpolicies"
    logs.save("objects.yaml", "get", kinds, "--output=yaml", f"--namespace={namespace}")
    logs.save("events.txt", "get", "events", "--all-namespaces", "--sort-by=.lastTimestamp")
    logs.save("pods.txt", "get", "pods", "--all-namespaces", "--output=wide")
    operator = (f"--namespace={OPERATOR_NAMESPACE}", "--selector=app.kubernetes.io/name=gracepoint")
    # A replica whose node is off says nothing, and keeps the others waiting.
    patience = ("--ignore-errors", "--request-timeout=10s")
    logs.save("operator.log", "logs", *operator, "--prefix", "--timestamps", "--tail=-1", *patience)
