"""Prometheus with the recording.

Processes: promtool, which writes the blocks and ends, and one Prometheus in a process group of its own. ``prometheus``
starts and ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.dashboard import recording
from tests.ports import held_ports
from tests.testcluster import parts
from tests.testcluster.shell import wait_until

_WRITTEN_S = 300.0
_READY_S = 120.0
_ENDS_S = 30.0


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """Gives the address of a Prometheus that has the recording.

    Args:
        folder: An empty folder.
    """
    text, blocks = folder / "recording.txt", folder / "blocks"
    recording.write(text)
    argv = [
        str(parts.program("promtool")),
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        "--quiet",
        str(text),
        str(blocks),
    ]
    subprocess.run(argv, check=True, timeout=_WRITTEN_S, capture_output=True)
    (folder / "prometheus.yaml").write_text("")
    with held_ports(1) as (port,):
        yield from _served(folder, blocks, port)


def _served(folder: Path, blocks: Path, port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    log = folder / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                str(parts.program("prometheus")),
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={blocks}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until("Prometheus to be ready", lambda: _is_ready(url), timeout_s=_READY_S, hint=log.read_text)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_ENDS_S)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False
