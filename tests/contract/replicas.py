"""The operator's own server, as the library meets it. Only the API server is in memory, its TokenReviews too."""

from __future__ import annotations

import dataclasses
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from gracepoint.receivers.channel import OperatorConnection
from gracepoint.wire.codec import Message
from gracepoint.wire.messages import Frame, Notice
from gracepoint.wire.names import PATH_SUBSCRIBE
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import kinds
from gracepoint_operator.server import Server
from tests.unit.operator import objects
from tests.unit.operator.api import MemoryApi
from tests.unit.operator.objects import JOBSET_UID
from tests.unit.operator.replica import subscription

NAME = f"train-{JOBSET_UID[:8]}-1"
WAIT_S = 20.0
WEBHOOK_TOKEN = "told-to-the-api-server-alone"


def until(holds: Callable[[], object], what: str) -> None:
    """Waits for a state that other threads bring about."""
    give_up_at = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"waited {WAIT_S:.0f} s for: {what}")
        time.sleep(0.005)


@dataclasses.dataclass
class Replica:
    """A running server and what a pod needs to reach it."""

    server: Server
    core: Controller
    api: MemoryApi
    ca: str
    tokens: Path

    def channel(self, token: str) -> OperatorConnection:
        path = self.tokens / f"file-of-{token}"
        path.write_text(token)
        return OperatorConnection(f"https://localhost:{self.server.https_port}", self.ca, str(path))

    def post(self, token: str, path: str, message: Message) -> None:
        channel = self.channel(token)
        try:
            channel.post(path, message, timeout_s=WAIT_S)
        finally:
            channel.close()

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://localhost:{self.server.health_port}/metrics") as response:
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
