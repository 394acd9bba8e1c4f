"""Karpenter takes nodes away, by its real controller: its taint and deadline are seen, its evictions wait."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from gracepoint.wire.messages import Phase, Spent
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import parse_time
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.watches import Watches
from gracepoint_operator.webhooks import Admission, add_routes
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, path_of
from tests.api_server.gang import Replica, running, told, until
from tests.api_server.karpenter import TERMINATION, KarpenterGang, karpenter
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer

pytestmark = [pytest.mark.controllers, pytest.mark.timeout(300)]

_TOKEN = "a-secret-of-the-test"
_WEBHOOK = "evictions.gracepoint.dev"


@pytest.fixture(scope="module")
def crowded(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The API server with Karpenter."""
    module = parts.module_folder("karpenter")
    server.define(module / "pkg" / "apis" / "crds", module / "kwok" / "apis" / "crds")
    with karpenter(server, tmp_path_factory.mktemp("karpenter")):
        yield server


@pytest.fixture
async def gang(request: pytest.FixtureRequest, crowded: ApiServer) -> AsyncIterator[KarpenterGang]:
    api = KubeClient.connect(str(crowded.kubeconfig))
    made = KarpenterGang(
        crowded, api, request.node.originalname.removeprefix("test_").replace("_", "-")[:40].strip("-")
    )
    for name, value in getattr(request, "param", {}).items():
        setattr(made, name, value)
    await made.make()
    yield made
    await made.clean()
    api.close()


