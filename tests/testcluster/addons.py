"""What runs in the cluster from the beginning: CoreDNS and JobSet with its webhooks.

Both tolerate the control plane's taint and stay there, so that losing a node takes neither away.

Processes: ``kubectl`` and ``go``, to their ends. Threads: none.
"""

from __future__ import annotations

import base64
import json
import shutil
import string
from pathlib import Path

from tests.testcluster import features, parts, pki
from tests.testcluster.api import Cluster
from tests.testcluster.images import COREDNS, JOBSET
from tests.testcluster.network import DNS_IP
from tests.testcluster.shell import run, wait_until

CONTROL_PLANE = "control-plane"
"""Name of the node that these pods run on."""
CONTROL_PLANE_ROLE = "node-role.kubernetes.io/control-plane"
"""Key of its taint and its label."""
_MANIFESTS = Path(__file__).parent / "manifests"
_JOBSET_NAMESPACE = "jobset-system"
_TRIAL_JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "trial", "namespace": "default"},
    "spec": {
        "replicatedJobs": [
            {
                "name": "trial",
                "template": {
                    "spec": {
                        "template": {
                            "spec": {
                                "restartPolicy": "Never",
                                "containers": [{"name": "trial", "image": "trial"}],
                            }
                        }
                    }
                },
            }
        ]
    },
}


def render(folder: Path) -> list[Path]:
    """Write the manifests of this cluster; needs no cluster.

    Returns:
        The files to apply.
    """
    folder.mkdir(parents=True, exist_ok=True)
    coredns = folder / "coredns.yaml"
    template = string.Template((_MANIFESTS / "coredns.yaml").read_text())
    coredns.write_text(template.substitute(image=COREDNS, dns_ip=DNS_IP, node=CONTROL_PLANE, taint=CONTROL_PLANE_ROLE))
    jobset = folder / "jobset.yaml"
    jobset.write_text(_render_jobset(folder / "jobset"))
    return [coredns, jobset]


def apply(cluster: Cluster, manifests: list[Path]) -> None:
    """Create everything; its pods start when nodes are there."""
    for manifest in manifests:
        cluster.kubectl("apply", "--server-side", "--filename", str(manifest))


def wait(cluster: Cluster, *, timeout_s: float = 120) -> None:
    """Wait until DNS answers and JobSet's webhooks admit a JobSet."""
    for namespace, name in (("kube-system", "coredns"), (_JOBSET_NAMESPACE, "jobset-controller-manager")):
        limit = f"--timeout={timeout_s:g}s"
        cluster.kubectl(
            "--namespace",
            namespace,
            "rollout",
            "status",
            f"deployment/{name}",
            limit,
            timeout_s=timeout_s + 5,
        )
    wait_until(
        "JobSet's webhooks",
        lambda: (
            cluster.kubectl("create", "--dry-run=server", "--filename=-", stdin=json.dumps(_TRIAL_JOBSET)) is not None
        ),
        timeout_s=timeout_s,
    )


def _render_jobset(work: Path) -> str:
    """JobSet's own config/default, with our image, a certificate and features on."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(parts.manifests("jobset", "config"), work / "config")
    if on := features.of_jobset():
        with (work / "config/components/manager/controller_manager_config.yaml").open("a") as config:
            config.write("\n".join(["featureGates:", *(f"  {name}: true" for name in on), ""]))
    deployment = {"kind": "Deployment", "name": "jobset-controller-manager"}
    container = "/spec/template/spec/containers/0"
    toleration = {"key": CONTROL_PLANE_ROLE, "operator": "Exists"}
    control_plane = [
        {"op": "add", "path": f"{container}/image", "value": JOBSET},
        {"op": "add", "path": f"{container}/imagePullPolicy", "value": "IfNotPresent"},
        # it asks for half a processor and waits for webhooks' load that never comes here
        {
            "op": "add",
            "path": f"{container}/resources",
            "value": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        },
        {
            "op": "add",
            "path": "/spec/template/spec/nodeSelector",
            "value": {"kubernetes.io/hostname": CONTROL_PLANE},
        },
        {"op": "add", "path": "/spec/template/spec/tolerations", "value": [toleration]},
    ]
    secret = {"kind": "Secret", "name": "jobset-webhook-server-cert"}
    certificate = [{"op": "add", "path": "/data", "value": _jobset_certificate(work)}]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["config/default"],
        "patches": [
            {"target": deployment, "patch": json.dumps(control_plane)},
            {"target": secret, "patch": json.dumps(certificate)},
        ],
    }
    (work / "kustomization.yaml").write_text(json.dumps(kustomization, indent=2))
    return run([parts.program("kubectl"), "kustomize", work]).stdout


def _jobset_certificate(folder: Path) -> dict[str, str]:
    """What JobSet's certificate rotation would make; given from the start, its pod need not wait for it."""
    authority = pki.authority(folder, "jobset-ca", ["DNS:jobset-ca"])
    service = f"jobset-webhook-service.{_JOBSET_NAMESPACE}.svc"
    server = pki.issue(folder, authority, service, [f"DNS:{service}"])
    files = {
        "ca.crt": authority.certificate,
        "ca.key": authority.key,
        "tls.crt": server.certificate,
        "tls.key": server.key,
    }
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}
