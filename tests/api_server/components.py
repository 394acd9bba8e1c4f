"""Components of the newest Kubernetes beside its API server: the scheduler, and controllers of the controller manager.

They work with Node objects and with pods that no kubelet runs.

Processes: each component in a process group of its own, until ``component`` ends. Threads: none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer, free_ports
from tests.testcluster.shell import log_tail

GATES = "--feature-gates=GenericWorkload=true"
_KILLED_S = 10.0


@contextlib.contextmanager
def component(server: ApiServer, folder: Path, program: str, *flags: str) -> Iterator[Path]:
    """Runs a program of the newest Kubernetes as an administrator. Gives its log."""
    (port,) = free_ports(1)
    log = folder / f"{program}.log"
    argv: list[str | Path] = [
        parts.program(program, parts.NEWEST_KUBERNETES),
        f"--kubeconfig={server.kubeconfig}",
        f"--secure-port={port}",
        f"--cert-dir={folder}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        GATES,
        *flags,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder), "NO_PROXY": "*"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield log
    except AssertionError as error:
        error.add_note(log_tail(log))
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_KILLED_S)
