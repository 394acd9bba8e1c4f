"""What a gang shows that trains while its saves or deletions fail: conditions, Events and metrics."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint.wire.messages import Resumption, Trouble, TroubleKind
from gracepoint_operator.kube import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, Clock
from tests.unit.operator.fakes.replica import Replica, running, until

SAVES = Trouble(
    pod_uid="uid-pod-0-0",
    session="s-0",
    workload_uid=JOBSET_UID,
    kind=TroubleKind.SAVES,
    over=False,
    for_s=60.0,
    times=2,
    left_s=840.0,
    message="2 periodic saves in a row failed: No space left on device",
)
DELETIONS = dataclasses.replace(
    SAVES, kind=TroubleKind.DELETIONS, left_s=None, message="/ckpt/3: Permission denied (owner 0)"
)
KINDS = pytest.mark.parametrize(
    ("trouble", "condition", "events"),
    [
        pytest.param(SAVES, "Saving", ["SavesFail", "SavesSucceed"], id="saves"),
        pytest.param(DELETIONS, "CleanedUp", ["DeletionsFail", "DeletionsSucceed"], id="deletions"),
    ],
)


def _condition(api: MemoryApi, kind: str) -> tuple[str, str]:
    (body,) = api.of(objects.POLICIES)
    found = [item for item in body.get("status", {}).get("conditions", []) if item["type"] == kind]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")


def metrics(replica: Replica, trouble: Trouble) -> tuple[float | None, float | None]:
    get, labels = replica.metrics.registry.get_sample_value, {"kind": trouble.kind}
    return get("gracepoint_troubles_total", labels), get("gracepoint_troubled_workloads", labels)


async def take(replica: Replica, message: Trouble | Resumption) -> None:
    await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], message)


@KINDS
async def test_trouble_shows_on_policy_and_workload_until_it_is_over(
    api: MemoryApi, clock: Clock, trouble: Trouble, condition: str, events: list[str]
) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        assert metrics(replica, trouble)[0] == 0, "else increase() would not see the first"
        await take(replica, trouble)
        await until(lambda: _condition(api, condition)[0] == "False", "the condition")
        assert trouble.message in _condition(api, condition)[1]
        assert ("another 840 s" in _condition(api, condition)[1]) is (trouble is SAVES)
        await until(lambda: replica.reasons == events[:1], "the Event")
        await take(replica, dataclasses.replace(trouble, times=3, message="still"))
        await until(lambda: "still" in _condition(api, condition)[1], "the newer message")
        assert metrics(replica, trouble) == (1, 1)
        clock.move(10)
        await take(replica, dataclasses.replace(trouble, over=True))
        await until(lambda: _condition(api, condition)[0] == "True", "the condition's end")
        await until(lambda: replica.reasons == events, "the Event of the end")
        assert metrics(replica, trouble) == (1, 0)


async def test_a_gang_that_starts_again_has_no_trouble_until_it_says_so(api: MemoryApi, clock: Clock) -> None:
    resumed = Resumption(
        pod_uid="uid-pod-0-0",
        session="s-1",
        workload_uid=JOBSET_UID,
        restart_attempt=1,
        restored_step=40,
        training=False,
        age_s=0.0,
    )
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, SAVES)
        await until(lambda: _condition(api, "Saving")[0] == "False", "the condition")
    async with running(api, clock) as replica:  # another one, which was told nothing
        replica.subscribe(0)
        await take(replica, resumed)
        await until(lambda: _condition(api, "Saving")[0] == "True", "the condition's end")


async def test_the_end_that_was_reported_to_another_replica_counts(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "a") as first, running(api, clock, "b") as second:
        for replica in (first, second):
            replica.subscribe(0)
        await take(first, SAVES)
        await until(lambda: _condition(api, "Saving")[0] == "False", "the condition")
        clock.move(60)
        await take(second, dataclasses.replace(SAVES, over=True))
        await until(lambda: _condition(api, "Saving")[0] == "True", "the condition's end")
        first.core.feed(objects.POLICIES, "MODIFIED", api.of(objects.POLICIES)[0])
        await until(lambda: metrics(first, SAVES)[1] == 0, "the first replica hears of it")


async def test_a_kind_that_only_later_libraries_know_is_ignored(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, dataclasses.replace(SAVES, kind="Weather"))
        assert replica.reasons == []
