"""Prometheus: with the recording, or as a folder's configuration says.

Processes: promtool, which writes the blocks and ends, and one Prometheus in a process group of its own. ``served``
starts and ends it.
"""

from __future__ import annotations

import contextlib
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.dashboard import recording
from tests.ports import held_ports
from tests.testcluster import parts
from tests.testcluster.api import ClusterError
from tests.testcluster.shell import log_tail, wait_until

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
    with (
        held_ports(1) as (port,),
        served(
            folder, f"127.0.0.1:{port}", f"--storage.tsdb.path={blocks}", "--storage.tsdb.retention.time=100y"
        ) as url,
    ):
        yield url


@contextlib.contextmanager
def served(
    folder: Path, address: str, *flags: str, path: str = "", enter: Callable[[list[str]], list[str]] = lambda argv: argv
) -> Iterator[str]:
    """Gives the URL of a Prometheus that runs with the folder's ``prometheus.yaml``. Its log goes there, too.

    Args:
        folder: An absolute path.
        address: Where it listens, with the port.
        flags: More flags.
        path: What the paths of its pages begin with. Empty, or with a slash in front.
        enter: Makes of a command the one that runs it where it is to run.

    Raises:
        ClusterError: It is not built, has ended, or is not ready in time.
    """
    url = f"http://{address}{path}"
    log = folder / "prometheus.log"
    argv = [str(parts.program("prometheus")), f"--config.file={folder / 'prometheus.yaml'}"]
    with log.open("w") as output:
        process = subprocess.Popen(
            enter([*argv, f"--web.listen-address={address}", f"--web.route-prefix={path or '/'}", *flags]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(
            "Prometheus to be ready",
            lambda: process.poll() is not None or _is_ready(url),
            timeout_s=_READY_S,
            hint=log.read_text,
        )
        if process.poll() is not None:
            raise ClusterError(f"Prometheus has ended with {process.returncode}{log_tail(log)}")
        yield url
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            for each in first.children() or [first]:  # what entered a machine for it ends with it
                each.terminate()
        process.wait(_ENDS_S)


#: Without the proxies of the environment.
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _is_ready(url: str) -> bool:
    try:
        with direct.open(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # also what urllib raises
        return False
