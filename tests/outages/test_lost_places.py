"""Watches that lose their place, or that die in silence: what happened meanwhile is known soon, deletions too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gracepoint_operator import watches
from tests.outages.fault_proxy import FaultProxy, How
from tests.outages.kinds import node
from tests.outages.replica import replica
from tests.testcluster.api_server import ApiServer


def test_what_was_deleted_while_a_watch_had_lost_its_place_is_forgotten(
    api_server: ApiServer, proxy: FaultProxy, kubeconfig: Path
) -> None:
    api_server.create(node("stays"), node("goes"))
    with replica(kubeconfig) as running:
        running.knows_nodes("goes", "stays")
        with proxy.fault(How.GONE_EVENT, "/api/v1/nodes"):
            api_server.kubectl("delete", "node", "goes")
            time.sleep(1)
        running.knows_nodes("stays")


def test_a_watch_that_dies_in_silence_is_begun_again(
    api_server: ApiServer, proxy: FaultProxy, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = watches.settings()
    assert settings.watching.inactivity_timeout <= 30
    assert settings.watching.server_timeout is not None
    assert settings.watching.server_timeout < settings.watching.inactivity_timeout, "else idle watches seem dead"
    monkeypatch.setattr(watches, "_INACTIVE_S", 6.0)
    monkeypatch.setattr(watches, "_WATCH_S", 5)
    api_server.create(node("stays"), node("goes"))
    with replica(kubeconfig) as running:
        running.knows_nodes("goes", "stays")
        with proxy.fault(How.HANG, "watch=true"):
            api_server.kubectl("delete", "node", "goes")
            api_server.create(node("comes"))
            time.sleep(1)
        # The connections stay open, and nothing comes on them any more.
        running.knows_nodes("comes", "stays")
