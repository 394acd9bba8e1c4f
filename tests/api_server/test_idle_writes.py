"""What two replicas write into a real API server for a job that only trains."""

from __future__ import annotations

import asyncio
import itertools
import time

from gracepoint.wire.messages import Forecast, Spent
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.recording.connection_writer import EVERY_S
from gracepoint_operator.recording.replica_lease import LABEL
from tests.api_server.gang import Gang, Replica, running, until

_BEGUN = time.time()


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.at = _BEGUN

    def __call__(self) -> float:
        return self.at


async def test_a_job_that_only_trains_leaves_its_policy_alone(gang: Gang) -> None:
    await gang.make()
    clock = Clock()
    async with running(gang, "replica-a", clock=clock) as first, running(gang, "replica-b", clock=clock) as second:
        await first.connect(0)
        await second.connect(1)
        saves = itertools.count(1)

        async def connected() -> bool:
            await _go_on(gang, clock, next(saves), first, second)
            return await _is_true(gang, "Connected")

        await until(connected, "all pods to be connected")
        for _ in range(5):  # what is written of the first saves
            await _go_on(gang, clock, next(saves), first, second)
        versions = [await _version(gang)]
        for _ in range(16):
            await _go_on(gang, clock, next(saves), first, second)
            versions.append(await _version(gang))
        assert len(set(versions)) == 1, "in 8 minutes, with 16 saves: longer than it waits with figures that have moved"
        leases = await gang.api.list(objects.LEASES, label_selector=LABEL, namespace="default")
        holders = {item["spec"]["holderIdentity"] for item in leases.items}
        assert holders == {"replica-a", "replica-b"}
    left = await gang.api.list(objects.LEASES, label_selector=LABEL, namespace="default")
    assert left.items == []


async def _go_on(gang: Gang, clock: Clock, saves: int, first: Replica, second: Replica) -> None:
    """The gang saves once, and the replicas look once."""
    clock.at += EVERY_S
    pod = first.core.cache.objects.pod_named(gang.name, gang.pod(0))
    assert pod is not None
    now_s = clock.at - _BEGUN + 100
    said = Forecast(
        pod_uid=pod.uid,
        session="s-0",
        workload_uid=gang.workload_uid,
        state_bytes=1 << 30,
        step_s=0.01,
        drain_s=0.01,
        save_s=0.1 + saves % 3 / 100,
        margin=1.25,
        spent=Spent(
            now_s=now_s,
            joined_s=5.0,
            restored_s=10.0,
            trained_s=20.0,
            first_step=0,
            saving_s=saves * 0.1,
            saves=saves,
            saves_s=saves * 0.1,
            saved_s=now_s - 1,
            passed={str(saves * 100): now_s - 25},
        ),
    )
    await first.core.reports.take(pod, said)
    for replica in (first, second):
        await replica.core.connection_writer.look()
        await replica.watch()
    await asyncio.sleep(0.1)  # what is to be written soon is written


async def _policy(gang: Gang) -> JsonObject:
    return await gang.api.get(objects.POLICIES, gang.name, "careful")


async def _version(gang: Gang) -> str:
    return str((await _policy(gang))["metadata"]["resourceVersion"])


async def _is_true(gang: Gang, kind: str) -> bool:
    return (await gang.policy_condition(kind)).get("status") == "True"
