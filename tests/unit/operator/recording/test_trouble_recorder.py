"""What a gang shows that trains while its saves or deletions fail: conditions, Events and metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from gracepoint.wire.messages import Resumption, Trouble, TroubleKind
from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.kube import objects
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects as fakes
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, Body, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, of_policy, resumption, running, until

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
        await until(lambda: of_policy(api, condition)[0] == "False", "the condition")
        assert trouble.message in of_policy(api, condition)[1]
        assert ("another 840 s" in of_policy(api, condition)[1]) is (trouble is SAVES)
        await until(lambda: replica.reasons == events[:1], "the Event")
        await take(replica, dataclasses.replace(trouble, times=3, message="still"))
        await until(lambda: "still" in of_policy(api, condition)[1], "the newer message")
        assert metrics(replica, trouble) == (1, 1)
        clock.move(10)
        await take(replica, dataclasses.replace(trouble, over=True))
        await until(lambda: of_policy(api, condition)[0] == "True", "the condition's end")
        await until(lambda: replica.reasons == events, "the Event of the end")
        assert metrics(replica, trouble) == (1, 0)


#: The first pod says so: no other one is there.
RESUMED = dataclasses.replace(resumption(), pod_uid="uid-pod-0-0")


@pytest.mark.parametrize("by_older_version", [False, True])
async def test_a_gang_that_starts_again_has_no_trouble_until_it_says_so(
    api: MemoryApi, clock: Clock, by_older_version: bool
) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
    if by_older_version:
        (body,) = api.of(objects.POLICIES)
        del body["status"]["troubles"]
        api.add(objects.POLICIES, body)
    async with running(api, clock) as replica:  # another one, which was told nothing
        replica.subscribe(0)
        await take(replica, RESUMED)
        await until(lambda: of_policy(api, "Saving")[0] == "True", "the condition's end")


async def test_the_end_that_was_reported_to_another_replica_counts(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "a") as first, running(api, clock, "b") as second:
        for replica in (first, second):
            replica.subscribe(0)
        await take(first, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        clock.move(60)
        await take(second, dataclasses.replace(SAVES, over=True))
        await until(lambda: of_policy(api, "Saving")[0] == "True", "the condition's end")
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
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        _watches_bring_policy(api, first, second)
        clock.move(5)
        await take_of_other(second, RESUMED)
        await take_of_other(second, SAVES)  # which is written after anything that the start has brought about
        await until(lambda: "2 JobSets" in of_policy(api, "Saving")[1], "both in the condition")
        _watches_bring_policy(api, first, second)
        clock.move(5)
        await take_of_other(second, dataclasses.replace(SAVES, over=True))
        await until(lambda: "1 JobSet" in of_policy(api, "Saving")[1], "the first in the condition")
        _watches_bring_policy(api, first, second)
        await until(lambda: metrics(second, SAVES)[1] == 0, "the end at the second")
        assert (of_policy(api, "Saving")[0], metrics(first, SAVES)[1]) == ("False", 1)


def _troubles(api: MemoryApi) -> list[tuple[str, str]]:
    (body,) = api.of(objects.POLICIES)
    return [(item["name"], item["trouble"]) for item in body["status"].get("troubles", [])]


async def test_an_entry_leaves_the_status_when_its_trouble_is_over(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await take(replica, SAVES)
        await take(replica, DELETIONS)
        await until(lambda: len(_troubles(api)) == 2, "both entries")
        await take(replica, dataclasses.replace(SAVES, over=True))
        await until(lambda: _troubles(api) == [("train", "Deletions")], "one entry")
        assert (of_policy(api, "Saving")[0], of_policy(api, "CleanedUp")[0]) == ("True", "False")


async def test_a_replica_that_writes_before_it_heard_of_the_end_keeps_nothing(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "a") as first, running(api, clock, "b") as second:
        await take(first, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        await take(second, dataclasses.replace(SAVES, over=True))
        await until(lambda: of_policy(api, "Saving")[0] == "True", "the condition's end")
        first.core.writers.policies.touch(NAMESPACE, "careful")  # it reads the policy, which no watch has brought
        await take(first, DELETIONS)
        await until(lambda: _troubles(api) == [("train", "Deletions")], "the other trouble alone")
        _watches_bring_policy(api, first)
        await until(lambda: metrics(first, SAVES)[1] == 0, "the first replica hears of it")
        assert _troubles(api) == [("train", "Deletions")]


async def test_a_failure_that_is_written_after_its_end_was_heard_elsewhere_leaves_again(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock, "a") as first, running(api, clock, "b") as second:
        await take(first, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        late = api.of(objects.POLICIES)[0]
        clock.move(60)
        await take(second, dataclasses.replace(SAVES, over=True))
        await until(lambda: of_policy(api, "Saving")[0] == "True", "the condition's end")
        _watches_bring_policy(api, second)
        again = api.of(objects.POLICIES)[0]
        again["status"] |= {name: late["status"][name] for name in ("troubles", "conditions")}
        api.add(objects.POLICIES, again)  # as by a replica that could not reach the API server for a while
        _watches_bring_policy(api, first, second)
        async with asyncio.timeout(20):  # not only when connections are counted, twice a minute
            await until(lambda: not _troubles(api), "the entry to leave")
        _watches_bring_policy(api, first)
        await until(lambda: metrics(first, SAVES)[1] == 0, "the first replica hears of it")
        assert of_policy(api, "Saving")[0] == "True"


async def test_replicas_that_both_got_reports_keep_the_newer_one(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "a") as first, running(api, clock, "b") as second:
        await take(first, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        clock.move(60)
        await take(second, dataclasses.replace(SAVES, message="9 periodic saves in a row failed"))
        await until(lambda: "9 periodic" in of_policy(api, "Saving")[1], "the newer report")
        for replica in (first, second, first):
            _watches_bring_policy(api, first, second)
            await take(replica, dataclasses.replace(DELETIONS, message=f"at {clock():.0f}"))
            await until(lambda: f"at {clock():.0f}" in of_policy(api, "CleanedUp")[1], "another report")
            assert "9 periodic" in of_policy(api, "Saving")[1]
            clock.move(60)


async def test_an_end_after_the_api_server_was_restored_from_a_backup_counts(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "a") as first, running(api, clock, "b") as second:
        await take(first, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        api.restore(version=7)
        (restored,) = api.of(objects.POLICIES)
        api.add(objects.POLICIES, restored | {"status": {**restored["status"], "troubles": []}})
        _watches_bring_policy(api, first, second)
        async with asyncio.timeout(20):  # as above
            await until(lambda: _troubles(api) == [("train", "Saves")], "the entry to be written again")
        clock.move(60)
        await take(second, dataclasses.replace(SAVES, over=True))
        await until(lambda: not _troubles(api), "the end")
        _watches_bring_policy(api, first)
        await until(lambda: metrics(first, SAVES)[1] == 0, "the first replica hears of it")


async def test_what_fails_until_the_end_of_a_workload_ends_with_it(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await take(replica, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        replica.see(JOBSETS, fakes.jobset(finished="Failed"))
        await until(lambda: of_policy(api, "Saving")[0] == "True", "the condition's end")
        assert (metrics(replica, SAVES)[1], _troubles(api)) == (0, [])


async def test_a_policy_that_is_made_again_gets_what_still_fails(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await take(replica, SAVES)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition")
        (body,) = api.of(objects.POLICIES)
        replica.drop(objects.POLICIES, body)
        again = fakes.policy()
        again["metadata"]["uid"] = "uid-again"
        replica.see(objects.POLICIES, again)
        await until(lambda: of_policy(api, "Saving")[0] == "False", "the condition of the new one")
        _watches_bring_policy(api, replica)
        assert metrics(replica, SAVES)[1] == 1


async def test_a_gang_that_gets_another_policy_leaves_the_status_of_the_one_before(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock) as replica:
        other = fakes.policy()
        other["metadata"] |= {"name": "other", "uid": "uid-other"}
        replica.see(objects.POLICIES, other)

        def entries() -> dict[str, int]:
            return {
                body["metadata"]["name"]: len(body.get("status", {}).get("troubles", []))
                for body in api.of(objects.POLICIES)
            }

        await take(replica, SAVES)
        await until(lambda: entries() == {"careful": 1, "other": 0}, "the entry")
        moved = fakes.jobset()
        moved["metadata"]["labels"][LABEL_POLICY] = "other"
        replica.see(JOBSETS, moved)

        async with asyncio.timeout(20):  # as above
            await until(lambda: entries() == {"careful": 0, "other": 1}, "the entry in the other policy")
        for body in api.of(objects.POLICIES):
            replica.core.feed(objects.POLICIES, "MODIFIED", body)
        replica.see(JOBSETS, fakes.jobset())
        await until(lambda: entries() == {"careful": 1, "other": 0}, "the entry in the first policy")
        assert metrics(replica, SAVES)[1] == 1


async def test_names_of_files_that_are_no_text_are_shown_as_escapes(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await take(replica, dataclasses.replace(DELETIONS, message="/ckpt/\udcff: Permission denied"))
        await until(lambda: "/ckpt/\\udcff: Permission" in of_policy(api, "CleanedUp")[1], "the condition")


async def test_a_kind_that_only_later_libraries_know_is_ignored(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, dataclasses.replace(SAVES, kind="Weather"))
        assert replica.reasons == []
