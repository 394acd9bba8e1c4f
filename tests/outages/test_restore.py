"""After etcd was restored from a backup, what the API server says now counts, though every version is lower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kubernetes.client
import pytest

from tests.outages.api_server import ApiServer, node
from tests.outages.replica import replica


@pytest.fixture
def own(tmp_path: Path, api_server: ApiServer) -> Iterator[ApiServer]:
    """An API server that nobody else uses."""
    server = ApiServer(tmp_path)
    try:
        server.start()
        server.install_kinds()
        yield server
    finally:
        server.stop()


def test_a_replica_follows_an_api_server_that_went_back_to_an_older_state(own: ApiServer) -> None:
    own.create(node("old"), node("seen"))
    own.stop()
    own.save("backup")
    own.start()
    with replica(own.kubeconfig(own.url)) as running:
        running.knows_nodes("old", "seen")
        own.create(node("lost"))
        with own.client() as connection:
            core = kubernetes.client.CoreV1Api(connection)
            for count in range(500):  # far ahead of the backup, and of what starting anew adds to it
                core.patch_node("seen", {"metadata": {"labels": {"count": str(count)}}})
        running.knows_nodes("lost", "old", "seen")
        own.stop()
        own.restore("backup")
        own.start()
        running.knows_nodes("old", "seen")
        own.kubectl("taint", "node", "seen", "cloud.google.com/impending-node-termination=:NoSchedule")
        running.until(lambda: running.core.cache.disrupted_nodes == {"seen"}, "the taint of after the restore")
        own.create(node("new"))
        running.knows_nodes("new", "old", "seen")
