"""An API server without a cluster: a real kube-apiserver over a real etcd, as two processes of this machine.

No controller, scheduler or kubelet: objects are what their maker wrote. Processes: the two, which end with the
``with`` block. Threads: none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.resources.crds import definitions
from tests.testcluster import addons, parts, pki
from tests.testcluster.shell import log_tail, run, wait_until

DEFINITIONS = Kind("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions")
_READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def process(argv: list[str | Path], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is stopped in the end, killed if it takes too long."""
    with log.open("ab") as sink:
        child = subprocess.Popen(argv, stdout=sink, stderr=sink, env={**os.environ, **environment})
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[Path]:
    """Runs both with JobSet's and our definitions in it; gives the kubeconfig of an administrator.

    Args:
        folder: For keys, data and logs.

    Raises:
        ClusterError: It did not come up; says what its logs say.
    """
    authority = pki.authority(folder, "ca")
    names = ["IP:127.0.0.1", "DNS:localhost", "DNS:kubernetes.default.svc"]
    pki.issue(folder, authority, "apiserver", names)
    pki.signing_key(folder)
    token = pki.token()
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    port, client, peer = free_port(), free_port(), free_port()
    kubeconfig = _kubeconfig(folder, port, token)
    store = f"http://127.0.0.1:{client}"
    etcd: list[str | Path] = [
        parts.program("etcd"),
        f"--data-dir={folder}/etcd",
        "--unsafe-no-fsync",
        f"--listen-client-urls={store}",
        f"--advertise-client-urls={store}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
    ]
    server: list[str | Path] = [
        parts.program("kube-apiserver"),
        f"--etcd-servers={store}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        "--advertise-address=127.0.0.1",
        "--endpoint-reconciler-type=none",
        f"--tls-cert-file={folder}/apiserver.crt",
        f"--tls-private-key-file={folder}/apiserver.key",
        f"--token-auth-file={folder}/tokens.csv",
        "--anonymous-auth=false",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={folder}/service-accounts.pub",
        f"--service-account-signing-key-file={folder}/service-accounts.key",
    ]
    log = folder / "kube-apiserver.log"
    with process(etcd, folder / "etcd.log"), process(server, log) as running:
        ready: list[str | Path] = [parts.program("kubectl"), f"--kubeconfig={kubeconfig}", "get", "--raw=/readyz"]
        wait_until(
            "the API server",
            lambda: running.poll() is not None or run(ready, check=False, env={"NO_PROXY": "*"}).returncode == 0,
            timeout_s=_READY_TIMEOUT_S,
            hint=lambda: log_tail(log),
        )
        _define(folder, kubeconfig)
        yield kubeconfig


def _define(folder: Path, kubeconfig: Path) -> None:
    """JobSet's definition, from its own manifests, and ours."""
    (_, jobset) = addons.render(folder / "manifests")
    found = [item for item in yaml.safe_load_all(jobset.read_text()) if item["kind"] == "CustomResourceDefinition"]
    wanted = [*found, *definitions().values()]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": wanted})
    kubectl: list[str | Path] = [parts.program("kubectl"), f"--kubeconfig={kubeconfig}"]
    quiet = {"NO_PROXY": "*"}
    run([*kubectl, "apply", "--server-side", "-f", "-"], stdin=text, env=quiet)
    names = [f"crd/{item['metadata']['name']}" for item in wanted]
    established: list[str | Path] = [*kubectl, "wait", "--for=condition=Established", "--timeout=5s", *names]
    wait_until(
        "the definitions to be established",  # kubectl fails on one that has no conditions yet
        lambda: run(established, check=False, env=quiet).returncode == 0,
        timeout_s=_READY_TIMEOUT_S,
    )


def _kubeconfig(folder: Path, port: int, token: str) -> Path:
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(folder / "ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "benchmark", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "benchmark", "context": {"cluster": "benchmark", "user": "admin"}}],
        "current-context": "benchmark",
    }
    path = folder / "admin.kubeconfig"
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path
