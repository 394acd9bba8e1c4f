"""The operator's own server, as the library meets it. Only the API server is in memory, its TokenReviews too."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import trustme

from gracepoint.receivers.channel import OperatorConnection
from gracepoint.settings import Settings
from gracepoint.wire.frames import Frame, Notice
from gracepoint.wire.messages import Message
from gracepoint.wire.names import PATH_SUBSCRIBE
from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.limited_port import ConnectionLimits
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.server import Server, ServerSettings
from gracepoint_operator.trust.certificates import Certificates
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, Clock
from tests.unit.operator.fakes.replica import cluster, subscription
from tests.waiting import until

NAME = f"train-{JOBSET_UID[:8]}-1"
WAIT_S = 60.0
WEBHOOK_TOKEN = "told-to-the-api-server-alone"


@dataclasses.dataclass
class Replica:
    """A running server and what a pod needs to reach it."""

    server: Server
    core: Controller
    api: MemoryApi
    ca: str
    tokens: Path
    certificates: Certificates
    counted: Metrics

    @property
    def core_trusts(self) -> str:
        """The authorities that pods are given now."""
        return self.certificates.ca

    @property
    def core_loop(self) -> asyncio.AbstractEventLoop:
        loop = self.server._loop
        assert loop is not None
        return loop

    @property
    def url(self) -> str:
        return f"https://localhost:{self.server.https_port}"

    def channel(self, token: str) -> OperatorConnection:
        return OperatorConnection(self.url, self.ca, self._token_file(token))

    def settings(self, *, stall_after_s: float) -> Settings:
        """Settings of the library in the first pod."""
        return Settings(
            operator_url=self.url,
            ca_certificate=self.ca,
            token_file=self._token_file("token-0"),
            namespace=NAMESPACE,
            pod_name="pod-0-0",
            pod_uid="uid-pod-0-0",
            jobset_uid=JOBSET_UID,
            stall_after_s=stall_after_s,
        )

    def post(self, token: str, path: str, message: Message) -> None:
        channel = self.channel(token)
        try:
            channel.post(path, message, timeout_s=WAIT_S)
        finally:
            channel.close()

    def metrics(self) -> str:
        return self.counted.text().decode()

    def scrape(self) -> str:
        """The metrics as Prometheus gets them."""
        with urllib.request.urlopen(f"http://localhost:{self.server.health_port}/metrics", timeout=WAIT_S) as response:
            return str(response.read().decode())

    def refused(self, reason: str) -> float:
        name = f'gracepoint_channel_requests_refused_total{{reason="{reason}"}} '
        lines = [line for line in self.metrics().splitlines() if line.startswith(name)]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    def taint(self, name: str = "node-1") -> None:
        body = self.api.add(kinds.NODES, objects.node(name, taints=[objects.taint()]))
        self.core.feed(kinds.NODES, "MODIFIED", body)

    def stream(self, index: int = 0, session: str = "s-0") -> Stream:
        return Stream(self.channel(f"token-{index}"), subscription(index, session))

    def _token_file(self, token: str) -> str:
        path = self.tokens / f"file-of-{token}"
        path.write_text(token)
        return str(path)


class Stream:
    """A subscription whose frames a test reads one by one."""

    def __init__(self, channel: OperatorConnection, who: Message) -> None:
        self.channel = channel
        self._response = channel.stream(PATH_SUBSCRIBE, who)
        channel.set_timeout_s(WAIT_S)

    def next(self) -> Frame:
        line = self._response.readline()
        if not line:
            raise EOFError("the operator ended the stream")
        return Frame.read(line)

    def notice(self) -> Notice:
        while not isinstance(frame := self.next(), Notice):
            pass
        return frame

    def close(self) -> None:
        self.channel.interrupt()
        self._response.close()
        self.channel.close()


@contextlib.contextmanager
def replicas(authority: trustme.CA, folder: Path) -> Iterator[Callable[..., Replica]]:
    """Gives a function that starts replicas; stops them all in the end.

    Args:
        authority: Issues the replicas' certificate.
        folder: For certificates and tokens.
    """
    servers: list[Server] = []
    tls = folder / "tls"
    tls.mkdir()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tls / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(tls / "tls.crt"))
    authority.cert_pem.write_to_path(str(tls / "ca.crt"))

    def make(
        api: MemoryApi,
        name: str = "replica-a",
        limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008  immutable
        overlap_s: float = 86400.0,
        canary: bool = False,
        server_name: str = "localhost",
    ) -> Replica:
        metrics = Metrics()
        certificates = Certificates(tls, overlap_s=overlap_s)
        core = Controller(api, metrics, time.time, ControllerSettings(name, write_interval_s=0.05))
        settings = ServerSettings(
            webhook_token=WEBHOOK_TOKEN,
            service_url=f"https://{server_name}",
            host="localhost",
            limits=limits,
            canary=canary,
        )
        server = Server(core, certificates, settings)
        servers.append(server)
        server.start(lambda: None)
        until(lambda: core.ready, "the replica to know the cluster")
        return Replica(server, core, api, authority.cert_pem.bytes().decode(), folder, certificates, metrics)

    try:
        yield make
    finally:
        for server in servers:
            server.stop()


def bound_cluster() -> MemoryApi:
    """A cluster that trains, and the tokens of its pods."""
    made = MemoryApi(Clock(time.time()))
    cluster(made)
    for index in (0, 1):
        made.bind_token(f"token-{index}", NAMESPACE, f"uid-pod-{index}-0")
    return made
