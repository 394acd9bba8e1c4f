"""The webhooks' port as the API server and as everybody else meets it, over real TLS."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gracepoint_operator.kube import kinds
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, path_of
from tests.contract.fakes.evictions import evict
from tests.contract.fakes.replicas import WEBHOOK_TOKEN, Replica, until
from tests.unit.operator.fakes.api import MemoryApi


@pytest.fixture
def replica(start: Callable[..., Replica], api: MemoryApi) -> Replica:
    return start(api)


def test_an_eviction_that_anybody_tells_of_changes_nothing_and_is_counted(replica: Replica) -> None:
    secret = path_of(PATH_EVICTIONS, WEBHOOK_TOKEN)
    for path, port in (
        (PATH_EVICTIONS, replica.server.webhook_port),
        (PATH_EVICTIONS, replica.server.https_port),
        (secret, replica.server.https_port),
    ):
        assert evict(replica, path, port=port)[0] == 404
    assert not replica.core.cache.preemptions.epochs
    assert 'gracepoint_webhook_requests_refused_total{reason="unknown_path"} 1.0' in replica.metrics()


def test_eviction_from_the_api_server_is_held_and_notified(replica: Replica) -> None:
    status, said = evict(replica, path_of(PATH_EVICTIONS, WEBHOOK_TOKEN), port=replica.server.webhook_port)
    assert (status, json.loads(said)["response"]["status"]["code"]) == (200, 429)
    until(lambda: replica.api.of(kinds.PREEMPTIONS), "the Preemption")
