"""The proxy does what its rules say, in front of real servers, and counts what passes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import tensorstore as ts

from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import Count, Fault, How, Rule, Shape, cut_after
from tests.object_stores.servers import Bucket, Server
from tests.waiting import until

LIMIT_S = 20.0
BODY = b"0123456789" * 1000


class Client:
    """Speaks Google's JSON API over one connection."""

    def __init__(self, proxy: FaultProxy, bucket: Bucket, timeout_s: float = LIMIT_S) -> None:
        parts = urlsplit(proxy.url)
        assert parts.hostname is not None
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        self.bucket = bucket.name

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def write(self, name: str, body: bytes = BODY) -> int:
        return self.ask("POST", f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={name}", body)[0]

    def read(self, name: str) -> bytes:
        return self.ask("GET", f"/storage/v1/b/{self.bucket}/o/{name}?alt=media")[1]

    def names(self) -> list[str]:
        found = json.loads(self.ask("GET", f"/storage/v1/b/{self.bucket}/o?prefix=")[1])
        return [item["name"] for item in found.get("items", [])]

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            self.connection.request(method, path, body)
            reply = self.connection.getresponse()
            return reply.status, reply.read()
        except BaseException:
            self.connection.close()
            raise


@pytest.fixture
def bucket(gcs: Server, proxy: FaultProxy) -> Bucket:
    return gcs.bucket(url=proxy.url)


@pytest.fixture
def client(proxy: FaultProxy, bucket: Bucket) -> Iterator[Client]:
    with Client(proxy, bucket) as made:
        yield made


LOST = (ConnectionError, http.client.HTTPException)


def test_without_rules_everything_passes_and_is_counted(proxy: FaultProxy, client: Client) -> None:
    assert client.write("a") == 200
    assert client.read("a") == BODY
    assert client.ask("GET", f"/storage/v1/b/{client.bucket}/o/missing")[0] == 404
    counts = proxy.counts()
    assert counts["GET read"] == Count(1, 0, len(BODY), 0)
    assert counts["POST write"].sent == len(BODY)
    assert counts["GET stat"].failed == 1
    proxy.reset()
    assert proxy.counts() == {}


@pytest.mark.parametrize("status", [409, 429, 503])
def test_an_answer_comes_from_the_proxy_alone(proxy: FaultProxy, client: Client, status: int) -> None:
    with proxy.rules(Rule(Fault(How.ANSWER, status, retry_after_s=1), kinds=("write",))):
        assert client.write("a") == status
    assert client.names() == []
    assert client.write("a") == 200


@pytest.mark.parametrize(
    ("fault", "stored"),
    [
        pytest.param(Fault(How.REFUSE), [], id="refuse"),
        pytest.param(Fault(How.CUT_REQUEST, after_bytes=10), [], id="cut request"),
        pytest.param(Fault(How.CUT_REQUEST), [], id="cut before the body"),
        pytest.param(Fault(How.LOST_REPLY), ["a"], id="lost reply"),
        pytest.param(Fault(How.CUT_REPLY, after_bytes=10), ["a"], id="cut reply"),
        pytest.param(Fault(How.STALL_REQUEST, seconds=0.1, after_bytes=10), ["a"], id="a stall that ends"),
        pytest.param(Fault(How.SLOW_REPLY, seconds=0.1), ["a"], id="slow reply"),
        pytest.param(Fault(How.STALL_REPLY, seconds=0.1, after_bytes=10), ["a"], id="stalled reply"),
    ],
)
def test_a_fault_leaves_the_server_as_it_says(
    proxy: FaultProxy, client: Client, fault: Fault, stored: list[str]
) -> None:
    with proxy.rules(Rule(fault, kinds=("write",), times=1)):
        if fault.seconds is None:
            with pytest.raises(LOST):
                client.write("a")
        else:
            begin = time.monotonic()
            assert client.write("a") == 200
            assert time.monotonic() - begin >= fault.seconds
    assert client.names() == stored
    assert [each.fault for each in proxy.exchanges] == [fault.how, None]


def test_a_read_that_is_cut_brings_so_many_bytes(proxy: FaultProxy, client: Client) -> None:
    client.write("a")
    with proxy.rules(Rule(Fault(How.CUT_REPLY, after_bytes=100))), pytest.raises(LOST):
        client.read("a")
    assert proxy.exchanges[-1].received == 100
    assert client.read("a") == BODY


def test_a_stall_lasts_until_the_client_gives_up(proxy: FaultProxy, bucket: Bucket) -> None:
    with proxy.rules(Rule(Fault(How.STALL_REQUEST, after_bytes=10))):
        with Client(proxy, bucket, timeout_s=0.2) as hasty, pytest.raises(TimeoutError):
            hasty.write("a")
        until_idle(proxy)
    with Client(proxy, bucket) as patient:
        assert patient.names() == []


@pytest.mark.parametrize("lose_last_reply", [False, True])
@pytest.mark.parametrize("requests", [0, 1, 2])
def test_after_the_cut_nothing_reaches_the_server(
    proxy: FaultProxy, client: Client, requests: int, lose_last_reply: bool
) -> None:
    done = []
    with proxy.rules(*cut_after(requests, lose_last_reply=lose_last_reply)):
        for name in "abcd":
            with contextlib.suppress(*LOST):
                done.append(client.write(name) == 200 and name)
    assert client.names() == list("abcd"[:requests])
    assert done == list("abcd"[: max(requests - lose_last_reply, 0)])


def test_a_connection_has_its_latency_and_bandwidth(proxy: FaultProxy, client: Client) -> None:
    client.names()
    proxy.shape = Shape(round_trip_s=0.1)
    begin = time.monotonic()
    client.names()
    assert time.monotonic() - begin >= 0.1
    proxy.shape = Shape(connection_rate=1e6)  # also for connections that are open
    begin = time.monotonic()
    client.write("a", bytes(300_000))
    assert time.monotonic() - begin >= 0.25
    begin = time.monotonic()
    client.read("a")
    assert time.monotonic() - begin >= 0.25


def test_connections_share_the_bandwidth_of_all(proxy: FaultProxy, bucket: Bucket) -> None:
    proxy.shape = Shape(total_rate=2e6)
    begin = time.monotonic()

    def write(name: str) -> int:
        with Client(proxy, bucket) as client:
            return client.write(name, bytes(200_000))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(write, "abc", timeout=LIMIT_S)) == [200] * 3
    assert time.monotonic() - begin >= 0.25


