"""What a gang shows that trains while its saves or deletions fail: conditions, Events and metrics."""

from __future__ import annotations

import dataclasses
import json

import pytest

from gracepoint.wire.messages import Resumption, Trouble, TroubleKind
from gracepoint_operator.kube import objects
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects as fakes
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, Body, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, running, until

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


RESUMED = Resumption(
    pod_uid="uid-pod-0-0",
    session="s-1",
    workload_uid=JOBSET_UID,
    restart_attempt=1,
    restored_step=40,
    training=False,
    age_s=0.0,
)


@pytest.mark.parametrize("by_older_version", [False, True])
async def test_a_gang_that_starts_again_has_no_trouble_until_it_says_so(
    api: MemoryApi, clock: Clock, by_older_version: bool
) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, SAVES)
        await until(lambda: _condition(api, "Saving")[0] == "False", "the condition")
    if by_older_version:
        (body,) = api.of(objects.POLICIES)
        del body["status"]["troubles"]
        api.add(objects.POLICIES, body)
    async with running(api, clock) as replica:  # another one, which was told nothing
        replica.subscribe(0)
        await take(replica, RESUMED)
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


OTHER_UID = f"2222{JOBSET_UID[4:]}"


def _of_other(body: Body) -> Body:
    """The same object of another JobSet, train2, of the same policy."""
    text = json.dumps(body).replace(JOBSET_UID, OTHER_UID).replace('"uid-', '"uid2-').replace("train", "train2")
    made: Body = json.loads(text)
    return made


def _two_gangs(api: MemoryApi) -> None:
    cluster(api)
    api.add(JOBSETS, _of_other(fakes.jobset()))
    api.add(objects.JOBS, _of_other(fakes.job()))
    api.add(objects.PODS, _of_other(fakes.pod(0)))


async def take_of_other(replica: Replica, message: Trouble | Resumption) -> None:
    pod = replica.core.cache.objects.pods["uid2-pod-0-0"]
    await replica.core.reports.take(pod, dataclasses.replace(message, pod_uid=pod.uid, workload_uid=OTHER_UID))


def _watches_bring_policy(api: MemoryApi, *replicas: Replica) -> None:
    for replica in replicas:
        replica.core.feed(objects.POLICIES, "MODIFIED", api.of(objects.POLICIES)[0])


async def test_another_gang_that_starts_at_another_replica_ends_no_trouble(api: MemoryApi, clock: Clock) -> None:
    _two_gangs(api)
    async with running(api, clock, "a") as first, running(api, clock, "b") as second:
        await take(first, SAVES)
        await until(lambda: _condition(api, "Saving")[0] == "False", "the condition")
        _watches_bring_policy(api, first, second)
        clock.move(5)
        await take_of_other(second, RESUMED)
        await take_of_other(second, SAVES)  # which is written after anything that the start has brought about
        await until(lambda: "2 JobSets" in _condition(api, "Saving")[1], "both in the condition")
        _watches_bring_policy(api, first, second)
        clock.move(5)
        await take_of_other(second, dataclasses.replace(SAVES, over=True))
        await until(lambda: "1 JobSet" in _condition(api, "Saving")[1], "the first in the condition")
        _watches_bring_policy(api, first, second)
        await until(lambda: metrics(second, SAVES)[1] == 0, "the end at the second")
        assert (_condition(api, "Saving")[0], metrics(first, SAVES)[1]) == ("False", 1)


async def test_a_trouble_that_is_over_leaves_the_status_some_time_later(api: MemoryApi, clock: Clock) -> None:
    def troubles() -> list[tuple[str, bool]]:
        (body,) = api.of(objects.POLICIES)
        return [(item["trouble"], "message" in item) for item in body["status"].get("troubles", [])]

    async with running(api, clock) as replica:
        await take(replica, SAVES)
        await until(lambda: _condition(api, "Saving")[0] == "False", "the condition")
        assert troubles() == [("Saves", True)]
        clock.move(10)
        await take(replica, dataclasses.replace(SAVES, over=True))
        await until(lambda: troubles() == [("Saves", False)], "the end")
        clock.move(601)
        replica.core.writers.policies.touch(NAMESPACE, "careful")
        await until(lambda: not troubles(), "the entry to leave")
        assert _condition(api, "Saving")[0] == "True"


async def test_a_kind_that_only_later_libraries_know_is_ignored(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, dataclasses.replace(SAVES, kind="Weather"))
        assert replica.reasons == []
