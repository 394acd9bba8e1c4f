"""What is kept of Preemptions that have ended, and what is deleted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import LABEL_ENDED_AT, PreemptionRecord, RequestRecord
from gracepoint_operator.recording import garbage_collector
from gracepoint_operator.recording.garbage_collector import (
    AGAIN_S,
    SHORTEST_S,
    DeletionReason,
    Due,
    GarbageCollector,
    Limits,
    due_for_deletion,
    final_requests,
)
from gracepoint_operator.workloads import JOBSETS, WorkloadIdentity
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, NOW, Body, Clock
from tests.unit.operator.fakes.replica import Replica, running, until

LIMITS = Limits(ttl_s=30 * 86_400, history=3)
DAY_S = 86_400.0
MONTH_S = 31 * DAY_S
JOBSET = WorkloadIdentity("JobSet", NAMESPACE, "train", JOBSET_UID)


def ended(
    preemption: int, *, ago_s: float, phase: str = "Committed", drill: bool = False, asked: Iterable[str] = ()
) -> Body:
    """A record that ended so long ago."""
    return objects.preemption(
        preemption,
        phase=phase,
        created_at=NOW - ago_s - 20,
        ended_at=NOW - ago_s,
        mode="Drill" if drill else "Enforce",
        requests=list(asked),
    )


def answered(name: str, *, ago_s: float, phase: str = "Committed") -> Body:
    """A request that was made so long ago, and is at that phase."""
    return objects.request(name, created_at=NOW - ago_s) | {"status": {"phase": phase}}


def names(found: Iterable[Due]) -> list[str]:
    """The numbers of records and the names of requests."""
    return [item.key[1].removeprefix(f"train-{JOBSET_UID[:8]}-") for item in found]


def found(*bodies: Body, living: Iterable[str] = (JOBSET_UID,), limits: Limits = LIMITS) -> list[Due]:
    preemptions = [PreemptionRecord.of(body) for body in bodies if "epoch" in body["spec"]]
    requests = [RequestRecord.of(body) for body in bodies if "epoch" not in body["spec"]]
    return due_for_deletion(preemptions, requests, set(living), NOW, limits)


def test_what_ended_longer_ago_than_is_kept_goes() -> None:
    old, new = ended(1, ago_s=MONTH_S), ended(2, ago_s=29 * DAY_S)
    assert found(old, new) == [Due((NAMESPACE, f"train-{JOBSET_UID[:8]}-1"), DeletionReason.AGE)]


def test_a_limited_number_is_kept_per_jobset_name_newest_first() -> None:
    records = [ended(number, ago_s=(10 - number) * DAY_S) for number in range(1, 6)]
    assert names(found(*reversed(records))) == ["1", "2"]
    assert {item.reason for item in found(*records)} == {DeletionReason.COUNT}


def test_jobsets_of_one_name_share_the_number_that_is_kept() -> None:
    records = [ended(1, ago_s=(10 - life) * DAY_S) for life in range(4)]
    for life, body in enumerate(records):
        body["spec"]["jobSet"]["uid"] = f"uid-{life}"
        body["metadata"]["name"] = f"life-{life}"
    assert names(found(*records, living=["uid-3"])) == ["life-0"]


@pytest.mark.parametrize("phase", ["Noticed", "Agreed"])
def test_what_is_in_progress_stays_however_old_it_is(phase: str) -> None:
    body = objects.preemption(1, phase=phase, created_at=NOW - MONTH_S)
    assert found(body, ended(2, ago_s=DAY_S), limits=Limits(history=1)) == []


def test_record_numbers_and_answers_are_kept_for_a_gangs_life() -> None:
    records = [ended(1, ago_s=MONTH_S + 3), ended(2, ago_s=MONTH_S + 2), ended(3, ago_s=MONTH_S + 1, drill=True)]
    assert names(found(*records)) == ["1"]
    gone = found(*records, living=())
    assert names(gone) == ["1", "2", "3"]
    assert [item.unless_lives for item in gone] == [None, JOBSET, JOBSET], "only after the API was asked for the JobSet"


def test_what_ended_just_now_stays_however_many_there_are() -> None:
    records = [ended(number, ago_s=SHORTEST_S - number) for number in range(1, 9)]
    assert found(*records) == []


@pytest.mark.parametrize(
    ("age_s", "limits", "goes"),
    [
        pytest.param(SHORTEST_S, Limits(history=1), False, id="at the shortest time"),
        pytest.param(SHORTEST_S + 1, Limits(history=1), True, id="just longer"),
        pytest.param(30 * DAY_S, Limits(ttl_s=30 * 86_400, history=9), False, id="as old as is kept"),
        pytest.param(30 * DAY_S + 1, Limits(ttl_s=30 * 86_400, history=9), True, id="just older"),
    ],
)
def test_a_limit_is_what_is_kept_just_yet(age_s: float, limits: Limits, goes: bool) -> None:
    records = [ended(1, ago_s=age_s), ended(2, ago_s=0.0)]
    for body in records:
        body["spec"]["policy"]["spec"]["exitBreaker"] = {"savedExits": 1, "withinSeconds": 60}
    assert bool(found(*records, limits=limits)) is goes


@pytest.mark.parametrize(("within_s", "goes"), [(172_801, False), (172_800, False), (172_799, True)])
def test_what_the_exit_breaker_counts_stays_to_the_second(within_s: int, goes: bool) -> None:
    records = [ended(1, ago_s=2 * DAY_S), ended(2, ago_s=0.0)]
    for body in records:
        body["spec"]["policy"]["spec"]["exitBreaker"] = {"savedExits": 1, "withinSeconds": within_s}
    assert bool(found(*records, limits=Limits(history=1))) is goes


def test_what_the_exit_breaker_counts_stays() -> None:
    records = [ended(number, ago_s=3 * DAY_S - number) for number in range(1, 6)]
    assert names(found(*records)) == ["1", "2"]
    for body in records:
        body["spec"]["policy"]["spec"]["exitBreaker"] = {"savedExits": 9, "withinSeconds": 604_800}
    assert found(*records) == []


def test_a_record_goes_although_its_request_is_gone_already() -> None:
    assert names(found(ended(1, ago_s=MONTH_S, asked=["leave"]), ended(2, ago_s=DAY_S))) == ["1"]


def test_fifty_records_are_kept_for_thirty_days_by_default() -> None:
    assert Limits() == Limits(ttl_s=2_592_000.0, history=50)


def test_a_record_stays_until_its_request_says_how_it_ended() -> None:
    made = answered("leave", ago_s=MONTH_S + 60, phase="Adopted")
    assert found(made, ended(1, ago_s=MONTH_S, asked=["leave"]), ended(2, ago_s=DAY_S)) == []


def those_over(*bodies: Body, now: float = NOW) -> list[str]:
    preemptions = [PreemptionRecord.of(body) for body in bodies if "epoch" in body["spec"]]
    requests = [RequestRecord.of(body) for body in bodies if "epoch" not in body["spec"]]
    return [request.name for request in final_requests(preemptions, requests, now)]


@pytest.mark.parametrize("phase", ["Superseded", "Retracted", "Failed", "Expired"])
def test_a_request_that_no_record_names_is_over_with_its_answer(phase: str) -> None:
    assert those_over(answered("ended", ago_s=5, phase=phase), answered("waits", ago_s=MONTH_S, phase="Adopted")) == [
        "ended"
    ]


@pytest.mark.parametrize(
    ("recorded", "answer", "ago_s", "is_over"),
    [
        pytest.param("Committed", "Committed", 0, True, id="both say how it ended"),
        pytest.param("Committed", "Adopted", MONTH_S, False, id="it is not answered yet"),
        pytest.param("Noticed", "Superseded", 5, False, id="a replica that saw less was wrong"),
        pytest.param("Committed", "Superseded", 5, False, id="it was wrong, and is corrected soon"),
        pytest.param("Committed", "Superseded", SHORTEST_S + 1, True, id="nobody has corrected it"),
        pytest.param("Expired", "Expired", SHORTEST_S, False, id="a report may still come"),
        pytest.param("Expired", "Expired", SHORTEST_S + 1, True, id="no report came"),
    ],
)
def test_a_request_is_over_when_its_status_can_change_no_more(
    recorded: str, answer: str, ago_s: float, is_over: bool
) -> None:
    asked = answered("leave", ago_s=MONTH_S, phase=answer)
    assert bool(those_over(ended(1, ago_s=ago_s, phase=recorded, asked=["leave"]), asked)) is is_over


# What becomes of it at the API.


def collector_of(replica: Replica) -> GarbageCollector:
    """A collector over what the replica knows. The replica's own has its passes much later than a test ends."""
    core = replica.core
    return GarbageCollector(
        api=replica.api,
        cache=core.cache,
        metrics=replica.metrics,
        clock=replica.clock,
        limits=Limits(),
        drop=core.cache.drop,
    )


