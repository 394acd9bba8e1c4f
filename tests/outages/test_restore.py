"""After etcd was restored from a backup, what the API server says now counts, though every version is lower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kubernetes.client
import kubernetes.config
import pytest

from tests.outages import kinds
from tests.outages.kinds import node
from tests.outages.replica import replica
from tests.testcluster.api_server import ApiServer, open_api_server


@pytest.fixture
def own(tmp_path: Path, api_server: ApiServer) -> Iterator[ApiServer]:
    """An API server that nobody else uses."""
    with open_api_server(tmp_path) as server:
        kinds.install(server)
        yield server


# kopf's loop ends with the test. A TLS connection to the server that was killed may still wait for the other side to
# say that it closes, for half a minute, and is then left to the collector, which says so.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_replica_follows_an_api_server_restored_to_an_older_state(own: ApiServer) -> None:
    own.create(node("old"), node("seen"))
    own.save("backup")
    with replica(own.kubeconfig) as running:
        running.knows_nodes("old", "seen")
        own.create(node("lost"))
        with kubernetes.config.new_client_from_config(str(own.kubeconfig)) as connection:
            core = kubernetes.client.CoreV1Api(connection)
            for count in range(500):  # far ahead of the backup, and of what starting anew adds to it
                core.patch_node("seen", {"metadata": {"labels": {"count": str(count)}}})
        running.knows_nodes("lost", "old", "seen")
        own.stop()
        own.restore("backup")
        own.start()
        running.knows_nodes("old", "seen")
        own.kubectl("taint", "node", "seen", "cloud.google.com/impending-node-termination=:NoSchedule")
        running.until(lambda: running.core.cache.objects.disrupted_nodes == {"seen"}, "the taint of after the restore")
        own.create(node("new"))
        running.knows_nodes("new", "old", "seen")
        # Beginning anew is what it is to do then: nothing of it counts as an error, or is logged as one.
        restarts = [
            sample
            for family in running.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "gracepoint_watch_restarts_total"
        ]
        assert restarts, "expected a count of each thread that watches"
        assert {sample.labels["thread"]: sample.value for sample in restarts if sample.value} == {}
