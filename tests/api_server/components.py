"""Components of Kubernetes beside its API server: the scheduler, and controllers of the controller manager.

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
def component(
    server: ApiServer, folder: Path, program: str, *flags: str, other: str = parts.NEWEST_KUBERNETES
) -> Iterator[Path]:
    """Runs a program of the newest or another Kubernetes (empty: the usual one) as an administrator. Gives its log."""
    argv: list[str | Path] = [
        parts.program(program, other),
        f"--kubeconfig={server.kubeconfig}",
        f"--cert-dir={folder}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        *([GATES] if other == parts.NEWEST_KUBERNETES else []),
        *flags,
    ]
    with held_ports(1) as (port,), running(program, folder, [*argv, f"--secure-port={port}"]) as log:
        yield log
