"""etcd and an API server alone, on ports of the loopback that the kernel chooses: no nodes, no controllers.

Pods, nodes and JobSets are objects there that a test writes itself. Needs the built parts, and no root.

Processes: the two, each in a process group of its own; they end with ``open_api_server``. Threads: none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.testcluster import parts, pki
from tests.testcluster.shell import log_tail, run, wait_until

_ADMIN = "admin"


@dataclasses.dataclass(frozen=True)
class ApiServer:
    """An API server that answers.

    Attributes:
        folder: Keys, credentials, etcd's data and the logs.
        kubeconfig: Of an administrator.
    """

    folder: Path
    kubeconfig: Path

    def kubectl(self, *args: str | Path, stdin: str | None = None, check: bool = True) -> str:
        """What kubectl prints."""
        argv = [parts.program("kubectl"), f"--kubeconfig={self.kubeconfig}", *args]
        return run(argv, stdin=stdin, timeout_s=30, check=check, env={"NO_PROXY": "*"}).stdout

    def apply(self, *manifests: Path) -> None:
        """Creates what stands in files or folders of manifests."""
        for manifest in manifests:
            self.kubectl("apply", "--server-side", "--filename", manifest)


def why_not() -> str:
    """Why there can be none on this machine; empty where there can."""
    missing = [part.name for part in parts.missing(("kubernetes", "etcd"))]
    return f"not built: {', '.join(missing)}; run: make parts" if missing else ""


@contextlib.contextmanager
def open_api_server(folder: Path) -> Iterator[ApiServer]:
    """Starts both; they are killed at the end.

    Args:
        folder: An empty folder for everything that they keep.

    Raises:
        ClusterError: The API server was not ready in time; with the ends of the logs.
    """
    client, peer, secure = _free_ports(3)
    authority = pki.authority(folder, "ca")
    pki.issue(folder, authority, "apiserver", ["IP:127.0.0.1", "DNS:localhost"])
    pki.signing_key(folder)
    token = pki.token()
    (folder / "tokens.csv").write_text(f"{token},{_ADMIN},{_ADMIN},system:masters\n")
    kubeconfig = _kubeconfig(folder, f"https://127.0.0.1:{secure}", token)
    server = ApiServer(folder, kubeconfig)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _running(
                folder,
                "etcd",
                f"--data-dir={folder}/etcd",
                "--unsafe-no-fsync",
                f"--listen-client-urls=http://127.0.0.1:{client}",
                f"--advertise-client-urls=http://127.0.0.1:{client}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
            )
        )
        stack.enter_context(
            _running(
                folder,
                "kube-apiserver",
                f"--etcd-servers=http://127.0.0.1:{client}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                "--endpoint-reconciler-type=none",
                f"--secure-port={secure}",
                f"--tls-cert-file={folder}/apiserver.crt",
                f"--tls-private-key-file={folder}/apiserver.key",
                f"--token-auth-file={folder}/tokens.csv",
                "--anonymous-auth=false",
                "--authorization-mode=RBAC",
                # Without controllers there are no default service accounts for pods.
                "--disable-admission-plugins=ServiceAccount",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                f"--service-account-key-file={folder}/service-accounts.pub",
                f"--service-account-signing-key-file={folder}/service-accounts.key",
            )
        )
        wait_until(
            "the API server",
            lambda: server.kubectl("get", "--raw=/readyz") == "ok",
            timeout_s=90,
            hint=lambda: log_tail(folder / "kube-apiserver.log") + log_tail(folder / "etcd.log", 5),
        )
        yield server


@contextlib.contextmanager
def _running(folder: Path, program: str, *args: str) -> Iterator[None]:
    with (folder / f"{program}.log").open("ab") as log:
        process = subprocess.Popen(
            [parts.program(program), *args],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _kubeconfig(folder: Path, server: str, token: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lone", "cluster": {"server": server, "certificate-authority": f"{folder}/ca.crt"}}],
        "users": [{"name": _ADMIN, "user": {"token": token}}],
        "contexts": [{"name": "lone", "context": {"cluster": "lone", "user": _ADMIN}}],
        "current-context": "lone",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path


def _free_ports(count: int) -> list[int]:
    """Ports that the kernel had free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
