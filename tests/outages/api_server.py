"""An etcd and a kube-apiserver of a test's own, without nodes: what an operator watches, and nothing that acts on it.

Processes: the two, children of this one, killed by ``close``. Threads: none. Ports are chosen by the kernel.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config

from tests.testcluster import parts, pki
from tests.testcluster.shell import log_tail, run, wait_until

_CRDS = Path(__file__).parents[2] / "crds"
_OTHERS = (
    ("jobset.x-k8s.io", "v1alpha2", "JobSet", "Namespaced"),
    ("karpenter.sh", "v1", "NodeClaim", "Cluster"),
    ("kueue.x-k8s.io", "v1beta2", "Workload", "Namespaced"),
)


class ApiServer:
    """See the module.

    Args:
        folder: Keys, data and logs.

    Attributes:
        url: Where it listens.
        token: An administrator's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        etcd, peers, api = free_ports(3)
        self._etcd_url, self._peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}"
        self._port = api
        self.url = f"https://127.0.0.1:{api}"
        authority = pki.authority(folder, "ca")
        pki.issue(folder, authority, "apiserver", ["IP:127.0.0.1", "DNS:localhost"])
        pki.signing_key(folder)
        self.token = pki.token()
        (folder / "tokens.csv").write_text(f"{self.token},admin,admin,system:masters\n")

    @property
    def ca(self) -> Path:
        return self._folder / "ca.crt"

    def start(self) -> None:
        """Starts both, and waits until the API server is ready."""
        self._spawn(
            "etcd",
            f"--data-dir={self._folder}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={self._peer_url}",
            f"--initial-advertise-peer-urls={self._peer_url}",
            f"--initial-cluster=default={self._peer_url}",
        )
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--tls-cert-file={self._folder}/apiserver.crt",
            f"--tls-private-key-file={self._folder}/apiserver.key",
            f"--token-auth-file={self._folder}/tokens.csv",
            "--anonymous-auth=false",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self._folder}/service-accounts.pub",
            f"--service-account-signing-key-file={self._folder}/service-accounts.key",
        )
        config = self.kubeconfig(self.url)
        wait_until(
            "the API server",
            lambda: self.kubectl("get", "--raw=/readyz", config=config, check=False).returncode == 0,
            timeout_s=120,
            hint=lambda: log_tail(self._folder / "kube-apiserver.log"),
        )

    def stop(self) -> None:
        """Kills both; their data stay."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(timeout=10)
        self._processes.clear()

    def save(self, name: str) -> None:
        """Keeps a copy of etcd's data as they are now. Call it while stopped."""
        shutil.copytree(self._folder / "etcd", self._folder / name)

    def restore(self, name: str) -> None:
        """Goes back to that copy. Call it while stopped."""
        shutil.rmtree(self._folder / "etcd")
        shutil.copytree(self._folder / name, self._folder / "etcd")

    def install_kinds(self) -> None:
        """Every kind that the operator watches."""
        items = [_definition(*other) for other in _OTHERS]
        self.kubectl("create", f"--filename={_CRDS}")
        self.create(*items)
        self.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s", timeout_s=40)

    def create(self, *bodies: Mapping[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(bodies)}
        self.kubectl("create", "-f", "-", stdin=json.dumps(listed))

    def kubectl(
        self,
        *args: str,
        stdin: str | None = None,
        check: bool = True,
        timeout_s: float = 30,
        config: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        path = config or self.kubeconfig(self.url)
        argv: Sequence[str | Path] = [parts.program("kubectl"), f"--kubeconfig={path}", *args]
        return run(argv, stdin=stdin, timeout_s=timeout_s, check=check, env={"NO_PROXY": "*"})

    def kubeconfig(self, url: str) -> Path:
        """An administrator's credentials, for the API server behind ``url``."""
        trust = {"certificate-authority": str(self.ca)} if url.startswith("https:") else {}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "lone", "cluster": {"server": url, **trust}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "lone", "context": {"cluster": "lone", "user": "admin"}}],
            "current-context": "lone",
        }
        path = self._folder / f"{url.rpartition(':')[2]}.kubeconfig"
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def client(self) -> kubernetes.client.ApiClient:
        return kubernetes.config.new_client_from_config(str(self.kubeconfig(self.url)))

    def _spawn(self, program: str, *args: str) -> None:
        with (self._folder / f"{program}.log").open("ab") as out:
            argv = [str(parts.program(program)), *args]
            self._processes[program] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def node(name: str, *taints: Mapping[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": list(taints)}}


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listening.getsockname()[1]) for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def _definition(group: str, version: str, kind: str, scope: str) -> dict[str, Any]:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Groups of the Kubernetes project are protected by this.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}},
            ],
        },
    }
