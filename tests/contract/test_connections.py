"""Connections to the channel from callers who do not show who they are, over real TLS on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import itertools
import socket
import ssl
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gracepoint.receivers.channel import ChannelError
from gracepoint.wire.frames import Frame, Hello, Notice
from gracepoint.wire.names import PATH_REPORT, PATH_SUBSCRIBE
from gracepoint_operator import health, server
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.limited_port import ConnectionLimits
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, path_of
from tests.contract.fakes.evictions import evict
from tests.contract.fakes.replicas import NAME, WAIT_S, WEBHOOK_TOKEN, Replica
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE
from tests.unit.operator.fakes.replica import subscription
from tests.waiting import until

SHORT = ConnectionLimits(handshake_s=0.3, request_s=0.3, pending_s=0.6)
FEW = ConnectionLimits(at_once=12, at_once_of_address=8)
NO_BODY = f"POST {PATH_REPORT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode()
#: Loopback addresses that stand for other pods.
ATTACKER, OTHER = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def opened() -> Iterator[list[socket.socket]]:
    """Sockets that are closed in the end."""
    made: list[socket.socket] = []
    yield made
    for one in made:
        with contextlib.suppress(OSError):
            one.close()


def connect(
    replica: Replica, opened: list[socket.socket], address: str = "127.0.0.1", *, tls: bool, port: int | None = None
) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port or replica.server.https_port), WAIT_S, (address, 0))
    opened.append(made)
    if tls:
        context = ssl.create_default_context(cadata=replica.ca)
        made = context.wrap_socket(made, server_hostname="localhost")
        opened.append(made)
    return made


def is_closed(one: socket.socket) -> bool:
    """Whether the operator has closed it; the wait is bounded by the socket's timeout."""
    try:
        while one.recv(4096):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def closed(replica: Replica, reason: str, port: str | None = None) -> float:
    labels = f'reason="{reason}"' if port is None else f'port="{port}",reason="{reason}"'
    name = f"gracepoint_{'channel' if port is None else 'port'}_connections_closed_total{{{labels}}} "
    lines = [line for line in replica.metrics().splitlines() if line.startswith(name)]
    return float(lines[0].rpartition(" ")[2]) if lines else 0.0


@pytest.mark.parametrize(
    ("tls", "says"),
    [
        pytest.param(False, b"", id="no TLS handshake"),
        pytest.param(False, b"\x16\x03\x01", id="half a TLS handshake"),
        pytest.param(True, b"", id="no request"),
        pytest.param(True, b"POST / HTTP/1.1\r\nHost: x\r\n", id="half a request's headers"),
        pytest.param(
            True, f"POST {PATH_REPORT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode(), id="no body"
        ),
    ],
)
def test_a_connection_that_asks_for_nothing_is_closed_in_time(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket], tls: bool, says: bytes
) -> None:
    idle = connect(start(api, limits=SHORT), opened, tls=tls)
    if says:
        idle.sendall(says)
    assert is_closed(idle)


