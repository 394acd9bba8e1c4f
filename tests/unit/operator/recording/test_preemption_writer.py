"""What the record of a preemption comes to: whoever wrote last, whatever came late, and whoever was killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from gracepoint.wire.messages import Acknowledgement, Phase, StageTiming
from gracepoint_operator.channel.reports import UnknownPreemption
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import format_time
from gracepoint_operator.recording import preemption_writer
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Clock
from tests.unit.operator.fakes.replica import (
    Replica,
    cluster,
    frames,
    kept_of,
    report,
    running,
    until,
    writes_under_way,
)

NAME = f"train-{JOBSET_UID[:8]}-1"


@pytest.fixture
def clock() -> Clock:
    return Clock()


class HistoricApi(MemoryApi):
    """Remembers how many acknowledgements each version of the Preemption had."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.received: list[int] = []
        cluster(self)

    def store(self, body: client.JsonObject) -> None:
        if body.get("kind") == "Preemption":
            self.received.append(body.get("status", {}).get("acknowledgements", {}).get("received", 0))

    @property
    def status(self) -> client.JsonObject:
        """Of the one Preemption that there is."""
        (body,) = self.of(kinds.PREEMPTIONS)
        status: client.JsonObject = body.get("status", {})
        return status


@pytest.fixture
def api(clock: Clock) -> HistoricApi:
    return HistoricApi(clock)


async def acknowledge(replica: Replica, index: int) -> None:
    pod = replica.core.cache.objects.pods[f"uid-pod-{index}-0"]
    message = Acknowledgement(pod_uid=pod.uid, session=f"s-{index}", preemption=NAME, process_index=index)
    await replica.core.reports.take(pod, message)


def laggards(api: HistoricApi) -> dict[str, str]:
    """By pod: what it lags in."""
    return {item["pod"]: item["lags"] for item in api.status.get("acknowledgements", {}).get("laggards", [])}


def watch(replica: Replica) -> None:
    """The watch brings the Preemption as it is now."""
    replica.core.feed(kinds.PREEMPTIONS, "MODIFIED", replica.api.of(kinds.PREEMPTIONS)[0])


async def seen_and_at_rest(*replicas: Replica) -> None:
    """The watch brings the Preemption to all, and none has anything left to write about it."""
    for replica in replicas:
        watch(replica)
    await asyncio.sleep(0.01)  # until the loop has taken it
    await until(lambda: not writes_under_way("preemption"), "their writes")


async def told_by_both(first: Replica, second: Replica) -> None:
    """Each of two replicas has told one process, and both have come to rest."""
    one, two = first.subscribe(0, "s-0"), second.subscribe(1, "s-1")
    first.taint()
    await first.phase("Noticed")
    watch(second)
    await until(lambda: second.core.cache.preemptions.records, "the watch")
    for subscriber in (one, two):
        assert len(await frames(subscriber)) == 1


@contextlib.asynccontextmanager
async def told_alone(api: HistoricApi, clock: Clock, pods: int) -> AsyncIterator[Replica]:
    """One replica has told all processes of a gang of so many pods."""
    for index in range(2, pods):
        api.add(kinds.PODS, objects.pod(index))
    async with running(api, clock) as replica:
        gang = [replica.subscribe(index, f"s-{index}") for index in range(pods)]
        replica.taint()
        await replica.phase("Noticed")
        for subscriber in gang:
            assert len(await frames(subscriber)) == 1
        yield replica


