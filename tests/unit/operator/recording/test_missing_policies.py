"""Policies that are gone while jobs use them: said on the jobs, in the log and in a metric."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from gracepoint.wire.frames import Notice
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.workloads import CREATED_WITH, JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import Replica, frames, kept_of, running, until, writes_under_way

KEY = (objects.NAMESPACE, "careful")


def prepared() -> objects.Body:
    body = objects.jobset()
    body["metadata"]["annotations"] = {CREATED_WITH: json.dumps(objects.policy()["spec"])}
    return body


def without_policy(replica: Replica) -> float | None:
    return replica.metrics.registry.get_sample_value("gracepoint_workloads_without_policy")


async def dropped(replica: Replica) -> None:
    replica.drop(kinds.POLICIES, objects.policy())
    await until(lambda: not list(replica.core.cache.policies), "the deletion to be seen")


async def looked(*replicas: Replica) -> None:
    for replica in replicas:
        await replica.core.missing_policies.look()


async def test_a_deleted_policy_is_said_on_its_jobs_once_and_they_stay_protected(
    api: MemoryApi, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    api.add(JOBSETS, prepared())
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        subscriber = first.subscribe(0)
        await looked(first, second)
        await dropped(first)
        second.core.feed(kinds.POLICIES, "DELETED", objects.policy())
        await until(lambda: not list(second.core.cache.policies), "the deletion to be seen")
        await looked(first, second)
        assert first.reasons == [], "it may be replaced"
        for _ in range(3):
            await looked(first, second)
        assert first.reasons == ["PolicyMissing"], "once, though both replicas see it"
        (event,) = api.of(kinds.EVENTS)
        assert event["type"] == "Warning"
        assert "The settings that it was created with still apply" in event["note"]
        assert [without_policy(first), without_policy(second)] == [1, 1]
        first.taint()
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
    said = [record for record in caplog.records if record.message == "a workload names a policy that does not exist"]
    assert len(said) == 2, "once by each replica"


async def test_a_policy_that_comes_back_is_said_too(api: MemoryApi, clock: Clock) -> None:
    api.add(JOBSETS, prepared())
    async with running(api, clock) as replica:
        await looked(replica)
        for life in (1, 2):
            await dropped(replica)
            await looked(replica)
            await looked(replica)
            again = objects.policy()
            replica.see(kinds.POLICIES, again | {"metadata": {**again["metadata"], "uid": f"uid-{life}"}})
            await until(lambda: list(replica.core.cache.policies), "the policy to be seen")
            await looked(replica)
            assert without_policy(replica) == 0
            replica.core.cache.drop(f"uid-{life}")
            replica.see(kinds.POLICIES, again)
            await until(lambda: list(replica.core.cache.policies), "the policy to be seen")
        assert replica.reasons[:2] == ["PolicyMissing", "PolicyFound"]


async def _deleted_and_made_again(replica: Replica) -> None:
    await dropped(replica)
    await looked(replica)
    replica.see(kinds.POLICIES, objects.policy())
    await until(lambda: list(replica.core.cache.policies), "the policy to be seen")


async def _finished(replica: Replica) -> None:
    replica.see(JOBSETS, objects.jobset(finished="Completed"))
    await dropped(replica)


async def _deleted_too(replica: Replica) -> None:
    replica.see(JOBSETS, objects.jobset(deleted=True))
    await dropped(replica)


async def _unreadable(replica: Replica) -> None:
    replica.see(kinds.POLICIES, objects.policy() | {"spec": {"checkpoint": {"directory": 7}}})
    await until(replica.core.cache.unreadable_policies, "the policy to be seen as unreadable")


@pytest.mark.parametrize("change", [_deleted_and_made_again, _finished, _deleted_too, _unreadable])
async def test_what_is_no_loss_of_a_policy_is_not_said(
    api: MemoryApi, clock: Clock, change: Callable[[Replica], Awaitable[None]]
) -> None:
    async with running(api, clock) as replica:
        await looked(replica)
        await change(replica)
        await asyncio.sleep(0)
        for _ in range(3):
            await looked(replica)
        assert replica.reasons == []
        assert without_policy(replica) == 0


async def test_a_job_without_its_own_settings_is_shown_as_unprotected(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await dropped(replica)
        await looked(replica)
        await looked(replica)
        (event,) = api.of(kinds.EVENTS)
        assert "no disruption is announced to it" in event["note"]


async def test_nothing_is_kept_of_policies_that_were_deleted_and_nobody_names(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        core = replica.core
        await looked(replica)
        await core.connection_writer.look()
        await until(lambda: "status" in api.of(kinds.POLICIES)[0], "the status to be written")
        assert kept_of(replica, KEY)
        replica.drop(JOBSETS, objects.jobset())
        await dropped(replica)
        await until(lambda: not core.cache.objects.workloads, "the deletion to be seen")
        await looked(replica)
        await core.connection_writer.look()
        assert core.cache.policies.get(("nowhere", "no-such")) is None
        await until(lambda: not writes_under_way("policy"), "the writes")
        assert kept_of(replica, KEY) == []
        assert kept_of(replica, ("nowhere", "no-such")) == [], "pods may name what they like"