def test_one_that_trickles_is_closed_nevertheless(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    slow = connect(start(api, limits=SHORT), opened, tls=True)
    slow.sendall(b"POST / HTTP/1.1\r\n")
    slow.settimeout(0.05)

    def trickle() -> None:
        for _ in range(int(WAIT_S / 0.05)):
            slow.sendall(b"a: b\r\n")
            with contextlib.suppress(TimeoutError):
                if slow.recv(1) == b"":
                    raise ConnectionResetError

    with pytest.raises(OSError):  # noqa: PT011  whichever way the kernel says that the peer has closed
        trickle()


def test_an_address_holds_only_so_many_connections(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    replica = start(api, limits=FEW)
    for _ in range(FEW.at_once_of_address):
        connect(replica, opened, ATTACKER, tls=True)
    assert is_closed(connect(replica, opened, ATTACKER, tls=False))
    assert closed(replica, "address_full") == 1


def test_a_flood_takes_no_place_from_other_addresses(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    replica = start(api, limits=FEW)
    flood = [connect(replica, opened, ATTACKER, tls=False) for _ in range(FEW.at_once_of_address)]
    others = [connect(replica, opened, OTHER, tls=True) for _ in range(FEW.at_once - len(flood))]
    with contextlib.closing(replica.stream()) as stream:  # from a third address, with all places taken
        assert isinstance(stream.next(), Hello)
    assert is_closed(flood[0])
    assert closed(replica, "crowded") >= 1
    for one in others:
        one.settimeout(0.05)
    assert not any(is_closed(one) for one in others)


def test_a_stream_outlives_a_flood_from_its_own_address_and_gets_notices(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    limits = dataclasses.replace(SHORT, at_once=12, at_once_of_address=8)
    replica = start(api, limits=limits)
    with contextlib.closing(replica.stream()) as stream:
        assert isinstance(stream.next(), Hello)
        for _ in range(3 * limits.at_once):
            with contextlib.suppress(OSError):
                connect(replica, opened, tls=False)
        until(lambda: closed(replica, "address_full") > 0, "the address to be full")
        until(lambda: closed(replica, "handshake") > 0, "the time of the idle connections to be over")
        replica.taint()
        assert stream.notice().preemption == NAME


def test_full_address_accepts_again_when_idle_connections_are_gone(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    replica = start(api, limits=dataclasses.replace(SHORT, at_once=12, at_once_of_address=8))
    for _ in range(8):
        connect(replica, opened, tls=False)
    with pytest.raises(ChannelError):
        replica.stream()
    until(lambda: closed(replica, "handshake") == 8, "the time of the idle connections to be over")
    with contextlib.closing(replica.stream()) as stream:
        assert isinstance(stream.next(), Hello)


def test_evictions_are_answered_while_the_channels_loop_does_nothing_at_all(
    start: Callable[..., Replica], api: MemoryApi
) -> None:
    """As under more connections than it can serve."""
    replica = start(api)
    loop = replica.server._channel.loop
    assert loop is not None
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(WAIT_S)

    loop.call_soon_threadsafe(hold)
    assert held.wait(WAIT_S)
    try:
        status, said = evict(replica, path_of(PATH_EVICTIONS, WEBHOOK_TOKEN), port=replica.server.webhook_port)
    finally:
        go_on.set()
    assert status == 200
    assert '"code": 429' in said


EVICTIONS = path_of(PATH_EVICTIONS, WEBHOOK_TOKEN)


def _nothing(replica: Replica, opened: list[socket.socket], address: str, port: int) -> None:
    connect(replica, opened, address, tls=False, port=port)


def _half_a_handshake(replica: Replica, opened: list[socket.socket], address: str, port: int) -> None:
    with contextlib.suppress(OSError):
        connect(replica, opened, address, tls=False, port=port).sendall(b"\x16\x03\x01\x02\x00\x01")


def _handshake_alone(replica: Replica, opened: list[socket.socket], address: str, port: int) -> None:
    with contextlib.suppress(OSError):
        connect(replica, opened, address, tls=True, port=port)


@pytest.mark.parametrize(
    "address", [pytest.param(ATTACKER, id="of another address"), pytest.param("127.0.0.1", id="of its own address")]
)
@pytest.mark.parametrize("does", [_nothing, _half_a_handshake, _handshake_alone])
def test_evictions_are_answered_while_idle_connections_flood_the_webhooks(
    start: Callable[..., Replica],
    api: MemoryApi,
    opened: list[socket.socket],
    does: Callable[[Replica, list[socket.socket], str, int], None],
    address: str,
) -> None:
    replica = start(api)
    port = replica.server.webhook_port
    for _ in range(server._WEBHOOK_LIMITS.at_once_of_address + 40):
        does(replica, opened, address, port)
    status, said = evict(replica, EVICTIONS, port=port)
    assert (status, '"code": 429' in said) == (200, True)
    reasons = ("address_full", "crowded")
    until(lambda: any(closed(replica, one, "webhooks") > 0 for one in reasons), "the oldest connections to be closed")


def test_an_address_that_opens_connections_too_often_is_refused_and_others_are_not(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_WEBHOOK_LIMITS", "_HEALTH_LIMITS"):
        monkeypatch.setattr(server, name, dataclasses.replace(getattr(server, name), a_second_of_address=0.5))
    replica = start(api)
    for port, name in ((replica.server.webhook_port, "webhooks"), (replica.server.health_port, "health")):
        for _ in range(100):
            with contextlib.suppress(OSError):
                connect(replica, opened, ATTACKER, tls=False, port=port).close()
        until(lambda name=name: closed(replica, "too_often", name) > 0, "the address to be refused")  # type: ignore[misc]
    assert evict(replica, EVICTIONS, port=replica.server.webhook_port)[0] == 200


def test_probes_are_answered_while_idle_connections_of_their_own_address_flood_the_port(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    """A kubelet shares its node's address with pods of hostNetwork."""
    replica = start(api)
    for _ in range(700):
        connect(replica, opened, tls=False, port=replica.server.health_port)
    with urllib.request.urlopen(f"http://localhost:{replica.server.health_port}/healthz", timeout=WAIT_S) as answer:
        assert answer.read() == b"ok"


def test_a_client_of_the_health_port_is_told_that_its_connection_ends(
    start: Callable[..., Replica], api: MemoryApi
) -> None:
    probe = http.client.HTTPConnection("localhost", start(api).server.health_port, timeout=WAIT_S)
    with contextlib.closing(probe):
        probe.request("GET", "/healthz")
        answer = probe.getresponse()
        assert (answer.read(), answer.getheader("Connection")) == (b"ok", "close")


def test_a_flood_from_many_addresses_keeps_nobody_waiting(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_WEBHOOK_LIMITS", dataclasses.replace(server._WEBHOOK_LIMITS, at_once=100))
    replica = start(api)
    port = replica.server.webhook_port
    flood = [connect(replica, opened, f"127.0.1.{1 + number}", tls=False, port=port) for number in range(150)]
    assert evict(replica, EVICTIONS, port=port)[0] == 200
    assert is_closed(flood[0])
    assert closed(replica, "crowded", "webhooks") >= 50


def calls(replica: Replica, number: int) -> list[http.client.HTTPSConnection]:
    """Connections of an API server to the webhooks."""
    context = ssl.create_default_context(cadata=replica.ca)
    return [
        http.client.HTTPSConnection("localhost", replica.server.webhook_port, timeout=WAIT_S, context=context)
        for _ in range(number)
    ]


def test_a_burst_of_calls_of_an_api_server_takes_no_place_from_itself(
    start: Callable[..., Replica], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = dataclasses.replace(server._WEBHOOK_LIMITS, at_once_of_address=8)
    monkeypatch.setattr(server, "_WEBHOOK_LIMITS", limits)
    replica = start(api)
    assert evict(replica, EVICTIONS, port=replica.server.webhook_port)[0] == 200  # its address is known now
    burst = calls(replica, 60)
    for one in burst:
        one.connect()
    for one in burst:
        with contextlib.closing(one):
            one.request("POST", EVICTIONS, body="{}")
            assert one.getresponse().status == 400


def test_a_call_that_is_in_progress_keeps_its_connection_and_one_that_rests_gives_way(
    start: Callable[..., Replica], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_WEBHOOK_LIMITS", dataclasses.replace(server._WEBHOOK_LIMITS, kept=2))
    replica = start(api)
    under_way, rests, *others = calls(replica, 5)
    under_way.putrequest("POST", EVICTIONS)
    under_way.putheader("Content-Length", "2")
    under_way.endheaders(b"{")
    for one in (rests, *others):
        one.request("POST", EVICTIONS, body="{}")
        assert one.getresponse().read()
    assert rests.sock is not None
    assert is_closed(rests.sock)
    assert closed(replica, "rested", "webhooks") == 3
    under_way.send(b"}")
    assert under_way.getresponse().status == 400
    for one in (under_way, rests, *others):
        one.close()


@pytest.mark.parametrize(
    ("port", "says"),
    [
        pytest.param("webhooks", [b"a: b\r\n" * 40], id="many headers"),
        pytest.param("webhooks", [b"a: " + b"b" * 8000 + b"\r\n"] * 60, id="long headers"),
        pytest.param("health", [b"a: " + b"b" * 8000 + b"\r\n"] * 60, id="long headers of a scrape"),
        pytest.param("channel", [b"a: " + b"b" * 8000 + b"\r\n"] * 60, id="long headers to the channel"),
        pytest.param("channel", [b"Content-Length: 260000\r\n\r\n", b"[" * 260_000], id="more than a body"),
    ],
)
def test_what_a_caller_sends_before_it_is_known_is_bounded(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket], port: str, says: list[bytes]
) -> None:
    replica = start(api)
    served = replica.server
    number = {"webhooks": served.webhook_port, "health": served.health_port, "channel": served.https_port}[port]
    one = connect(replica, opened, ATTACKER, tls=port != "health", port=number)
    with contextlib.suppress(OSError):
        one.sendall(b"POST /v1/reports HTTP/1.1\r\nHost: x\r\n")
        for part in says * 2:
            one.sendall(part)
    assert is_closed(one)


def test_who_sends_the_most_loses_a_connection_when_all_send_too_much(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    replica = start(api, limits=ConnectionLimits(bytes_at_once=300_000))
    flood = [connect(replica, opened, ATTACKER, tls=True) for _ in range(4)]
    other = connect(replica, opened, OTHER, tls=True)
    head = f"POST {PATH_REPORT} HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n".encode()
    other.sendall(head + b"[" * 1000)
    for one in flood:
        with contextlib.suppress(OSError):
            one.sendall(head + b"[" * 100_000)
    until(lambda: closed(replica, "too_large") >= 2, "those that send the most to be closed")
    other.settimeout(0.05)
    assert not is_closed(other)


def test_scrapes_that_nobody_reads_hold_no_copies_of_the_text(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = start(api)
    text = b"x" * 8_000_000
    monkeypatch.setattr(Metrics, "text", lambda self: text)
    assert len(replica.scrape()) == len(text)
    tracemalloc.start()
    try:
        for _ in range(20):
            one = connect(replica, opened, ATTACKER, tls=False, port=replica.server.health_port)
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(1) == b"H"
        assert tracemalloc.get_traced_memory()[1] < len(text)
    finally:
        tracemalloc.stop()


def test_scrapes_that_nobody_reads_hold_no_old_texts(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = start(api)
    size, numbers = 8_000_000, itertools.count()
    monkeypatch.setattr(health, "_FRESH_S", 0.0)
    monkeypatch.setattr(health, "_RESTS", 0.0)
    monkeypatch.setattr(Metrics, "text", lambda self: b"%d" % (next(numbers) % 10) * size)
    scrapes = []
    tracemalloc.start()
    try:
        for _ in range(20):
            scrapes.append(connect(replica, opened, ATTACKER, tls=False, port=replica.server.health_port))
            scrapes[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert scrapes[-1].recv(1) == b"H"
        until(lambda: tracemalloc.get_traced_memory()[0] < 8 * size, "the clients with old texts to be disconnected")
    finally:
        tracemalloc.stop()
    assert len(replica.scrape()) == size


def test_a_request_for_no_webhook_ends_its_connection(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    replica = start(api)
    one = connect(replica, opened, tls=True, port=replica.server.webhook_port)
    one.sendall(b"POST /mutate/jobsets HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    assert is_closed(one)


def test_the_api_servers_connection_stays_open_between_two_calls(
    start: Callable[..., Replica], api: MemoryApi, opened: list[socket.socket]
) -> None:
    replica = start(api)
    connection = http.client.HTTPSConnection(
        "localhost", replica.server.webhook_port, context=ssl.create_default_context(cadata=replica.ca)
    )
    with contextlib.closing(connection):
        kept = None
        for _ in range(2):
            connection.request("POST", EVICTIONS, body="{}")  # no review: refused, on a path that only it knows
            assert connection.getresponse().read()
            assert kept in (None, connection.sock)
            kept = connection.sock


def test_an_ending_replica_answers_each_api_server_once_more_and_sends_it_on(
    start: Callable[..., Replica], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SEND_ON_S", WAIT_S)
    replica = start(api)
    used, under_way = calls(replica, 2)
    with contextlib.closing(used), contextlib.closing(under_way), ThreadPoolExecutor(1) as pool:
        used.request("POST", EVICTIONS, body="{}")
        assert used.getresponse().read()
        under_way.putrequest("POST", EVICTIONS)
        under_way.putheader("Content-Length", "2")
        under_way.endheaders(b"{")
        ending = pool.submit(replica.server.send_on)

        def is_ending() -> bool:
            (probe,) = calls(replica, 1)
            with contextlib.closing(probe):
                probe.request("POST", EVICTIONS, body="{}")
                answer = probe.getresponse()
                return bool(answer.read()) and answer.getheader("Connection") == "close"

        until(is_ending, "the replica to end")
        assert not ending.done()
        under_way.send(b"}")
        used.request("POST", EVICTIONS, body="{}")
        for one in (under_way, used):
            answer = one.getresponse()
            assert (answer.status, answer.getheader("Connection")) == (400, "close")
            assert answer.read()
        ending.result(WAIT_S)


def test_an_api_server_that_does_not_call_delays_the_end_for_a_bounded_time(
    start: Callable[..., Replica], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_SEND_ON_S", 0.5)
    replica = start(api)
    (rests,) = calls(replica, 1)
    with contextlib.closing(rests):
        rests.request("POST", EVICTIONS, body="{}")
        assert rests.getresponse().read()
        began_s = time.monotonic()
        replica.server.send_on()
        assert 0.5 <= time.monotonic() - began_s < server._STOP_TIMEOUT_S


def test_many_who_ask_for_the_metrics_get_one_text_and_do_not_hold_the_loop(
    start: Callable[..., Replica], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = start(api)
    go_on, made = threading.Event(), list[float]()

    def text(self: Metrics) -> bytes:
        made.append(0.0)
        assert go_on.wait(WAIT_S)
        return b"the text\n"

    monkeypatch.setattr(Metrics, "text", text)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(replica.scrape) for _ in range(8)]
        until(lambda: made, "the text to be made")
        assert evict(replica, EVICTIONS, port=replica.server.webhook_port)[0] == 200  # on the loop that serves both
        go_on.set()
        assert {one.result(WAIT_S) for one in asked} == {"the text\n"}
    assert len(made) == 1


PODS = 300


class Pods:
    """Processes that subscribe as the library does, all on one event loop, and connect again wherever they can."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._context = ssl.create_default_context(cadata=replicas[0].ca)
        self._ports = [replica.server.https_port for replica in replicas]
        self.told: dict[int, str] = {}
        self.streams = 0

    async def run(self, index: int) -> None:
        """Subscribes until the notice has come; every other pod begins at the second replica."""
        attempt = index
        while index not in self.told:
            with contextlib.suppress(OSError, EOFError):
                await self._listen(index, self._ports[attempt % len(self._ports)])
            attempt += 1
            await asyncio.sleep(0.1)

    async def _listen(self, index: int, port: int) -> None:
        body = subscription(index).to_json().encode()
        head = f"POST {PATH_SUBSCRIBE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer token-{index}\r\n"
        reader, writer = await asyncio.open_connection("localhost", port, ssl=self._context)
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ConnectionResetError(f"found {status!r}, expected 200")
            while (await reader.readline()).strip():
                pass
            self.streams += 1
            try:
                async for line in reader:
                    if line.startswith(b"{") and isinstance(frame := Frame.read(line), Notice):
                        self.told[index] = frame.preemption
                        return
            finally:
                self.streams -= 1
        finally:
            writer.transport.abort()


def test_when_one_replica_dies_the_other_takes_all_pods_and_notifies_them(
    start: Callable[..., Replica], api: MemoryApi
) -> None:
    for index in range(PODS):
        api.add(kinds.PODS, objects.pod(index))
        api.bind_token(f"token-{index}", NAMESPACE, f"uid-pod-{index}-0")
    first, second = start(api, "replica-a"), start(api, "replica-b")
    pods = Pods([first, second])

    async def scene() -> None:
        async def streams(count: int, what: str) -> None:
            async with asyncio.timeout(60):
                while pods.streams != count:  # noqa: ASYNC110  the state of many tasks is asked, not one event
                    await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(pods.run(index)) for index in range(PODS)]
            await streams(PODS, "all pods to be connected")
            assert len(first.core.subscribers) + len(second.core.subscribers) == PODS
            assert min(len(first.core.subscribers), len(second.core.subscribers)) > PODS // 4
            await asyncio.to_thread(first.server.stop)
            async with asyncio.timeout(60):
                while len(second.core.subscribers) < PODS:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(second.taint)
            async with asyncio.timeout(60):
                await asyncio.gather(*running)

    asyncio.run(scene())
    assert set(pods.told.values()) == {NAME}
    assert len(pods.told) == PODS
    assert second.core.ready
