"""Servers that speak the APIs of Google Cloud Storage and of S3.

Processes: one server each, in a process group of its own, from ``open_gcs``, ``open_s3`` or ``open_moto`` to the end of
the ``with`` statement. Threads: none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ports import held_ports
from tests.testcluster import parts
from tests.testcluster.api import ClusterError
from tests.testcluster.shell import log_tail, wait_until

REGION = "us-east-1"
_READY_S = 30.0
_REQUEST_S = 10.0
_KILLED_S = 10.0


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket of a server.

    Attributes:
        scheme: ``gs`` or ``s3``.
        name: Its name.
        url: Where clients reach the server: the server itself, or a proxy in front of it.
        environment: The variables with which TensorStore, Orbax and obstore reach it there.
    """

    scheme: str
    name: str
    url: str
    environment: Mapping[str, str]

    @property
    def uri(self) -> str:
        """For example ``gs://name``."""
        return f"{self.scheme}://{self.name}"

    def kvstore(self, path: str = "") -> dict[str, Any]:
        """TensorStore's specification of a prefix in the bucket."""
        if self.scheme == "gs":
            return {"driver": "gcs", "bucket": self.name, "path": path}
        credentials = {"type": "environment"}
        return {
            "driver": "s3",
            "bucket": self.name,
            "path": path,
            "endpoint": self.url,
            "aws_region": self.environment["AWS_REGION"],
            "aws_credentials": credentials,
        }


class Server:
    """A server that runs.

    Args:
        scheme: ``gs`` or ``s3``.
        url: Where it listens.
        secrets: The variables with the credentials that it takes.
        buckets: The folder in which versitygw keeps its buckets; None for the others.
    """

    def __init__(self, scheme: str, url: str, secrets: Mapping[str, str], buckets: Path | None = None) -> None:
        self.scheme = scheme
        self.url = url
        self._secrets = dict(secrets)
        self.buckets = buckets

    def environment(self, url: str = "") -> dict[str, str]:
        """The variables with which clients reach the server, or a proxy in front of it at ``url``."""
        url = url or self.url
        if self.scheme == "gs":
            return {
                "TENSORSTORE_GCS_HTTP_URL": url,
                "STORAGE_EMULATOR_HOST": url,
                "GOOGLE_CLOUD_PROJECT": "tests",
                # Else gcsfs looks for credentials, in vain, to ask which kind of bucket each is.
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                **self._secrets,
            }
        # obstore takes plain HTTP only if it is told so.
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ALLOW_HTTP": "true",
            **self._secrets,
        }

    def bucket(self, name: str = "", *, url: str = "") -> Bucket:
        """Makes a bucket, with a name of its own by default, for clients that reach the server at ``url``."""
        name = name or f"bucket-{secrets.token_hex(4)}"
        if self.scheme == "gs":
            data = json.dumps({"name": name}).encode()
            request = urllib.request.Request(f"{self.url}/storage/v1/b?project=tests", data, method="POST")
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as reply:
                reply.read()
        elif self.buckets is not None:
            (self.buckets / name).mkdir()  # what a bucket is to versitygw
        else:  # moto asks for no credentials
            request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as reply:
                reply.read()
        return Bucket(self.scheme, name, url or self.url, self.environment(url))


def why_not() -> str:
    """Why the servers cannot run on this machine, with the fix; empty where they can."""
    missing = [part.name for part in parts.missing(parts.OBJECT_STORES)]
    return f"not built: {', '.join(missing)}; run: make servers (which needs Go: https://go.dev/doc/install)" * bool(
        missing
    )


@contextlib.contextmanager
def open_gcs(folder: Path) -> Iterator[Server]:
    """Starts fake-gcs-server, which keeps everything in memory.

    Args:
        folder: A folder for its log.

    Raises:
        ClusterError: It is not built, or was not ready in time; with the end of its log.
    """

    def arguments(port: int) -> list[str]:
        where = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", f"-external-url=http://127.0.0.1:{port}"]
        # Without a port, requests to any port of the loopback are for it: also those that come by a proxy.
        return [*where, "-public-host=127.0.0.1", "-backend=memory", "-data=", "-log-level=error"]

    token = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": secrets.token_hex(8)}
    program = [str(parts.program("fake-gcs-server"))]
    with _running(program, arguments, "/_internal/healthcheck", folder, {}) as url:
        yield Server("gs", url, token)


@contextlib.contextmanager
def open_s3(folder: Path, buckets: Path | None = None) -> Iterator[Server]:
    """Starts versitygw. The arguments are those of ``open_gcs``, and where the objects lie: in the folder, too.

    Each folder in ``buckets`` is a bucket, and an object is a file there.
    """
    place, metadata = buckets or folder / "buckets", folder / "metadata"
    place.mkdir(exist_ok=True)
    metadata.mkdir(exist_ok=True)
    keys = {"AWS_ACCESS_KEY_ID": f"test{secrets.token_hex(4)}", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}

    def arguments(port: int) -> list[str]:
        ours = [f"--port=127.0.0.1:{port}", f"--region={REGION}", "--health=/health", "--quiet", "--keep-alive"]
        # Attributes of files are not to be had on every file system, such as a tmpfs in a container.
        # ``localhost``: also with the bucket in the host's name.
        return [*ours, "--virtual-domain=localhost", "posix", f"--sidecar={metadata}", str(place)]

    root = {"ROOT_ACCESS_KEY": keys["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": keys["AWS_SECRET_ACCESS_KEY"]}
    with _running([str(parts.program("versitygw"))], arguments, "/health", folder, root) as url:
        yield Server("s3", url, keys, place)


@contextlib.contextmanager
def open_moto(folder: Path) -> Iterator[Server]:
    """Starts moto's server of S3, which keeps everything in memory. The arguments are those of ``open_gcs``."""
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}  # it takes any

    program = [sys.executable, str(Path(__file__).with_name("moto_server.py"))]
    with _running(program, lambda port: [str(port)], "/moto-api/", folder, {}) as url:
        yield Server("s3", url, keys)


@contextlib.contextmanager
def _running(
    program: Sequence[str],
    arguments: Callable[[int], list[str]],
    health: str,
    folder: Path,
    variables: Mapping[str, str],
) -> Iterator[str]:
    name = Path(program[-1]).name
    log = folder / f"{name}.log"
    with held_ports(1) as (port,), log.open("ab") as output:
        url = f"http://127.0.0.1:{port}"
        process = subprocess.Popen(
            [*program, *arguments(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            wait_until(
                f"{name} at {url}",
                lambda: process.poll() is not None or _answers(url + health),
                timeout_s=_READY_S,
                every_s=0.02,
                hint=lambda: log_tail(log),
            )
            if process.poll() is not None:
                raise ClusterError(f"{name} ended with {process.returncode} before it was ready{log_tail(log)}")
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_KILLED_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
