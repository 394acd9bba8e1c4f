"""Components of the newest Kubernetes beside its API server: the scheduler, and controllers of the controller manager.

They work with Node objects and with pods that no kubelet runs.

Processes: each component in a process group of its own, until ``component`` ends. Threads: none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.api_server.programs import running
from tests.ports import held_ports
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer

GATES = "--feature-gates=GenericWorkload=true"


@contextlib.contextmanager
def component(server: ApiServer, folder: Path, program: str, *flags: str) -> Iterator[Path]:
    """Runs a program of the newest Kubernetes as an administrator. Gives its log."""
    argv: list[str | Path] = [
        parts.program(program, parts.NEWEST_KUBERNETES),
        f"--kubeconfig={server.kubeconfig}",
        f"--cert-dir={folder}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        GATES,
        *flags,
    ]
    with held_ports(1) as (port,), running(program, folder, [*argv, f"--secure-port={port}"]) as log:
        yield log
