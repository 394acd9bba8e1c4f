"""Many requests at a real API server: a namespace has so many at most, and those that are over take no memory."""

from __future__ import annotations

import asyncio
from typing import cast

from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.webhooks import Admission
from tests.api_server.gang import Gang, Replica, running, until

_MANY = 600


def request(number: int) -> JsonObject:
    return {
        "apiVersion": objects.REQUESTS.api_version,
        "kind": "PreemptionRequest",
        "metadata": {"name": f"r-{number}"},
        "spec": {"jobSet": {"name": "nobody"}, "deadlineSeconds": 60},
    }


async def create(gang: Gang, numbers: range) -> None:
    bodies = [gang.api.create(objects.REQUESTS, gang.name, request(number)) for number in numbers]
    await asyncio.gather(*bodies)


def admission(replica: Replica, limit: int) -> Admission:
    core = replica.core
    return Admission(replica.api, core.cache, core.evictions, cast(Certificates, None), "https://o:443", limit)


async def test_the_request_beyond_the_limit_is_refused_with_the_numbers(gang: Gang) -> None:
    await gang.make()
    async with running(gang) as replica:
        asked = admission(replica, 55)
        assert await asked.why_requests_are_too_many(gang.name) is None
        await create(gang, range(54))
        assert await gang.api.count(objects.REQUESTS, gang.name) == 54
        assert await asked.why_requests_are_too_many(gang.name) is None
        await create(gang, range(54, 55))
        why = await asked.why_requests_are_too_many(gang.name)
        assert why is not None
        assert f"found 55 PreemptionRequests in the namespace {gang.name}, expected fewer than 55" in why
        assert f"kubectl delete preemptionrequests -n {gang.name} -l gracepoint.dev/ended-at" in why
        gang.server.kubectl(*("delete", "preemptionrequests", "-n", gang.name, "-l", "gracepoint.dev/ended-at"))
        assert await gang.api.count(objects.REQUESTS, gang.name) == 55, "none of them is over"
        together = await asyncio.gather(*(asked.why_requests_are_too_many(gang.name) for _ in range(5)))
        assert None not in together
        gang.server.kubectl("delete", "preemptionrequests", "--all", "-n", gang.name)


async def test_many_requests_at_once_share_a_count_and_do_not_pass_the_limit(gang: Gang) -> None:
    await gang.make()
    async with running(gang) as replica:
        asked = admission(replica, 3)
        together = await asyncio.gather(*(asked.why_requests_are_too_many(gang.name) for _ in range(20)))
        assert sum(why is None for why in together) == 3


async def test_requests_that_are_over_are_not_held_and_are_deleted_in_time(gang: Gang) -> None:
    await gang.make()
    await create(gang, range(_MANY))
    for number in range(_MANY):
        await gang.api.merge_status(objects.REQUESTS, gang.name, f"r-{number}", {"status": {"phase": "Superseded"}})
    async with running(gang) as replica:
        preemptions = replica.core.cache.preemptions
        held = [item for item in preemptions.requests.values() if item.namespace == gang.name]
        assert len(held) == _MANY, "their labels are still to be written"

        async def labelled() -> bool:
            await replica.core._garbage_collector.retire_requests()
            listed = await gang.api.list(
                objects.REQUESTS, label_selector="!gracepoint.dev/ended-at", namespace=gang.name
            )
            return not listed.items

        await until(labelled, "all to have the label")
    async with running(gang, "replica-b") as replica:
        cache = replica.core.cache
        assert gang.name not in {item.namespace for item in cache.preemptions.requests.values()}
        assert not cache.uids(objects.REQUESTS) & {item.uid for item in held}, "nothing is kept for them"
        collector = replica.core._garbage_collector
        await collector.prune_requests()
        assert await gang.api.count(objects.REQUESTS, gang.name) == _MANY, "not before their time"
        collector._limits = type(collector._limits)(request_ttl_s=-1.0)

        async def gone() -> bool:
            await collector.prune_requests()
            return await gang.api.count(objects.REQUESTS, gang.name) == 0

        await until(gone, "all to be deleted")


async def test_a_count_that_fails_is_an_error_and_no_zero(gang: Gang) -> None:
    async with running(gang) as replica:

        async def unavailable(kind: objects.Kind, namespace: str) -> int:
            raise client.Unavailable("HTTP 503")

        asked = admission(replica, 3)
        asked._api.count = unavailable  # type: ignore[method-assign]
        try:
            await asked.why_requests_are_too_many(gang.name)
        except client.Unavailable:
            return
        raise AssertionError("expected the error of the API server")
