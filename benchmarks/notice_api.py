"""An API server without a cluster: a real kube-apiserver over a real etcd, as two processes of this machine.

No controller, scheduler or kubelet: objects are what their maker wrote. Processes: the two, which end with the
``with`` block. Threads: none.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from gracepoint_operator.resources.crds import definitions
from tests.testcluster import addons
from tests.testcluster.api_server import open_api_server

_STOP_TIMEOUT_S = 10.0


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
    (_, jobset) = addons.render(folder / "manifests")
    found = [item for item in yaml.safe_load_all(jobset.read_text()) if item["kind"] == "CustomResourceDefinition"]
    with open_api_server(folder, service_accounts=True) as server:
        server.define(bodies=(*found, *definitions().values()))
        yield server.kubeconfig
