"""The library's subscription behind a Service while the operator's replicas come and go: nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gracepoint.deadline import Backoff
from gracepoint.receivers import OperatorConnection, OperatorSubscriber, Sender, channel
from gracepoint.wire.messages import Acknowledgement
from gracepoint_operator.kube import objects as kinds
from tests.contract.fakes.replicas import NAME, WAIT_S, Replica
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE
from tests.unit.operator.fakes.replica import subscription as subscription_of
from tests.unit.receivers.fakes.heard import Heard
from tests.waiting import until


class Service:
    """What a Kubernetes Service is to a client: one address, behind which is now one replica, now another, or none.

    One thread accepts, two for each connection carry bytes; ``close`` ends all of them, and waits for that.
    """

    def __init__(self) -> None:
        self._target: int | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self._socket.getsockname()[1]}"

    def lead_to(self, replica: Replica | None) -> None:
        """Cuts what is connected; new connections go to this replica."""
        with self._lock:
            self._target = None if replica is None else replica.server.https_port
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.lead_to(None)
        self._socket.shutdown(socket.SHUT_RDWR)
        for each in self._threads:  # those of a connection that is accepted meanwhile are added before this ends
            each.join(WAIT_S)
            assert not each.is_alive(), f"a thread of the Service did not end within {WAIT_S:.0f} s"
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                if self._target is None:
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._target), timeout=WAIT_S)
                except OSError:  # as a Service does for a replica that is gone
                    client.close()
                    continue
                self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                self._threads.append(threading.Thread(target=self._carry, args=(source, sink), daemon=True))
                self._threads[-1].start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with self._lock:
            for each in (source, sink):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._open.discard(source)
        source.close()


class Pod:
    """The library's side, connected through the Service."""

    def __init__(self, service: Service, ca: str, token: Path) -> None:
        self.heard = Heard()
        self.receipts = 0
        self.subscriber = OperatorSubscriber(
            OperatorConnection(service.url, ca, str(token)), subscription_of(0), self.heard, self._receipt
        )

    def _receipt(self, _: object) -> None:
        self.receipts += 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Replica]) -> Iterator[Service]:
    """Ends before the replicas (``start``) do, so that they see every connection end, half-made ones too."""
    monkeypatch.setattr(Backoff, "next_s", lambda self: 0.02)
    monkeypatch.setattr(channel, "_JOIN_S", WAIT_S)
    service = Service()
    yield service
    service.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "projected-token"
    path.write_text("token-0")
    return path


@pytest.fixture
def pod(service: Service, start: Callable[..., Replica], api: MemoryApi, token: Path) -> Iterator[tuple[Pod, Replica]]:
    """A pod that is connected to a first replica."""
    replica = start(api)
    service.lead_to(replica)
    pod = Pod(service, replica.ca, token)
    assert pod.subscriber.wait_until_connected(WAIT_S)
    yield pod, replica
    pod.subscriber.close()


def test_a_notice_that_fell_into_an_outage_arrives_after_it(pod: tuple[Pod, Replica], service: Service) -> None:
    listener, replica = pod
    service.lead_to(None)
    until(lambda: len(replica.core.subscribers) == 0, "the operator to see the stream end")
    replica.taint()
    until(lambda: replica.api.of(kinds.PREEMPTIONS), "the preemption")
    assert listener.heard.posts == []
    service.lead_to(replica)
    (post,) = listener.heard.wait_for_posts()
    assert (post.preemption, listener.receipts) == (NAME, 1)


def test_a_retraction_that_fell_into_an_outage_arrives_after_it(pod: tuple[Pod, Replica], service: Service) -> None:
    listener, replica = pod
    taint = objects.taint("node.kubernetes.io/not-ready", "NoExecute")
    replica.core.feed(kinds.NODES, "MODIFIED", replica.api.add(kinds.NODES, objects.node("node-1", taints=[taint])))
    listener.heard.wait_for_posts()
    service.lead_to(None)
    until(lambda: len(replica.core.subscribers) == 0, "the operator to see the stream end")
    replica.core.feed(kinds.NODES, "MODIFIED", replica.api.add(kinds.NODES, objects.node("node-1")))
    until(lambda: replica.api.of(kinds.PREEMPTIONS)[0]["status"]["phase"] == "Retracted", "the retraction")
    assert listener.heard.retracted == []
    service.lead_to(replica)
    assert listener.heard.wait_for_retraction() == NAME


@pytest.mark.parametrize("to_the_other", [False, True], ids=["same replica", "other replica"])
def test_ack_lost_in_an_outage_is_sent_again(
    service: Service, start: Callable[..., Replica], api: MemoryApi, token: Path, to_the_other: bool
) -> None:
    replica = start(api)
    after = start(api, "replica-b") if to_the_other else replica
    service.lead_to(replica)
    sender = Sender(OperatorConnection(service.url, replica.ca, str(token)), time.monotonic)
    sent: list[Acknowledgement] = []

    def acknowledge(receipt: Acknowledgement) -> None:
        if not sent:
            service.lead_to(None)
        sent.append(receipt)
        sender.send(receipt, within_s=0.0 if len(sent) == 1 else WAIT_S)

    heard = Heard()
    subscriber = OperatorSubscriber(
        OperatorConnection(service.url, replica.ca, str(token)), subscription_of(0), heard, acknowledge
    )
    try:
        assert subscriber.wait_until_connected(WAIT_S)
        for each in {id(replica): replica, id(after): after}.values():
            each.taint()
        heard.wait_for_posts()
        assert sender.flush(WAIT_S)
        until(lambda: api.of(kinds.PREEMPTIONS), "the record")
        (record,) = api.of(kinds.PREEMPTIONS)
        assert record.get("status", {}).get("acknowledgements", {}).get("received", 0) == 0, "the first one is lost"
        service.lead_to(after)
        until(lambda: api.of(kinds.PREEMPTIONS)[0]["status"]["acknowledgements"]["received"] == 1, "the receipt")
    finally:
        subscriber.close()
        sender.close()
    assert len(sent) == 2


def test_the_other_replica_continues_where_the_first_one_went_away(
    pod: tuple[Pod, Replica], service: Service, start: Callable[..., Replica], api: MemoryApi
) -> None:
    listener, first = pod
    second = start(api, "replica-b")
    first.taint()
    second.taint()
    listener.heard.wait_for_posts()
    deadline_s = time.monotonic() + listener.heard.remaining_s()
    first.server.stop()
    service.lead_to(second)
    listener.heard.wait_for_posts(2)
    assert {post.preemption for post in listener.heard.posts} == {NAME}, "one preemption, whoever tells of it"
    assert time.monotonic() + listener.heard.remaining_s() <= deadline_s + 1, "its time does not begin anew"


def test_renewed_token_is_sent_at_the_next_connection(
    pod: tuple[Pod, Replica], service: Service, api: MemoryApi, token: Path
) -> None:
    listener, replica = pod
    reviewed = sum("tokenreviews" in call for call in api.calls)
    service.lead_to(None)
    del api.tokens["token-0"]
    api.bind_token("token-0-renewed", NAMESPACE, "uid-pod-0-0")
    token.write_text("token-0-renewed")
    service.lead_to(replica)
    until(lambda: sum("tokenreviews" in call for call in api.calls) > reviewed, "the review of another token")
    replica.taint()
    assert listener.heard.wait_for_posts()[0].preemption == NAME
