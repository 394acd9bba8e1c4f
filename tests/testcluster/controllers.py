"""Controllers of other projects that a test puts on a local cluster: the Kubeflow Trainer, Kueue.

Each is built from its Go module (``parts``), with the manifests of the same module. It runs on the control plane, so
that losing a node takes none away.

Processes: ``kubectl`` and ``go``, to their ends. Threads: none.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.testcluster import images, parts, pki
from tests.testcluster.addons import CONTROL_PLANE, CONTROL_PLANE_ROLE
from tests.testcluster.local import LocalCluster
from tests.testcluster.shell import run
from tests.testcluster.waiting import wait_for_rollout

_POD = "/spec/template/spec"


@dataclass(frozen=True)
class Controller:
    """A controller and its manifests.

    Attributes:
        part: Its part, which has one program.
        entrypoint: Where its manifests expect the program in the image.
        manifests: The folder of its module that has them.
        bases: The folders in it that are rendered.
        namespace: Where it runs.
        deployment: Name of its Deployment.
        service: Name of the Service of its webhooks.
        secret: Name of the Secret with the webhooks' certificate.
        places: Whether its manifests leave it to others to set the namespace.
    """

    part: str
    entrypoint: str
    manifests: str
    bases: Sequence[str]
    namespace: str
    deployment: str
    service: str
    secret: str
    places: bool = False

    @property
    def image(self) -> str:
        return f"testcluster.gracepoint.dev/{self.part}:{parts.part(self.part).version}"


TRAINER = Controller(
    part="trainer",
    entrypoint="/manager",
    manifests="manifests",
    bases=("base/crds", "base/manager", "base/rbac", "base/webhook"),
    namespace="kubeflow-system",
    deployment="kubeflow-trainer-controller-manager",
    service="kubeflow-trainer-controller-manager",
    secret="kubeflow-trainer-webhook-cert",
    places=True,
)
KUEUE = Controller(
    part="kueue",
    entrypoint="/manager",
    manifests="config",
    bases=("default",),
    namespace="kueue-system",
    deployment="kueue-controller-manager",
    service="kueue-webhook-service",
    secret="kueue-webhook-server-cert",
)


def install(cluster: LocalCluster, controller: Controller, *, timeout_s: float = 180) -> None:
    """Puts a controller on a cluster if it is not there, and waits until it serves.

    Raises:
        ClusterError: It is not built, or did not become ready.
    """
    where = f"--namespace={controller.namespace}"
    there = cluster.kubectl("get", f"deployment/{controller.deployment}", where, "--ignore-not-found").stdout
    if not there:  # Another time it would get another certificate than the one with which it runs.
        _apply(cluster, controller)
    wait_for_rollout(
        cluster, f"deployment/{controller.deployment}", namespace=controller.namespace, timeout_s=timeout_s
    )


def _apply(cluster: LocalCluster, controller: Controller) -> None:
    cluster.load([images.of_program(controller.image, controller.part, controller.entrypoint)], [CONTROL_PLANE])
    manifest = _render(controller, cluster.record.folder / "manifests" / controller.part)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=manifest, timeout_s=120)


def _render(controller: Controller, work: Path) -> str:
    """The controller's own manifests, with our image and a certificate."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(parts.manifests(controller.part, controller.manifests), work / "config")
    (work / "namespace.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": controller.namespace}})
    )
    (work / "certificate.json").write_text(json.dumps(_certificate(controller, work)))
    toleration = {"key": CONTROL_PLANE_ROLE, "operator": "Exists"}
    patches: list[Mapping[str, Any]] = [
        {"op": "add", "path": f"{_POD}/containers/0/image", "value": controller.image},
        {"op": "add", "path": f"{_POD}/containers/0/imagePullPolicy", "value": "IfNotPresent"},
        {
            "op": "add",
            "path": f"{_POD}/containers/0/resources",
            "value": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        },
        {"op": "add", "path": f"{_POD}/nodeSelector", "value": {"kubernetes.io/hostname": CONTROL_PLANE}},
        {"op": "add", "path": f"{_POD}/tolerations", "value": [toleration]},
    ]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **({"namespace": controller.namespace} if controller.places else {}),
        "resources": [f"config/{base}" for base in controller.bases],
        "patches": [
            {"target": {"kind": "Deployment", "name": controller.deployment}, "patch": json.dumps(patches)},
        ],
    }
    (work / "kustomization.yaml").write_text(json.dumps(kustomization, indent=2))
    rendered = run([parts.program("kubectl"), "kustomize", work]).stdout
    # The certificate comes last, over the empty Secret of some.
    return "\n---\n".join([(work / "namespace.json").read_text(), rendered, (work / "certificate.json").read_text()])


def _certificate(controller: Controller, folder: Path) -> dict[str, Any]:
    """What its certificate rotation would make. Given from the start, its pod need not wait for it."""
    authority = pki.authority(folder, f"{controller.part}-ca", [f"DNS:{controller.part}-ca"])
    host = f"{controller.service}.{controller.namespace}.svc"
    server = pki.issue(folder, authority, host, [f"DNS:{host}"])
    files = {
        "ca.crt": authority.certificate,
        "ca.key": authority.key,
        "tls.crt": server.certificate,
        "tls.key": server.key,
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": controller.secret, "namespace": controller.namespace},
        "data": {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()},
    }