@contextlib.asynccontextmanager
async def watching(gang: KarpenterGang, folder: Path) -> AsyncIterator[Replica]:
    """A replica with its watches, which the API server asks about evictions."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    certificate.private_key_pem.write_to_path(str(folder / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    async with running(gang) as replica:
        watches = Watches(replica.core, gang.api, Metrics(), replica="replica-a")
        app = web.Application()
        admission = Admission(
            gang.api, replica.core.cache, replica.core.evictions, Certificates(folder), "https://127.0.0.1:443"
        )
        add_routes(app, admission, _TOKEN, lambda reason: None)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}{path_of(PATH_EVICTIONS, _TOKEN)}"
        await gang.api.create(objects.VALIDATING_WEBHOOKS, None, _configuration(url, authority.cert_pem.bytes()))
        watches.start()
        try:
            yield replica
        finally:
            await asyncio.to_thread(gang.server.kubectl, "delete", "validatingwebhookconfiguration", "gracepoint")
            await asyncio.to_thread(watches.close, 5.0)
            await runner.cleanup()


def _configuration(url: str, authority: bytes) -> dict[str, object]:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]}
    webhook = {
        "name": _WEBHOOK,
        "clientConfig": {"url": url, "caBundle": base64.b64encode(authority).decode()},
        "rules": [rule],
        "failurePolicy": "Ignore",
        "sideEffects": "NoneOnDryRun",
        "timeoutSeconds": 2,
        "admissionReviewVersions": ["v1"],
    }
    return {"metadata": {"name": "gracepoint"}, "webhooks": [webhook]}


async def test_drain_waits_for_the_save_and_then_continues(gang: KarpenterGang, tmp_path: Path) -> None:
    async with watching(gang, tmp_path) as replica:
        await gang.delete_claim(gang.claim(0))

        async def attempted() -> bool:
            return any("evictionAttemptedAt" in body["spec"] for body in await gang.records())

        await until(attempted, "Karpenter's first attempt to evict the pod")
        (record,) = await gang.records()
        assert record["spec"]["cause"] == "ScaleDown", record["spec"]
        assert record["spec"]["nodes"] == [gang.node(0)]
        told = (await gang.api.get(objects.NODE_CLAIMS, None, gang.claim(0)))["metadata"]["annotations"][TERMINATION]
        deadline_at, told_at = parse_time(record["spec"]["deadline"]), parse_time(told)
        assert deadline_at is not None
        assert told_at is not None
        assert deadline_at <= told_at + 1, "the bound of the hold is nearer than the end of the NodeClaim"
        await asyncio.sleep(5)  # Karpenter tries again meanwhile
        pod = await gang.api.get(objects.PODS, gang.name, gang.pod(0))
        assert "deletionTimestamp" not in pod["metadata"], "the eviction waits"
        await replica.report(Phase.COMMITTED, record["metadata"]["name"])

        async def evicted() -> bool:
            found = await gang.api.get(objects.PODS, gang.name, gang.pod(0))
            return "deletionTimestamp" in found["metadata"]

        await until(evicted, "the eviction after the commit", within_s=60)


async def test_gang_trains_on_when_a_drifted_nodes_replacement_fails(gang: KarpenterGang, tmp_path: Path) -> None:
    async with watching(gang, tmp_path) as replica:
        processes = [await replica.connect(index) for index in (0, 1)]
        await gang.drift()
        await until(gang.replacements, "Karpenter to make a node in the place of one that has drifted", within_s=90)
        (index,) = [index for index in (0, 1) if await gang.disrupted(index)]
        await until(lambda: all(process.hinted for process in processes), "the hint")
        await gang.drift("training")  # so that Karpenter does not try again
        for claim in await gang.replacements():
            await gang.delete_claim(claim["metadata"]["name"])

        async def taken_back() -> bool:
            return not await gang.disrupted(index)

        await until(taken_back, "Karpenter to take its taint back", within_s=90)
        await until(lambda: not any(process.hinted for process in processes), "the hint to be over")
        assert await gang.records() == [], "nobody has left"
        node = await gang.api.get(objects.NODES, None, gang.node(index))
        assert "deletionTimestamp" not in node["metadata"]


@pytest.mark.parametrize("gang", [pytest.param({"capacity": "spot"}, id="spot")], indirect=True)
async def test_gang_leaves_a_drifted_node_when_its_replacement_is_there(gang: KarpenterGang, tmp_path: Path) -> None:
    async with watching(gang, tmp_path):
        await gang.drift()
        claims = await until(gang.replacements, "Karpenter to make another node", within_s=90)
        (index,) = [index for index in (0, 1) if await gang.disrupted(index)]
        assert await gang.records() == []
        await gang.becomes_ready(claims[0]["metadata"]["name"])
        (record,) = await until(gang.records, "the Preemption")
        assert (record["spec"]["cause"], record["spec"]["nodes"]) == ("ScaleDown", [gang.node(index)])
        assert not record["spec"]["cancelable"]


@pytest.mark.parametrize(
    "gang",
    [pytest.param({"grace": "8h", "capacity": "spot"}, id="spot, terminationGracePeriod of hours")],
    indirect=True,
)
async def test_pods_that_nobody_evicts_are_notified_at_once_of_a_deleted_claim(
    gang: KarpenterGang, tmp_path: Path
) -> None:
    await gang.protect()
    async with watching(gang, tmp_path) as replica:
        processes = [await replica.connect(index) for index in (0, 1)]
        await gang.delete_claim(gang.claim(0))  # as Karpenter does when EC2 takes a Spot machine back
        notices = [await told(process) for process in processes]
        deleted = (await gang.api.get(objects.NODE_CLAIMS, None, gang.claim(0)))["metadata"]
        ends_at = parse_time(deleted["deletionTimestamp"])
        assert ends_at is not None
        deadlines = [parse_time(notice.deadline) for notice in notices]
        assert all(at is not None and at <= ends_at + 130 for at in deadlines), notices

        async def drains() -> bool:
            found = (await gang.api.get(objects.NODE_CLAIMS, None, gang.claim(0)))["metadata"]
            return await gang.disrupted(0) and TERMINATION in found["annotations"]

        await until(drains, "Karpenter to drain the node")

        async def reclaimed() -> list[JsonObject]:  # the watch of Nodes may be faster than that of NodeClaims
            return [body for body in await gang.records() if body["spec"]["cause"] == "SpotTermination"]

        (record,) = await until(reclaimed, "the Preemption with the NodeClaim's cause")
        assert record["spec"]["nodes"] == [gang.node(0)]
        assert "evictionAttemptedAt" not in record["spec"]
        pod = await gang.api.get(objects.PODS, gang.name, gang.pod(0))
        assert "deletionTimestamp" not in pod["metadata"], "Karpenter evicts it in eight hours"


@pytest.mark.parametrize("gang", [pytest.param({"grace": None}, id="no terminationGracePeriod")], indirect=True)
async def test_drifted_node_stays_while_its_pods_are_protected(gang: KarpenterGang, tmp_path: Path) -> None:
    young = {"voluntaryDisruption": {"checkpointYoungerThanSeconds": 3600}}
    await gang.api.merge(objects.POLICIES, gang.name, "careful", {"spec": young})
    async with watching(gang, tmp_path) as replica:
        known = replica.core.cache.objects.pod_named(gang.name, gang.pod(0))
        assert known is not None
        replica.core.writers.policies.goodput.take_times(known, "s-0", Spent(now_s=2.0, joined_s=1.0))

        async def protected() -> bool:
            pods = [await gang.api.get(objects.PODS, gang.name, gang.pod(index)) for index in (0, 1)]
            return all("karpenter.sh/do-not-disrupt" in (pod["metadata"].get("annotations") or {}) for pod in pods)

        await until(protected, "the pods to be protected")
        await gang.drift()

        async def drifted() -> bool:
            found = (await gang.api.get(objects.NODE_CLAIMS, None, gang.claim(0)))["status"]["conditions"]
            return any(item["type"] == "Drifted" and item["status"] == "True" for item in found)

        await until(drifted, "Karpenter to find that the nodes have drifted", within_s=90)
        await asyncio.sleep(15)  # it looks for nodes to disrupt every ten seconds
        assert not await gang.disrupted(0)
        assert not await gang.disrupted(1)
        replica.core.writers.policies.goodput.take_times(known, "s-0", Spent(now_s=9.0, joined_s=1.0, restored_s=9.0))

        async def taken() -> bool:
            for claim in await gang.replacements():
                with contextlib.suppress(client.NotFound):
                    await gang.becomes_ready(claim["metadata"]["name"])
            return await gang.disrupted(0) or await gang.disrupted(1)

        await until(taken, "Karpenter to disrupt a node whose pods have a young checkpoint", within_s=90)