def kept(replica: Replica) -> list[str]:
    return [body["metadata"]["name"].removeprefix(f"train-{JOBSET_UID[:8]}-") for body in replica.preemptions]


def counted(replica: Replica, reason: str) -> float:
    return float(
        replica.metrics.registry.get_sample_value("gracepoint_preemptions_deleted_total", {"reason": reason}) or 0
    )


async def test_what_is_due_is_deleted_and_counted_by_one_replica(api: MemoryApi, clock: Clock) -> None:
    for number, ago_s in ((1, MONTH_S), (2, DAY_S)):
        api.add(kinds.PREEMPTIONS, ended(number, ago_s=ago_s))
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        for replica in (first, second):
            await collector_of(replica).prune()
        assert kept(first) == ["2"]
        assert (counted(first, "age"), counted(second, "age")) == (1, 0)


def requests(api: MemoryApi) -> dict[str, dict[str, str]]:
    """The labels of each request."""
    return {body["metadata"]["name"]: body["metadata"].get("labels", {}) for body in api.of(kinds.REQUESTS)}


async def test_a_request_that_is_over_is_labelled_and_goes_after_an_hour(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.REQUESTS, answered("leave", ago_s=60, phase="Superseded"))
    api.add(kinds.REQUESTS, answered("waits", ago_s=60, phase="Adopted"))
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        for replica in (first, second):
            await collector_of(replica).retire_requests()
            replica.core.feed(kinds.REQUESTS, "DELETED", objects.request("leave"))  # as a watch by that label says
        assert requests(api) == {"leave": {LABEL_ENDED_AT: str(int(NOW))}, "waits": {}}
        await until(lambda: list(first.core.cache.preemptions.requests) == ["uid-waits"], "the watch")
        clock.move(3600)
        collector = collector_of(first)
        await collector.prune_requests()
        assert "leave" in requests(api)
        clock.move(1)
        await collector.prune_requests()
        await collector_of(second).prune_requests()
        assert list(requests(api)) == ["waits"]


