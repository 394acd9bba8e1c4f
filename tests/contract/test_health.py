"""What the probes say while parts of a replica fail, over its real ports."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gracepoint_operator import health
from gracepoint_operator.kube import objects
from tests.contract.fakes.replicas import WAIT_S, Replica
from tests.unit.operator.fakes.api import MemoryApi
from tests.waiting import until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "EVERY_S", 0.1)


_callers = itertools.cycle(f"127.0.0.{number}" for number in range(2, 250))


def probe(replica: Replica, path: str) -> tuple[int, str]:
    """Asks from another address each time, as one that asks so often is refused."""
    address = (next(_callers), 0)
    connection = http.client.HTTPConnection("127.0.0.1", replica.server.health_port, WAIT_S, address)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def sample(replica: Replica, name: str) -> float:
    (line,) = [line for line in replica.metrics().splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


def is_counted(replica: Replica, name: str) -> bool:
    return sample(replica, name) >= 1


class Blocked:
    """Keeps the channel's event loop from running, as a bug in its code would."""

    def __init__(self, replica: Replica) -> None:
        self._go_on = threading.Event()
        loop = replica.server._channel.loop
        assert loop is not None
        loop.call_soon_threadsafe(self._go_on.wait, WAIT_S)

    def end(self) -> None:
        self._go_on.set()


def test_the_canary_is_notified_over_the_real_channel(start: Callable[..., Replica], api: MemoryApi) -> None:
    replica = start(api, canary=True)
    until(lambda: sample(replica, "gracepoint_canary_seconds_count") >= 2, "two notices")
    assert sample(replica, "gracepoint_canary_failures_total") == 0
    assert probe(replica, "/readyz")[0] == 200
    assert sample(replica, "gracepoint_subscriptions_open") == 0, "it is no pod"
    assert api.of(objects.PREEMPTIONS) == []


def test_nobody_else_can_be_the_canary(start: Callable[..., Replica], api: MemoryApi) -> None:
    replica = start(api, canary=True)
    until(lambda: sample(replica, "gracepoint_canary_seconds_count") >= 1, "a notice")
    with pytest.raises(ConnectionError, match="403"):
        replica.channel("token-0").stream("/v1/subscriptions", health._hello())
    assert replica.refused("unknown_pod") == 1


def test_a_stuck_channel_makes_the_replica_not_ready_then_not_alive(
    start: Callable[..., Replica], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_WITHIN_S", 0.5)
    replica = start(api, canary=True)
    until(lambda: sample(replica, "gracepoint_canary_seconds_count") >= 1, "a notice")
    monkeypatch.setattr(health, "SILENT_S", 1.0)
    monkeypatch.setattr(health, "BLOCKED_S", 2.0)
    blocked = Blocked(replica)
    try:
        until(lambda: probe(replica, "/readyz")[0] == 503, "the replica to be not ready")
        assert "got no notice" in probe(replica, "/readyz")[1]
        until(lambda: probe(replica, "/healthz")[0] == 503, "the replica to be not alive")
        assert "the channel's loop is blocked" in probe(replica, "/healthz")[1]
    finally:
        blocked.end()
    until(lambda: probe(replica, "/healthz")[0] == 200 and probe(replica, "/readyz")[0] == 200, "it to recover")
    assert sample(replica, "gracepoint_canary_failures_total") >= 1


def test_a_certificate_that_pods_do_not_trust_is_noticed(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_NOTICES_A_STREAM", 1)
    replica = start(api, canary=True, server_name="another.name")
    until(lambda: sample(replica, "gracepoint_canary_failures_total") >= 1, "the canary to fail")
    assert probe(replica, "/readyz")[0] == 503


def test_the_lag_of_both_loops_is_measured(start: Callable[..., Replica], api: MemoryApi) -> None:
    replica = start(api)
    for loop in ("controller", "channel"):
        name = f'gracepoint_loop_lag_seconds_count{{loop="{loop}"}}'
        until(functools.partial(is_counted, replica, name), f"the lag of the loop of the {loop}")
    assert sample(replica, 'gracepoint_sweep_seconds_count{extent="all"}') == 1


def test_streams_end_before_the_cluster_is_no_longer_watched(start: Callable[..., Replica], api: MemoryApi) -> None:
    replica = start(api, canary=True)
    stream = replica.stream()
    stream.next()
    replica.server.send_on()
    with pytest.raises(EOFError):
        stream.notice()
    stream.close()
    replica.taint()
    until(lambda: api.of(objects.PREEMPTIONS), "a decision, as the rest of the replica still works")
    assert probe(replica, "/healthz")[0] == 200
