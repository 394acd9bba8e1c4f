"""An API server of its own for a test: etcd and kube-apiserver, without nodes or controllers, on ports of loopback.

Processes: the two, which end with ``running``. Threads: none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.testcluster import pki
from tests.testcluster.parts import program
from tests.testcluster.shell import log_tail, run, wait_until

_START_S = 90
_STOP_S = 20


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Path]:
    """Runs an API server; gives the kubeconfig of an administrator.

    Raises:
        tests.testcluster.api.ClusterError: A program is not built, or the API server did not come up.
    """
    programs = {name: program(name) for name in ("etcd", "kube-apiserver", "kubectl")}
    token = pki.token()
    authority = pki.authority(folder, "ca")
    pki.issue(folder, authority, "apiserver", ["IP:127.0.0.1", "DNS:localhost"])
    pki.signing_key(folder)
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    store, peers, port = _free_ports(3)
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(_kubeconfig(port, folder / "ca.crt", token))
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            _process(
                folder,
                programs["etcd"],
                f"--data-dir={folder}/etcd",
                "--unsafe-no-fsync",
                f"--listen-client-urls=http://127.0.0.1:{store}",
                f"--advertise-client-urls=http://127.0.0.1:{store}",
                f"--listen-peer-urls=http://127.0.0.1:{peers}",
            )
        )
        stack.enter_context(
            _process(
                folder,
                programs["kube-apiserver"],
                f"--etcd-servers=http://127.0.0.1:{store}",
                "--bind-address=127.0.0.1",
                f"--secure-port={port}",
                "--advertise-address=127.0.0.1",
                f"--tls-cert-file={folder}/apiserver.crt",
                f"--tls-private-key-file={folder}/apiserver.key",
                f"--token-auth-file={folder}/tokens.csv",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={folder}/service-accounts.pub",
                f"--service-account-signing-key-file={folder}/service-accounts.key",
            )
        )
        ready: list[str | Path] = [programs["kubectl"], f"--kubeconfig={kubeconfig}", "get", "--raw=/readyz"]
        wait_until(
            "the API server",
            lambda: run(ready, timeout_s=10, check=False, env={"NO_PROXY": "*"}).returncode == 0,
            timeout_s=_START_S,
            hint=lambda: log_tail(folder / "kube-apiserver.log") + log_tail(folder / "etcd.log", 5),
        )
        yield kubeconfig


@contextlib.contextmanager
def _process(folder: Path, executable: Path, *args: str) -> Iterator[None]:
    with (folder / f"{executable.name}.log").open("wb") as log:
        process = subprocess.Popen([executable, *args], stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_STOP_S)


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]


def _kubeconfig(port: int, ca: Path, token: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "test", "cluster": {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(ca)}}
            ],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
    )
