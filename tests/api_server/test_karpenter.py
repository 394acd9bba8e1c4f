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
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.fields import parse_time
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.server import Admission
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.watches.threads import Watches
from gracepoint_operator.webhooks import add_routes
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, path_of
from tests.api_server.gang import Replica, running, until
from tests.api_server.karpenter import POOLS, TERMINATION, KarpenterGang, karpenter
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
    made.grace = getattr(request, "param", made.grace)
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
        admission = Admission(gang.api, replica.core, Certificates(folder), "https://127.0.0.1:443")
        add_routes(app, admission, _TOKEN, lambda reason: None)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}{path_of(PATH_EVICTIONS, _TOKEN)}"
        await gang.api.create(kinds.VALIDATING_WEBHOOKS, None, _configuration(url, authority.cert_pem.bytes()))
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


async def test_drain_waits_for_the_save_and_then_goes_on(gang: KarpenterGang, tmp_path: Path) -> None:
    async with watching(gang, tmp_path) as replica:
        claim = await gang.api.get(kinds.NODE_CLAIMS, None, gang.claim(0))
        await gang.api.delete(kinds.NODE_CLAIMS, claim)

        async def attempted() -> bool:
            return any("evictionAttemptedAt" in body["spec"] for body in await gang.records())

        await until(attempted, "Karpenter's first attempt to evict the pod")
        (record,) = await gang.records()
        assert record["spec"]["cause"] == "ScaleDown", record["spec"]
        assert record["spec"]["nodes"] == [gang.node(0)]
        told = (await gang.api.get(kinds.NODE_CLAIMS, None, gang.claim(0)))["metadata"]["annotations"][TERMINATION]
        deadline_at, told_at = parse_time(record["spec"]["deadline"]), parse_time(told)
        assert deadline_at is not None
        assert told_at is not None
        assert deadline_at <= told_at + 1, "the bound of the hold is nearer than the end of the NodeClaim"
        await asyncio.sleep(5)  # Karpenter tries again meanwhile
        pod = await gang.api.get(kinds.PODS, gang.name, gang.pod(0))
        assert "deletionTimestamp" not in pod["metadata"], "the eviction waits"
        await replica.report(Phase.COMMITTED, record["metadata"]["name"])

        async def evicted() -> bool:
            found = await gang.api.get(kinds.PODS, gang.name, gang.pod(0))
            return "deletionTimestamp" in found["metadata"]

        await until(evicted, "the eviction after the commit", within_s=60)


@pytest.mark.parametrize("gang", [pytest.param(None, id="no terminationGracePeriod")], indirect=True)
async def test_drifted_node_stays_while_its_pods_are_protected(gang: KarpenterGang, tmp_path: Path) -> None:
    young = {"voluntaryDisruption": {"checkpointYoungerThanSeconds": 3600}}
    await gang.api.merge(kinds.POLICIES, gang.name, "careful", {"spec": young})
    async with watching(gang, tmp_path) as replica:
        known = replica.core.cache.objects.pod_named(gang.name, gang.pod(0))
        assert known is not None
        replica.core._policy_writer.goodput.hear(known, "s-0", Spent(now_s=2.0, joined_s=1.0))

        async def protected() -> bool:
            pods = [await gang.api.get(kinds.PODS, gang.name, gang.pod(index)) for index in (0, 1)]
            return all("karpenter.sh/do-not-disrupt" in (pod["metadata"].get("annotations") or {}) for pod in pods)

        await until(protected, "the pods to be protected")
        labels = {"template": {"metadata": {"labels": {"purpose": "something-else"}}}}
        pool = (await gang.api.list(POOLS)).items[0]["metadata"]["name"]
        await gang.api.merge(POOLS, None, pool, {"spec": labels})

        async def drifted() -> bool:
            found = (await gang.api.get(kinds.NODE_CLAIMS, None, gang.claim(0)))["status"]["conditions"]
            return any(item["type"] == "Drifted" and item["status"] == "True" for item in found)

        await until(drifted, "Karpenter to find that the nodes have drifted", within_s=90)
        await asyncio.sleep(15)  # it looks for nodes to disrupt every ten seconds
        assert not await gang.disrupted(0)
        assert not await gang.disrupted(1)
        replica.core._policy_writer.goodput.hear(known, "s-0", Spent(now_s=9.0, joined_s=1.0, restored_s=9.0))

        async def taken() -> bool:
            for claim in (await gang.api.list(kinds.NODE_CLAIMS)).items:
                if claim["metadata"]["name"] not in (gang.claim(0), gang.claim(1)):
                    with contextlib.suppress(client.NotFound):
                        await gang.becomes_ready(claim["metadata"]["name"])  # what takes their place
            return await gang.disrupted(0) or await gang.disrupted(1)

        await until(taken, "Karpenter to disrupt a node whose pods have a young checkpoint", within_s=90)
