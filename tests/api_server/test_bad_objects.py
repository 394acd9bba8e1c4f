"""One object that cannot be read takes nothing else down, on a real API server."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest

from gracepoint_operator.kube import client, objects
from gracepoint_operator.logs import PlainFormatter
from tests.api_server.gang import Gang, running, told, until

_CRDS = objects.CRDS
DEEP = "[" * 50_000
MAINTENANCE = "node.gke.io/upcoming-maintenance"


async def test_deeply_nested_node_annotation_does_not_block_notices(
    gang: Gang, caplog: pytest.LogCaptureFixture
) -> None:
    await gang.make()
    odd = f"{gang.name}-odd"
    await gang.api.create(objects.NODES, None, {"metadata": {"name": odd, "annotations": {MAINTENANCE: DEEP}}})
    async with running(gang) as replica:
        subscriber = await replica.connect(0)
        await gang.taint(0)
        for _ in range(3):
            await replica.watch()
        assert (await told(subscriber)).preemption == gang.epoch(1)
        assert replica.sample("gracepoint_objects_left_out", kind="nodes", extent="part") == 1
    (said,) = (PlainFormatter().format(record) for record in caplog.records if "left out" in record.message)
    assert odd in said
    assert MAINTENANCE in said


async def test_policy_of_an_older_schema_is_not_ready_alone(gang: Gang) -> None:
    await gang.make()
    plural = "checkpointpolicies.gracepoint.dev"
    strict = json.loads(gang.server.kubectl("get", "crd", plural, "--output=json").stdout)
    lax = copy.deepcopy(strict)
    for version in lax["spec"]["versions"]:
        version["schema"]["openAPIV3Schema"]["properties"]["spec"] = {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
        }
    await gang.api.merge(_CRDS, None, plural, {"spec": lax["spec"]})
    old = gang.policy(deadline={"margin": 0.5}) | {"metadata": {"name": "old"}}

    async def made() -> bool:
        with contextlib.suppress(client.Refused):
            await gang.api.create(objects.POLICIES, gang.name, old)
            return True
        return False

    await until(made, "the API server to take a policy of an older schema")
    await gang.api.merge(_CRDS, None, plural, {"spec": strict["spec"]})
    async with running(gang):

        async def ready(name: str) -> str:
            status = (await gang.api.get(objects.POLICIES, gang.name, name)).get("status", {})
            found = (item for item in status.get("conditions", []) if item["type"] == "Ready")
            return next((f"{item['status']} {item['message']}" for item in found), "")

        async def said() -> bool:
            return (await ready("careful")).startswith("True") and (await ready("old")).startswith("False")

        await until(said, "Ready of both policies")
        assert "spec.deadline.margin" in await ready("old")
    await gang.api.delete(objects.POLICIES, await gang.api.get(objects.POLICIES, gang.name, "old"))
