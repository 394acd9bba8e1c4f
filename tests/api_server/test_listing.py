"""The test cluster's lists show what kubectl shows."""

from __future__ import annotations

import json

import pytest

from tests.api_server.gang import Gang
from tests.testcluster.api import ClusterError
from tests.testcluster.api_server import ApiServer
from tests.testcluster.listing import Listing

RESOURCES = ["jobsets.jobset.x-k8s.io", "jobs.batch", "pods", "checkpointpolicies.gracepoint.dev"]


async def test_a_list_has_the_objects_that_kubectl_shows(gang: Gang) -> None:
    await gang.make()
    query = ("get", ",".join(RESOURCES), f"--namespace={gang.name}", "--show-managed-fields", "--output=json")
    shown = gang.server.kubectl(*query).stdout
    found = Listing(gang.server.kubeconfig).of(RESOURCES, gang.name)
    assert found == json.loads(shown)["items"]
    assert [item["kind"] for item in found] == ["JobSet", "Job", "Pod", "Pod", "CheckpointPolicy"]


def test_a_list_of_nothing_that_exists_is_an_error_with_the_reason(server: ApiServer) -> None:
    listing = Listing(server.kubeconfig)
    with pytest.raises(ClusterError, match=r"/apis/nowhere.dev: 404"):
        listing.of(["pods", "things.nowhere.dev"], "default")
    assert listing.of(["pods"], "default") == []