async def test_requests_are_listed_in_watched_namespaces_alone(api: MemoryApi, clock: Clock) -> None:
    """An operator of some namespaces has no right to list others."""
    namespaces = (NAMESPACE, "prod")
    cache = ClusterCache(clock)
    collector = GarbageCollector(api, cache, Metrics(), clock, Limits(), cache.drop, namespaces)
    await collector.prune_requests()
    assert api.calls == [f"GET {kinds.REQUESTS.path(namespace)}" for namespace in (NAMESPACE, "prod")]


async def test_a_label_that_is_no_time_keeps_no_request(api: MemoryApi, clock: Clock) -> None:
    body = answered("leave", ago_s=3601)
    body["metadata"]["labels"] = {LABEL_ENDED_AT: "never"}
    api.add(kinds.REQUESTS, body)
    async with running(api, clock) as replica:
        await collector_of(replica).prune_requests()
        assert requests(api) == {}


async def test_a_request_of_version_0_2_goes_by_itself(api: MemoryApi, clock: Clock) -> None:
    old = answered("leave", ago_s=3601, phase="Superseded") | {"kind": "Preemption"}
    api.add(kinds.PREEMPTIONS, old)
    async with running(api, clock) as replica:
        await collector_of(replica).retire_requests()
        assert replica.preemptions == []