def test_clients_with_other_ways_of_http_are_served(proxy: FaultProxy, client: Client) -> None:
    path = f"/upload/storage/v1/b/{client.bucket}/o?uploadType=media&name=a"
    chunks = (BODY[:10], BODY[10:])
    client.connection.request("POST", path, iter(chunks), {"Expect": "100-continue"}, encode_chunked=True)
    assert client.connection.getresponse().read()
    assert client.read("a") == BODY


def test_tensorstore_works_through_it(s3: Server, gcs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for server in (gcs, s3):
        with FaultProxy(server.url) as proxy:
            bucket = server.bucket(url=proxy.url)
            for name, value in bucket.environment.items():
                monkeypatch.setenv(name, value)
            store = ts.KvStore.open(bucket.kvstore()).result()
            store.write("key", BODY).result()
            assert store.read("key").result().value == BODY
            assert sum(count.requests for count in proxy.counts().values()) >= 2
            assert proxy.counts()["GET read"].received == len(BODY)


def test_close_ends_connections_that_stall(gcs: Server) -> None:
    proxy = FaultProxy(gcs.url)
    proxy.set_rules(Rule(Fault(How.STALL_REQUEST)))
    parts = urlsplit(proxy.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=LIMIT_S) as held:
        held.sendall(b"GET /storage/v1/b HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: proxy.number, "the request")
        begin = time.monotonic()
        proxy.close()
        assert time.monotonic() - begin < 5
        assert proxy.connections == 0


def until_idle(proxy: FaultProxy) -> None:
    until(lambda: not proxy.connections, lambda: f"the end of {proxy.connections} connections")
