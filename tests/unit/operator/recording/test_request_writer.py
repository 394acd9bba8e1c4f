"""What becomes of a request while one of two replicas has an older view."""

from __future__ import annotations

import pytest

from gracepoint.wire.frames import Frame, Notice
from gracepoint_operator.channel.notifier import Subscriber
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import Replica, frames, running, until

PODS = [objects.pod(0), objects.pod(1)]


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    """A gang whose pods only come."""
    made = MemoryApi(clock)
    for kind, body in (
        (kinds.NAMESPACES, objects.namespace()),
        (kinds.POLICIES, objects.policy()),
        (JOBSETS, objects.jobset()),
        (kinds.JOBS, objects.job()),
        (kinds.NODES, objects.node("node-1")),
        (kinds.NODES, objects.node("node-2")),
    ):
        made.add(kind, body)
    return made


def begins(replica: Replica, request: JsonObject) -> None:
    replica.core.feed(kinds.REQUESTS, "ADDED", request)


def answer(replica: Replica) -> tuple[str, str]:
    """Phase of the request, and the Preemption that it names."""
    status = replica.named("leave").get("status", {})
    return status.get("phase", ""), status.get("preemption", "")


async def settled(replicas: tuple[Replica, ...], subscriber: Subscriber) -> list[Frame]:
    """Their watches bring every Preemption until nothing is written any more. Returns what the subscriber is told."""
    told, version = list[Frame](), ""
    while version != (version := max(body["metadata"]["resourceVersion"] for body in replicas[0].records_and_requests)):
        for replica in replicas:
            replica.watches_bring(*replica.records_and_requests)
        told += await frames(subscriber)
    return told


@pytest.mark.parametrize("behind_first", [False, True], ids=["who sees the pods", "who does not see them"])
async def test_a_replica_that_sees_no_pods_leaves_an_adopted_request(
    api: MemoryApi, clock: Clock, behind_first: bool
) -> None:
    async with running(api, clock, "replica-a") as ahead, running(api, clock, "replica-b") as behind:
        for body in PODS:
            ahead.see(kinds.PODS, body)
        await until(lambda: len(ahead.core.cache.objects.pods) == len(PODS), "the pods")
        subscriber = ahead.subscribe(0)
        request = api.add(kinds.REQUESTS, objects.request())
        if behind_first:
            begins(behind, request)
            await until(lambda: answer(behind)[0] == "Superseded", "the answer of who sees no pods")
        begins(ahead, request)
        told = await frames(subscriber)
        if not behind_first:
            await ahead.phase_of("leave", "Adopted", seen=True)
            begins(behind, request)
            told += await frames(subscriber)  # it has decided before its watch brings more
        told += await settled((ahead, behind), subscriber)
        for body in PODS:
            behind.core.feed(kinds.PODS, "ADDED", body)
        told += await settled((ahead, behind), subscriber)
        (record,) = ahead.preemptions
        assert answer(ahead) == ("Adopted", record["metadata"]["name"])
        assert record["status"]["phase"] == "Noticed"
        assert [type(frame) for frame in told] == [Notice], "nothing is taken back"
