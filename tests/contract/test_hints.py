"""A hint from the operator's own server to the library's own subscription."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from gracepoint.receivers import Hints, OperatorConnection, OperatorSubscriber
from gracepoint_operator.kube import objects as kinds
from tests.contract.fakes.replicas import WAIT_S, Replica
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.replica import subscription
from tests.unit.receivers.fakes.heard import Heard
from tests.waiting import until


def test_a_cordoned_node_makes_a_gang_prepare_and_nothing_else(
    start: Callable[..., Replica], api: MemoryApi, tmp_path: Path
) -> None:
    replica = start(api)
    token = tmp_path / "projected-token"
    token.write_text("token-0")
    heard, hints = Heard(), Hints(time.monotonic)
    who = dataclasses.replace(subscription(0), takes_hints=True)
    channel = OperatorConnection(f"https://localhost:{replica.server.https_port}", replica.ca, str(token))
    subscriber = OperatorSubscriber(channel, who, heard, lambda receipt: None, hints)
    try:
        assert subscriber.wait_until_connected(WAIT_S)
        until(lambda: len(replica.core.subscribers) == 1, "the subscription")
        body = replica.api.add(kinds.NODES, objects.node("node-1", unschedulable=True))
        replica.core.feed(kinds.NODES, "MODIFIED", body)
        until(hints.due, "the hint")
    finally:
        subscriber.close()
    assert heard.posts == []
    assert replica.api.of(kinds.PREEMPTIONS) == []