async def test_requests_that_cannot_be_put_away_are_tried_again(
    api: MemoryApi, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    api.add(kinds.REQUESTS, answered("leave", ago_s=60, phase="Superseded"))
    async with running(api, clock) as replica:
        api.failing, api.failing_only = [client.Refused("HTTP 403: denied by a policy")], "PATCH"
        collector = collector_of(replica)
        await collector.retire_requests()
        assert "cannot delete requests that are over" in caplog.text
        await collector.retire_requests()
        assert requests(api) == {"leave": {LABEL_ENDED_AT: str(int(NOW))}}


async def test_the_last_record_of_a_jobset_that_lost_its_label_stays(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.PREEMPTIONS, ended(1, ago_s=MONTH_S))
    async with running(api, clock) as replica:
        collector = collector_of(replica)
        replica.core.feed(JOBSETS, "DELETED", objects.jobset())  # which is what a watch by label says then
        await until(lambda: not replica.core.cache.objects.workloads, "the watch")
        await collector.prune()
        assert kept(replica) == ["1"]
        api.remove(JOBSETS, objects.jobset())
        await collector.prune()
        assert kept(replica) == []


async def test_a_record_that_was_corrected_since_is_looked_at_again(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.PREEMPTIONS, ended(1, ago_s=MONTH_S))
    api.add(kinds.PREEMPTIONS, ended(2, ago_s=DAY_S))
    async with running(api, clock) as replica:
        api.add(kinds.PREEMPTIONS, objects.preemption(1, phase="Noticed", created_at=NOW - MONTH_S))
        await collector_of(replica).prune()
        assert kept(replica) == ["1", "2"]


async def test_record_rewritten_by_a_newer_version_is_left_alone(api: MemoryApi, clock: Clock) -> None:
    for number in (1, 2, 3):
        api.add(kinds.PREEMPTIONS, ended(number, ago_s=MONTH_S - number))
    async with running(api, clock) as replica:
        body = ended(1, ago_s=MONTH_S)
        body["spec"]["ofTheFuture"] = True
        api.add(kinds.PREEMPTIONS, body)
        await collector_of(replica).prune()
        assert kept(replica) == ["1", "3"]


async def test_a_pass_deletes_so_many_at_most(api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 7):
        api.add(kinds.PREEMPTIONS, ended(number, ago_s=MONTH_S))
    async with running(api, clock) as replica:
        monkeypatch.setattr(garbage_collector, "AT_MOST", 2)
        await collector_of(replica).prune()
        assert kept(replica) == ["3", "4", "5", "6"]


def not_deleted(replica: Replica, outcome: str) -> float:
    name = "gracepoint_preemptions_not_deleted_total"
    return float(replica.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0)


async def test_refused_deletions_are_named_and_counted_and_block_nothing(
    api: MemoryApi, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 5):
        api.add(kinds.PREEMPTIONS, ended(number, ago_s=MONTH_S))
    async with running(api, clock) as replica:
        collector = collector_of(replica)
        api.failing, api.failing_only = [client.Refused("HTTP 403: denied by a policy")], "DELETE"
        await collector.prune()
        assert kept(replica) == ["1", "4"]
        assert not_deleted(replica, "Refused") == 1
        (said,) = [record for record in caplog.records if "cannot delete a Preemption" in record.message]
        assert "train-0b6f1c9e-1" in str(vars(said))
        api.calls.clear()
        await collector.prune()
        assert not any(call.endswith("-1") for call in api.calls), "what was refused is not tried again so soon"
        clock.move(AGAIN_S)
        await collector.prune()
        assert kept(replica) == ["4"]


async def test_unreachable_api_server_ends_the_pass_and_another_record_is_next(api: MemoryApi, clock: Clock) -> None:
    for number in range(1, 5):
        api.add(kinds.PREEMPTIONS, ended(number, ago_s=MONTH_S))
    async with running(api, clock) as replica:
        collector = collector_of(replica)
        api.failing, api.failing_only = [client.Unavailable("HTTP 500: a webhook of somebody's fails")], "DELETE"
        await collector.prune()
        assert kept(replica) == ["1", "2", "3", "4"]
        await collector.prune()
        assert kept(replica) == ["1", "4"]
        assert not_deleted(replica, "Unavailable") == 1


async def test_a_replica_prunes_by_itself(api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collector, "PASS_S", 0.01)
    api.add(kinds.PREEMPTIONS, ended(1, ago_s=MONTH_S))
    api.add(kinds.PREEMPTIONS, ended(2, ago_s=DAY_S))
    async with running(api, clock) as replica:
        await until(lambda: kept(replica) == ["2"], "the old record to go")


async def test_after_the_old_records_are_gone_the_numbers_continue(api: MemoryApi, clock: Clock) -> None:
    for number in (1, 2):
        api.add(kinds.PREEMPTIONS, ended(number, ago_s=MONTH_S))
    async with running(api, clock) as replica:
        await collector_of(replica).prune()
        assert kept(replica) == ["2"]
        replica.taint()
        await until(lambda: kept(replica) == ["2", "3"], "the next record")
