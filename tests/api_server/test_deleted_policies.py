"""A policy that is deleted while a job uses it, with the webhooks behind a real API server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import trustme
from aiohttp import web

from gracepoint.wire.messages import Phase
from gracepoint_operator.kube import objects
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.webhooks import Admission, add_routes
from gracepoint_operator.webhooks.routes import PATH_JOBSETS, PATH_POLICIES, path_of
from gracepoint_operator.workloads import CREATED_WITH, JOBSETS
from tests.api_server.gang import Body, Gang, Replica, running, told, until

_TOKEN = "told-to-the-api-server-alone"


@contextlib.asynccontextmanager
async def _with_webhooks(gang: Gang, replica: Replica, folder: Path) -> AsyncIterator[None]:
    """The API server asks the replica about new JobSets and about policies that are to be deleted."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate.configure_cert(context)
    certificate.private_key_pem.write_to_path(str(folder / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    app = web.Application()
    admission = Admission(
        gang.api, replica.core.cache, replica.core.evictions, Certificates(folder), "https://127.0.0.1:443"
    )
    add_routes(app, admission, _TOKEN, lambda reason: None)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    bundle = base64.b64encode(authority.cert_pem.bytes()).decode()

    def configuration(webhook: str, group: str, resource: str, operation: str) -> Body:
        rule = {"apiGroups": [group], "apiVersions": ["*"], "operations": [operation], "resources": [resource]}
        made: Body = {
            "name": f"{resource}.gracepoint.dev",
            "clientConfig": {"url": f"{url}{path_of(webhook, _TOKEN)}", "caBundle": bundle},
            "rules": [rule],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": gang.name}},
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        return {"metadata": {"name": gang.name}, "webhooks": [made]}

    jobsets = configuration(PATH_JOBSETS, "jobset.x-k8s.io", "jobsets", "CREATE")
    policies = configuration(PATH_POLICIES, "gracepoint.dev", "checkpointpolicies", "DELETE")
    await gang.api.create(objects.MUTATING_WEBHOOKS, None, jobsets)
    await gang.api.create(objects.VALIDATING_WEBHOOKS, None, policies)
    try:
        yield
    finally:
        for plural in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            await asyncio.to_thread(gang.server.kubectl, "delete", plural, gang.name)
        await runner.cleanup()


async def test_jobs_keep_their_protection_when_their_policy_is_deleted(gang: Gang, tmp_path: Path) -> None:
    async with running(gang) as replica, _with_webhooks(gang, replica, tmp_path):
        await gang.make_namespace()
        await until(lambda: _is_asked(gang), "the API server to ask the webhook about new JobSets")
        await gang.make()
        assert CREATED_WITH in (await gang.api.get(JOBSETS, gang.name, "train"))["metadata"]["annotations"]
        await replica.watch()
        deleted = await asyncio.to_thread(
            gang.server.kubectl, "delete", "checkpointpolicy", "careful", f"--namespace={gang.name}"
        )
        assert "Warning: CheckpointPolicy careful is used by JobSet train. They keep the settings" in deleted.stderr
        await replica.watch()
        assert (gang.name, "careful") not in replica.core.cache.policies, "other tests have policies of their own"
        for _ in range(2):
            await replica.core.missing_policies.look()
        assert replica.sample("gracepoint_workloads_without_policy") >= 1
        events = (await gang.api.list(objects.EVENTS, namespace=gang.name)).items
        assert [event["reason"] for event in events] == ["PolicyMissing"]

        subscriber = await replica.connect(0)
        await gang.taint(0)
        await replica.watch()
        notice = await told(subscriber)
        await replica.report(Phase.COMMITTED, notice.preemption)

        async def recorded() -> bool:
            return any((body.get("status") or {}).get("phase") == "Committed" for body in await gang.records())

        await until(recorded, "the record of the commit")
        (record,) = await gang.records()
        assert record["spec"]["policy"]["name"] == "careful"


async def _is_asked(gang: Gang) -> bool:
    """Webhooks take effect some time after they are configured: then a JobSet without a policy is refused."""
    labels = {"gracepoint.dev/policy": "not-there"}
    body = {"apiVersion": JOBSETS.api_version, "kind": "JobSet", "metadata": {"name": "trial", "labels": labels}}
    argv = ("create", "--dry-run=server", f"--namespace={gang.name}", "--filename=-")
    answer = await asyncio.to_thread(gang.server.kubectl, *argv, stdin=json.dumps({**body, "spec": {}}), check=False)
    return "expected the name of a CheckpointPolicy" in answer.stderr
