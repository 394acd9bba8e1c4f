"""etcd, the API server, the controllers and the scheduler, and the identities of all who talk to the API
server.

Processes: the four of them, in the control plane's machine, with which they end. Threads: none.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster import features, parts, pki
from tests.testcluster.network import KUBERNETES_IP, SERVICE_CIDR
from tests.testcluster.sandbox import Sandbox, continue_process, stop_process, with_argument
from tests.testcluster.shell import log_tail, run, wait_until

ADMIN = "admin"
CONTROLLERS = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
PROXY = "system:kube-proxy"
_GROUPS = {ADMIN: "system:masters"}
_API_PORT = 6443

#: How long a killed process may take.
_STOPPED_S = 20.0


def node_user(name: str) -> str:
    """The user that a node's kubelet is."""
    return f"system:node:{name}"


@dataclass(frozen=True)
class ControlPlane:
    """The control plane.

    Attributes:
        sandbox: The machine that it runs in.
        folder: Keys, credentials and etcd's data.
        logs: The folder of its components' logs.
        address: Where the API server listens.
    """

    sandbox: Sandbox
    folder: Path
    logs: Path
    address: str

    def make_credentials(self, nodes: Sequence[str]) -> None:
        """Make keys and certificates, and a token for everyone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        authority = pki.authority(self.folder, "ca")
        names = [f"IP:{address}" for address in (self.address, KUBERNETES_IP, "127.0.0.1")]
        names += [f"DNS:kubernetes{suffix}" for suffix in ("", ".default", ".default.svc")]
        names += ["DNS:kubernetes.default.svc.cluster.local", "DNS:localhost"]
        pki.issue(self.folder, authority, "apiserver", names)
        pki.issue(self.folder, authority, "kubelet-client", group="system:masters", usage="clientAuth")
        pki.signing_key(self.folder)
        rows = []
        for user in (ADMIN, CONTROLLERS, SCHEDULER, PROXY, *map(node_user, nodes)):
            token = pki.token()
            group = "system:nodes" if user.startswith("system:node:") else _GROUPS.get(user, "")
            rows.append(f"{token},{user},{user},{group}".rstrip(",") + "\n")
            self._write_kubeconfig(user, token)
        (self.folder / "tokens.csv").write_text("".join(rows))
        (self.folder / "tokens.csv").chmod(0o600)

    @property
    def ca(self) -> Path:
        """Certificate of the cluster's authority."""
        return self.folder / "ca.crt"

    def kubeconfig(self, user: str) -> Path:
        """The credentials of a user."""
        return self.folder / f"{user.replace(':', '-')}.kubeconfig"

    def start(self) -> None:
        """Start everything and wait until the API server is ready."""
        self._start_etcd()
        self._start_api_server()
        self._start_controllers()

    def _start_controllers(self) -> None:
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig(CONTROLLERS)}",
            f"--root-ca-file={self.ca}",
            f"--service-account-private-key-file={self.folder}/service-accounts.key",
            "--use-service-account-credentials",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            # a node that went away is NotReady after 20 s rather than 50; its kubelet reports every 4 s
            "--node-monitor-period=2s",
            "--node-monitor-grace-period=20s",
        )
        self._spawn(
            "kube-scheduler",
            f"--kubeconfig={self.kubeconfig(SCHEDULER)}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        )

    def restart_api_server(self, *, down_s: float) -> None:
        """Kill the API server, and start it again after so many seconds; returns when it is ready."""
        self._kill(self._api_server_flag)
        time.sleep(down_s)
        self._start_api_server()

    def api_server_pid(self) -> int:
        """Return the id of the API server's process, as this host sees it."""
        (pid,) = with_argument(self._api_server_flag, waiting=False)
        return pid

    def save_etcd(self) -> Path:
        """Keep a copy of etcd's data as they are now, as if etcd were killed; it does nothing meanwhile."""
        copy = self.folder / "etcd-copy"
        shutil.rmtree(copy, ignore_errors=True)
        try:
            stop_process(self._etcd_flag)
            shutil.copytree(self.folder / "etcd", copy)
        finally:
            continue_process(self._etcd_flag)
        return copy

    def restore_etcd(self, copy: Path) -> None:
        """Go back to a copy of etcd's data: all of the control plane is killed, and started again.

        The API server's versions are lower then than those that its clients know.
        """
        for flag in (*self._controller_flags, self._api_server_flag, self._etcd_flag):
            self._kill(flag)
        shutil.rmtree(self.folder / "etcd")
        shutil.copytree(copy, self.folder / "etcd")
        self.start()

    @property
    def _etcd_flag(self) -> str:
        return f"--data-dir={self.folder}/etcd"

    @property
    def _api_server_flag(self) -> str:
        return f"--token-auth-file={self.folder}/tokens.csv"

    @property
    def _controller_flags(self) -> tuple[str, ...]:
        return tuple(f"--kubeconfig={self.kubeconfig(user)}" for user in (CONTROLLERS, SCHEDULER))

    def _kill(self, flag: str) -> None:
        for pid in with_argument(flag, waiting=False):
            os.kill(pid, signal.SIGKILL)
        wait_until(
            f"the process with {flag} to end",
            lambda: not with_argument(flag, waiting=False),
            timeout_s=_STOPPED_S,
            every_s=0.02,
        )

    def _start_etcd(self) -> None:
        self._spawn(
            "etcd",
            self._etcd_flag,
            "--unsafe-no-fsync",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
        )

    def _start_api_server(self) -> None:
        self._spawn(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--secure-port={_API_PORT}",
            f"--advertise-address={self.address}",
            f"--tls-cert-file={self.folder}/apiserver.crt",
            f"--tls-private-key-file={self.folder}/apiserver.key",
            self._api_server_flag,
            "--anonymous-auth=false",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self.folder}/service-accounts.pub",
            f"--service-account-signing-key-file={self.folder}/service-accounts.key",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={self.folder}/kubelet-client.crt",
            f"--kubelet-client-key={self.folder}/kubelet-client.key",
            # pods of a node that went away are replaced after 30 s rather than 300
            "--default-not-ready-toleration-seconds=30",
            "--default-unreachable-toleration-seconds=30",
            *(f"--feature-gates={name}=true" for name in features.of_kubernetes()),
        )
        kubectl: list[str | Path] = [
            parts.program("kubectl"),
            f"--kubeconfig={self.kubeconfig(ADMIN)}",
            "get",
            "--raw=/readyz",
        ]
        wait_until(
            "the API server",
            lambda: run(kubectl, timeout_s=10, env={"NO_PROXY": "*"}).returncode == 0,
            timeout_s=90,
            hint=lambda: log_tail(self._log("kube-apiserver")) + log_tail(self._log("etcd"), 5),
        )

    def _spawn(self, program: str, *args: str) -> None:
        self.sandbox.spawn([parts.program(program), *args], self._log(program))

    def _log(self, component: str) -> Path:
        return self.logs / f"control-plane-{component}.log"

    def _write_kubeconfig(self, user: str, token: str) -> None:
        cluster = {"server": f"https://{self.address}:{_API_PORT}", "certificate-authority": str(self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "testcluster", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "testcluster", "context": {"cluster": "testcluster", "user": user}}],
            "current-context": "testcluster",
        }
        path = self.kubeconfig(user)
        path.write_text(json.dumps(config, indent=2))
        path.chmod(0o600)