async def test_late_ack_at_the_other_replica_is_counted(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await told_by_both(first, second)
        await acknowledge(first, 0)
        await first.report(Phase.COMMITTED)
        await first.phase("Committed")
        clock.move(2)
        await acknowledge(second, 1)
        await until(lambda: api.status["acknowledgements"]["received"] == 2, "both receipts")
        assert api.status["acknowledgements"] == {"expected": 2, "received": 2, "laggards": []}
        assert "lastAck" in {timing["stage"] for timing in api.status["timings"]}
        assert api.status["phase"] == "Committed"
        assert api.received == sorted(api.received)


async def test_one_of_two_replicas_makes_the_record_and_counts_it(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        for replica in (first, second):
            replica.taint()
        await until(
            lambda: first.core.cache.preemptions.records and second.core.cache.preemptions.records, "both to begin"
        )
        await first.phase("Noticed")
        await seen_and_at_rest(first, second)
        made = [replica.core.writers.preemptions.made for replica in (first, second)]
        assert sorted(map(len, made)) == [0, 1]
        (body,) = first.preemptions
        for replica in (first, second):
            replica.core.feed(kinds.PREEMPTIONS, "DELETED", body)
        await until(lambda: not any(made), "it to be forgotten")


async def test_pod_notified_by_one_replica_may_answer_another(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        gang = [first.subscribe(index, f"s-{index}") for index in (0, 1)]
        first.taint()
        await first.phase("Noticed")
        watch(second)
        await until(lambda: second.core.cache.preemptions.records, "the watch")
        for subscriber in gang:
            await frames(subscriber)
        await until(lambda: set(laggards(api).values()) == {"NotAcknowledged"}, "the laggards")
        await seen_and_at_rest(first, second)
        before = len(api.received)
        await seen_and_at_rest(first, second)
        assert len(api.received) == before  # a replica that had no part in it leaves them to the one that had
        await acknowledge(second, 0)
        await until(lambda: api.status["acknowledgements"]["received"] == 1, "one receipt")
        assert laggards(api) == {"train-workers-0-1-0xyz": "NotAcknowledged"}
        await acknowledge(second, 1)
        await until(lambda: api.status["acknowledgements"]["received"] == 2, "both receipts")
        await seen_and_at_rest(first, second)
        assert api.status["acknowledgements"] == {"expected": 2, "received": 2, "laggards": []}


async def test_two_replicas_name_whose_receipt_is_missing_and_in_what_each_lags(api: HistoricApi, clock: Clock) -> None:
    api.add(kinds.JOBS, objects.job(completions=4))
    for index in (2, 3):
        api.add(kinds.PODS, objects.pod(index, on="node-2"))
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await told_by_both(first, second)
        assert len(await frames(first.subscribe(2, "s-2"))) == 1
        await acknowledge(second, 0)
        await acknowledge(first, 1)
        waits_for = {"train-workers-0-2-0xyz": "NotAcknowledged", "train-workers-0-3-0xyz": "NotConnected"}
        await until(lambda: laggards(api) == waits_for, "both laggards")
        await seen_and_at_rest(first, second)
        before = len(api.received)
        await seen_and_at_rest(first, second)
        assert (laggards(api), len(api.received)) == (waits_for, before), "the replicas agree"
        # The last one comes to the other replica; the third is killed before it says anything.
        assert len(await frames(second.subscribe(3, "s-3"))) == 1
        await acknowledge(second, 3)
        first.drop(kinds.PODS, gone := objects.pod(2, on="node-2"))
        second.core.feed(kinds.PODS, "DELETED", gone)
        await until(lambda: laggards(api) == {"train-workers-0-2-0xyz": "NotAcknowledged"}, "the one that is gone")
        assert api.status["acknowledgements"]["received"] == 3
        shown = {entry["name"]: (entry["toldPods"], entry["acknowledgedPods"]) for entry in api.status["replicas"]}
        assert shown == {
            "replica-a": (["train-workers-0-[0,2]"], ["train-workers-0-1"]),
            "replica-b": (["train-workers-0-[1,3]"], ["train-workers-0-[0,3]"]),
        }


async def test_a_process_that_acknowledges_to_both_replicas_is_one(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await told_by_both(first, second)
        for replica in (first, second):
            await acknowledge(replica, 0)  # as after losing its connection to the first one
        await until(lambda: len(laggards(api)) == 1, "the receipt")
        await seen_and_at_rest(first, second)
        assert api.status["acknowledgements"]["received"] == 1
        assert "lastAck" not in {timing["stage"] for timing in api.status["timings"]}
        await acknowledge(first, 1)
        await until(lambda: laggards(api) == {}, "both receipts")
        assert api.status["acknowledgements"] == {"expected": 2, "received": 2, "laggards": []}


async def test_nobody_lags_where_nobody_is_notified(clock: Clock) -> None:
    api = HistoricApi(clock)
    api.add(kinds.POLICIES, objects.policy(mode="Observe"))
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        assert api.status["acknowledgements"] == {"expected": 2, "received": 0, "laggards": []}


async def test_sum_of_acks_never_dips_before_a_replica_writes_its_own(
    api: HistoricApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.Event()
    apply_status = api.apply_status

    async def after_a_while(*args: Any, manager: str) -> client.JsonObject:
        if manager.endswith("replica-a"):
            await held.wait()
        return await apply_status(*args, manager=manager)

    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await told_by_both(first, second)
        monkeypatch.setattr(api, "apply_status", after_a_while)
        await acknowledge(first, 0)
        await asyncio.sleep(0.1)  # several write intervals
        await second.report(Phase.AGREED)
        await second.phase("Agreed")
        held.set()
        await acknowledge(second, 1)
        await until(lambda: api.status["acknowledgements"]["received"] == 2, "both receipts")
        assert api.received == sorted(api.received)


async def test_replica_rewrites_its_missing_entry_also_after_the_end(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0, "s-0")
        replica.taint()
        await replica.phase("Noticed")
        await acknowledge(replica, 0)
        await replica.report(Phase.COMMITTED)
        await until(lambda: api.status.get("acknowledgements", {}).get("received") == 1, "the receipt")
        await replica.phase("Committed")
        # As a replica of an older version may write it, which takes the sum before its own entry is there.
        (body,) = api.of(kinds.PREEMPTIONS)
        body["status"]["acknowledgements"]["received"] = 0
        replica.see(kinds.PREEMPTIONS, body)
        await until(lambda: api.status["acknowledgements"]["received"] == 1, "the sum")


async def test_a_replica_whose_container_started_again_takes_nothing_back(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        gang = [replica.subscribe(index, f"s-{index}") for index in (0, 1)]
        replica.taint()
        await replica.phase("Noticed")
        for index, subscriber in enumerate(gang):
            await frames(subscriber)
            await acknowledge(replica, index)
        await until(lambda: api.status["acknowledgements"]["received"] == 2, "both receipts")
    async with running(api, clock) as replica:  # the same name, and no memory
        await frames(replica.subscribe(0, "s-0"))
        await acknowledge(replica, 0)
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")
        assert api.received == sorted(api.received)
        assert api.status["replicas"][0]["acknowledged"] == 2


async def test_a_record_that_lacks_nothing_is_not_written_again(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await told_by_both(first, second)
        await acknowledge(first, 0)
        await acknowledge(second, 1)
        await first.report(Phase.COMMITTED)
        await until(lambda: api.status["acknowledgements"]["received"] == 2, "both receipts")
        await first.phase("Committed")
        await seen_and_at_rest(first, second)
        before = len(api.received)
        for _ in range(3):
            await seen_and_at_rest(first, second)
        assert len(api.received) == before


@pytest.mark.parametrize("end", ["the last receipt", "the commit", "the replica's end"])
async def test_receipts_of_thousands_of_pods_are_written_together_and_none_is_missing_in_the_end(
    api: HistoricApi, clock: Clock, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(preemption_writer, "_ENTRY_S", 600.0)  # as if there were so many
    async with told_alone(api, clock, pods=6) as replica:
        await seen_and_at_rest(replica)
        for index in range(5):
            await acknowledge(replica, index)
            await seen_and_at_rest(replica)
        assert api.status["acknowledgements"]["received"] == 1
        if end == "the last receipt":
            await acknowledge(replica, 5)
            await until(lambda: api.status["acknowledgements"]["received"] == 6, "all receipts")
        elif end == "the commit":
            await replica.report(Phase.COMMITTED)
            await until(lambda: api.status["acknowledgements"]["received"] == 5, "its receipts")
    assert api.status["acknowledgements"]["received"] == (6 if end == "the last receipt" else 5)


async def test_receipts_that_wait_are_written_when_it_is_time(
    api: HistoricApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption_writer, "_ENTRY_S", 0.05)
    async with told_alone(api, clock, pods=5) as replica:
        for index in range(2):
            await acknowledge(replica, index)
        await until(lambda: api.status["acknowledgements"]["received"] == 2, "both receipts")
        # As by a write of something else: the entry stays as it is beyond the moment for which the receipt waits.
        await acknowledge(replica, 2)
        later_s = time.monotonic() + 0.2
        replica.core.writers.acknowledgements.replica(("team-a", NAME), "replica-a", later_s, newest=True)
        await acknowledge(replica, 3)
        await until(lambda: api.status["acknowledgements"]["received"] == 4, "the receipts of four pods")


async def test_a_commit_that_is_reported_after_the_record_expired_corrects_it(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await told_by_both(first, second)
        clock.move(46)  # the deadline and half a minute
        await first.phase("Expired")
        watch(second)
        clock.move(5)
        late = dataclasses.replace(report(Phase.COMMITTED), seconds_to_spare=-3.0)
        await first.core.reports.take(first.core.cache.objects.pods["uid-pod-0-0"], late)
        body = await first.phase("Committed")
        assert (body["status"]["step"], body["status"]["secondsToSpare"]) == (40, -3.0)
        (ended,) = body["status"]["conditions"]
        assert (ended["reason"], ended["lastTransitionTime"]) == ("Committed", objects.stamp(NOW + 51))
        await until(lambda: "CheckpointCommitted" in first.reasons, "the Event")
        # The twin, which knows it as Expired, agrees.
        watch(second)
        await until(
            lambda: [e.phase for e in second.core.cache.preemptions.records.values()] == [Phase.COMMITTED], "the watch"
        )
        await asyncio.sleep(0.1)  # several write intervals
        assert api.status["phase"] == "Committed"
        assert first.reasons.count("CheckpointCommitted") == 1


async def test_a_record_that_ends_twice_is_counted_once_for_each_end(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await told_by_both(first, second)
        clock.move(46)
        await first.phase("Expired")
        watch(second)
        late = dataclasses.replace(report(Phase.COMMITTED), seconds_to_spare=-3.0, steps_lost=2)
        for replica in (first, second, first):  # the gang repeats a report whose answer was lost
            await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], late)
        await first.phase("Committed")
        watch(first)
        await seen_and_at_rest(first, second)

        def total(name: str, **labels: str) -> float:
            found = [replica.metrics.registry.get_sample_value(name, labels) for replica in (first, second)]
            return sum(value or 0.0 for value in found)

        cause = "SpotTermination"
        for phase in ("Noticed", "Expired", "Committed"):
            assert total("gracepoint_preemption_phases_total", phase=phase, cause=cause, mode="Enforce") == 1, phase
        assert total("gracepoint_spare_seconds_count") == 1
        assert total("gracepoint_steps_lost_total") == 2
        reasons = [*first.reasons, *second.reasons]
        assert len(set(first.reasons)) == len(first.reasons), reasons
        (ended,) = api.status["conditions"]
        assert ended["reason"] == "Committed"


async def test_the_status_names_the_generation_that_it_is_about(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        body = await replica.phase("Noticed")
        assert (body["metadata"]["generation"], body["status"]["observedGeneration"]) == (1, 1)
        replica.taint("node-2", key="aws-node-termination-handler/spot-itn")  # joins, and changes the spec
        await until(lambda: replica.preemptions[0]["metadata"]["generation"] == 2, "the spec to change")
        await until(lambda: api.status["observedGeneration"] == 2, "the status to follow")


async def test_late_commit_of_a_frozen_gang_corrects_a_retracted_record(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint(key="aws-node-termination-handler/scheduled-maintenance")
        await replica.phase("Noticed")
        replica.see(kinds.NODES, objects.node("node-1"))
        await replica.phase("Retracted")
        await replica.report(Phase.FROZEN)
        await replica.report(Phase.COMMITTED)
        assert (await replica.phase("Committed"))["status"]["step"] == 40
        (preemption,) = replica.core.cache.preemptions.records.values()
        assert preemption.leaves


@pytest.mark.parametrize("late", [Phase.FROZEN, Phase.FAILED, Phase.RETRACTED])
async def test_nothing_but_a_commit_corrects_a_record_that_expired(api: HistoricApi, clock: Clock, late: Phase) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        clock.move(46)
        await replica.phase("Expired")
        await replica.report(late)
        await asyncio.sleep(0.1)  # several write intervals
        assert api.status["phase"] == "Expired"


async def test_choice_and_cost_are_recorded_after_the_record_expired(api: HistoricApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        clock.move(46)
        await replica.phase("Expired")
        promoted = dataclasses.replace(
            report(Phase.PROMOTED), step=30, steps_lost=10, choice="Promote", choice_reason="step 40 needs 60 s"
        )
        await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], promoted)
        status = (await replica.phase("Promoted"))["status"]
        assert (status["step"], status["stepsLost"]) == (30, 10)
        assert (status["choice"], status["choiceReason"]) == ("Promote", "step 40 needs 60 s")


@contextlib.asynccontextmanager
async def without_twin(api: MemoryApi, clock: Clock) -> AsyncIterator[Replica]:
    """The only replica, which does not wait for long for a record of another one."""
    async with running(api, clock) as replica:
        replica.core.reports.other_replica_s = 0.0
        yield replica


async def test_unrecorded_notice_is_recorded_from_the_gangs_report(api: HistoricApi, clock: Clock) -> None:
    async with without_twin(api, clock) as replica:  # another life than the one that told the gang
        subscriber = replica.subscribe(0, "s-0")
        await replica.report(Phase.AGREED)
        await replica.report(Phase.COMMITTED)
        body = await replica.phase("Committed")
        assert body["metadata"]["name"] == NAME
        assert body["spec"]["jobSet"] == {"name": "train", "uid": JOBSET_UID}
        assert (body["spec"]["epoch"], body["spec"]["cause"]) == (1, "SpotTermination")
        assert body["spec"]["signal"] == "a notice without a record, as the gang reports"
        assert (body["spec"]["nodes"], body["spec"]["pods"]) == ([], [])
        # Told 0.3 s ago: the last stage that it reports came so long after the notice.
        assert body["spec"]["observedAt"] == format_time(NOW - 0.3)
        seconds = {timing["stage"]: timing["seconds"] for timing in body["status"]["timings"]}
        assert seconds == {"frozen": 0.2, "agreed": 0.3}
        assert (body["status"]["step"], body["status"]["acknowledgements"]["expected"]) == (40, 2)
        assert await frames(subscriber) == []  # the gang knows


async def test_two_reports_of_a_lost_notice_at_once_make_one_record(
    api: HistoricApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = api.get

    async def after_a_while(*about: Any) -> client.JsonObject:
        await asyncio.sleep(0)  # others come in between, as they do while an API server answers
        return await get(*about)

    monkeypatch.setattr(api, "get", after_a_while)
    async with without_twin(api, clock) as replica:
        await asyncio.gather(*(replica.report(phase) for phase in (Phase.FROZEN, Phase.AGREED)))
        await replica.phase("Agreed")
        assert len(replica.preemptions) == 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(f"train-{JOBSET_UID[:8]}-2", id="not the next epoch"),
        pytest.param("other-0b6f1c9e-1", id="another JobSet's"),
        pytest.param("../../secrets/x", id="no name"),
    ],
)
async def test_a_report_about_what_was_never_announced_is_refused(api: HistoricApi, clock: Clock, name: str) -> None:
    async with without_twin(api, clock) as replica:
        with pytest.raises(UnknownPreemption):
            await replica.report(Phase.COMMITTED, preemption=name)
        assert replica.preemptions == []


async def test_a_gang_that_is_in_a_preemption_cannot_name_the_next_one(api: HistoricApi, clock: Clock) -> None:
    async with without_twin(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        with pytest.raises(UnknownPreemption):
            await replica.report(Phase.COMMITTED, preemption=f"train-{JOBSET_UID[:8]}-2")
        assert len(replica.preemptions) == 1


async def test_a_lost_notice_cannot_be_older_than_the_pod_that_reports_it(api: HistoricApi, clock: Clock) -> None:
    async with without_twin(api, clock) as replica:
        pod = replica.core.cache.objects.pods["uid-pod-0-0"]
        forever = dataclasses.replace(report(Phase.AGREED), stages={"frozen": StageTiming(p50_s=1e18, max_s=1e18)})
        await replica.core.reports.take(pod, forever)
        body = await replica.phase("Agreed")
        assert body["spec"]["observedAt"] == objects.stamp(pod.created_at)


async def test_repeated_report_of_a_deleted_jobset_is_refused(api: HistoricApi, clock: Clock) -> None:
    async with without_twin(api, clock) as replica:
        api.remove(JOBSETS, objects.jobset())  # the watch has not said so yet
        with pytest.raises(UnknownPreemption):
            await replica.report(Phase.COMMITTED)
        assert replica.preemptions == []


class RefusingApi(HistoricApi):
    """An API server that may refuse to create a Preemption: with the error ``refusal``."""

    refusal: client.KubeError | None = None

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if self.refusal is not None and method == "POST" and path.endswith(f"/{kinds.PREEMPTIONS.plural}"):
            raise self.refusal

    @property
    def attempts(self) -> int:
        """How often somebody tried to create a Preemption."""
        return self.calls.count(f"POST {kinds.PREEMPTIONS.path(objects.NAMESPACE)}")


def unrecorded(replica: Replica) -> float | None:
    return replica.metrics.registry.get_sample_value("gracepoint_preemptions_unrecorded")


async def test_a_record_is_this_replica_s_own_before_its_creation_is_answered(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the limit for signals that are not certain would not count it, if the watch brings it first."""
    api, was_own = HistoricApi(clock), list[bool]()
    async with running(api, clock) as replica:

        def stored(body: client.JsonObject) -> None:
            if body.get("kind") == "Preemption":
                was_own.append((objects.NAMESPACE, NAME) in replica.core.writers.preemptions.made)

        monkeypatch.setattr(api, "store", stored)
        replica.taint()
        await replica.phase("Noticed")
    assert was_own[0]


async def test_a_record_that_was_never_made_goes_with_its_namespace(clock: Clock) -> None:
    api = RefusingApi(clock)
    api.refusal = client.Refused("HTTP 403 Forbidden: namespace team-a is being terminated")
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0)
        replica.taint()
        assert len(await frames(subscriber)) == 1
        await until(lambda: unrecorded(replica) == 1, "the refusal")
        for index in (0, 1):
            replica.drop(kinds.PODS, objects.pod(index))
        replica.drop(kinds.JOBS, objects.job())
        replica.drop(JOBSETS, objects.jobset())
        replica.drop(kinds.POLICIES, objects.policy())
        preemptions = replica.core.cache.preemptions.records
        await until(lambda: [preemption.phase for preemption in preemptions.values()] == [Phase.RETRACTED], "its end")
        api.remove(kinds.NAMESPACES, objects.namespace())
        api.refusal = client.NotFound('HTTP 404 Not Found: namespaces "team-a" not found')
        attempts = api.attempts
        await until(lambda: not writes_under_way("preemption"), "the writes to end")
        assert api.attempts == attempts + 1
        assert preemptions == {}
        assert unrecorded(replica) == 0
        assert kept_of(replica, (objects.NAMESPACE, NAME)) == []


async def test_a_record_waits_until_its_kind_is_served(clock: Clock) -> None:
    api = RefusingApi(clock)
    api.refusal = client.NotFound("HTTP 404 Not Found: the server could not find the requested resource")
    async with running(api, clock) as replica:
        replica.taint()
        await until(lambda: api.attempts > 1, "another attempt")
        api.refusal = None
        await replica.phase("Noticed")
