"""From a watch event to the frames in a subscriber's queue and the record in the API."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from gracepoint.wire import names
from gracepoint.wire.frames import Notice, Retraction
from gracepoint.wire.messages import Acknowledgement, Confidence, Forecast, Mode, Phase
from gracepoint_operator import controller
from gracepoint_operator.cache.relister import sweep
from gracepoint_operator.channel.reports import UnknownPreemption
from gracepoint_operator.controller import Reconciler, Steps
from gracepoint_operator.decisions.decide import End, Move, Reached, StartPreemption
from gracepoint_operator.decisions.effective_signals import SIGNALS_COME_S
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, NOW, Clock
from tests.unit.operator.fakes.replica import (
    Replica,
    cluster,
    frames,
    kept_of,
    report,
    resumption,
    running,
    started,
    until,
)

NAME = f"train-{JOBSET_UID[:8]}-1"


def timings(body: client.JsonObject) -> dict[str, float]:
    return {item["stage"]: item["seconds"] for item in body["status"].get("timings", [])}


def condition(body: client.JsonObject, kind: str) -> client.JsonObject:
    found: list[client.JsonObject] = body["status"].get("conditions", [])
    return next(item for item in found if item["type"] == kind)


async def test_a_taint_notifies_every_process_of_the_gang_and_is_recorded(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        gang = [replica.subscribe(index, f"s-{index}") for index in (0, 1)]
        replica.taint()
        await until(lambda: replica.core.cache.preemptions.records, "the decision")
        clock.move(0.25)
        for index, subscriber in enumerate(gang):
            (notice,) = await frames(subscriber)
            assert notice == Notice(
                preemption=NAME,
                pod_uid=f"uid-pod-{index}-0",
                session=f"s-{index}",
                workload_uid=JOBSET_UID,
                cause="SpotTermination",
                signal=f"taint {objects.GKE_TAINT}:NoSchedule",
                confidence=Confidence.SURE,
                nodes=["node-1"],
                remaining_s=14.75,
                deadline="2026-03-01T12:00:15.000000Z",
                mode=Mode.ENFORCE,
                revision=1772366415000,  # the deadline, in milliseconds
            )
        body = await replica.phase("Noticed")
        assert body["metadata"]["name"] == NAME
        assert body["spec"]["policy"]["spec"]["mode"] == "Enforce"
        assert body["status"]["acknowledgements"]["expected"] == 2
        await until(lambda: replica.reasons == ["PreemptionNoticed"], "the Event")


async def test_nobody_is_notified_in_mode_observe(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, mode="Observe")
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        replica.taint()
        body = await replica.phase("Noticed")
        assert body["spec"]["mode"] == "Observe"
        assert await frames(subscriber) == []
        clock.move(60)
        await replica.phase("Expired")
        assert await frames(subscriber) == []


async def test_notices_do_not_wait_for_an_api_that_is_down(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        await until(lambda: "status" in api.of(kinds.POLICIES)[0], "the policy's status")
        replica.api.failing = [client.Unavailable("down")] * 5
        replica.taint()
        await until(lambda: replica.core.cache.preemptions.records, "the decision")
        assert len(await frames(subscriber)) == 1
        await replica.phase("Noticed")  # once it is back


async def test_reports_move_the_phase_with_figures_and_timings_since_the_signal(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        gang = [replica.subscribe(index, f"s-{index}") for index in (0, 1)]
        replica.taint()
        await until(lambda: replica.core.cache.preemptions.records, "the decision")
        clock.move(0.1)
        for subscriber in gang:
            await frames(subscriber)
        for phase in (Phase.FROZEN, Phase.AGREED, Phase.COMMITTED):
            await replica.report(phase)
        body = await replica.phase("Committed")
        status = body["status"]
        assert (status["step"], status["ordinal"], status["bytes"]) == (40, 41, 1024)
        assert (status["stepsLost"], status["secondsToSpare"], status["processes"]) == (0, 9.5, 2)
        assert timings(body)["noticeSent"] == pytest.approx(0.1)
        assert timings(body)["frozen"] == pytest.approx(0.3)
        assert timings(body)["agreed"] == pytest.approx(0.4)
        assert condition(body, "Ended")["reason"] == "Committed"
        await until(lambda: "CheckpointCommitted" in replica.reasons, "the Event")
        assert replica.reasons.count("CheckpointCommitted") == 1


async def test_a_late_report_does_not_move_the_phase_back(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")
        await replica.report(Phase.DRAINED)
        await replica.report(Phase.FAILED)
        preemption = replica.core.cache.preemptions.records[NAMESPACE, NAME]
        assert preemption.phase is Phase.COMMITTED


@pytest.mark.parametrize("grace_s", [10, 30], ids=["the deadline stays", "the node's deadline is nearer"])
async def test_a_sigterm_that_only_the_gang_saw_gets_the_cause_that_its_node_says_a_moment_later(
    api: MemoryApi, clock: Clock, grace_s: int
) -> None:
    for index in (0, 1):
        body = objects.pod(index)
        api.add(kinds.PODS, {**body, "spec": {**body["spec"], "terminationGracePeriodSeconds": grace_s}})
    async with running(api, clock) as replica:
        told = dataclasses.replace(report(Phase.FROZEN, preemption=""), cause="PodDeletion")
        await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], told)
        assert (await replica.phase("Frozen"))["spec"]["cause"] == "PodDeletion"
        clock.move(1)
        replica.see(kinds.NODES, objects.node(conditions=[objects.shutdown()]))
        await until(lambda: replica.preemptions[0]["spec"]["cause"] == "NodeShutdown", "the cause to be corrected")
        for _ in range(20):  # what was written is seen, and leads to no other write
            replica.watches_bring(*replica.preemptions)
            await asyncio.sleep(0.01)
        spec = replica.preemptions[0]["spec"]
        assert (spec["cause"], spec["moves"]) == ("NodeShutdown", 1)


async def test_acknowledgements_are_counted_over_replicas_and_laggards_named(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        gang = [replica.subscribe(index, f"s-{index}") for index in (0, 1)]
        replica.taint()
        await until(lambda: replica.core.cache.preemptions.records, "the decision")
        for subscriber in gang:
            await frames(subscriber)
        await acknowledge(replica, 0)
        await until(lambda: received(replica) == 1, "one receipt")
        assert acknowledgements(replica)["laggards"] == [{"pod": "train-workers-0-1-0xyz", "lags": "NotAcknowledged"}]
        clock.move(0.5)
        await acknowledge(replica, 1)
        await until(lambda: received(replica) == 2, "both receipts")
        assert acknowledgements(replica)["laggards"] == []
        assert timings(replica.preemptions[0])["lastAck"] == pytest.approx(0.5)


async def acknowledge(replica: Replica, index: int) -> None:
    pod = replica.core.cache.objects.pods[f"uid-pod-{index}-0"]
    message = Acknowledgement(pod_uid=pod.uid, session=f"s-{index}", preemption=NAME, process_index=index)
    await replica.core.reports.take(pod, message)


def acknowledgements(replica: Replica) -> client.JsonObject:
    (body,) = replica.preemptions
    found: client.JsonObject = body.get("status", {}).get("acknowledgements", {"received": 0})
    return found


def received(replica: Replica) -> int:
    return int(acknowledgements(replica)["received"])


async def test_an_acknowledgement_of_an_unknown_preemption_is_refused(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.core.reports.other_replica_s = 0.0
        with pytest.raises(UnknownPreemption, match="train-0b6f1c9e-1"):
            await acknowledge(replica, 0)


async def test_vanished_signal_is_retracted_from_all_who_may_know(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        told = replica.subscribe(0)
        replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
        await replica.phase("Noticed")
        replica.watches_bring(*replica.preemptions)  # its own record is no news
        replica.see(kinds.NODES, objects.node("node-1"))
        await replica.phase("Retracted")
        returned = replica.subscribe(1, "s-1")  # it may have been told by its connection before, or by the twin
        notice, retraction = await frames(told)
        assert isinstance(notice, Notice)
        assert notice.confidence is Confidence.LIKELY
        assert retraction == Retraction(
            preemption=NAME,
            pod_uid="uid-pod-0-0",
            session="s-0",
            reason="the signal went away: taint node.kubernetes.io/not-ready:NoExecute",
        )
        assert [type(frame) for frame in await frames(returned)] == [Retraction]
        await until(lambda: "PreemptionRetracted" in replica.reasons, "the Event")


async def see_learned(replica: Replica) -> client.JsonObject:
    """The replica gets the record of another one, and then sees its signal. Returns the record."""
    record = objects.preemption(cancelable=True, deadline_at=NOW + 300)
    record["spec"]["signal"] = "taint node.kubernetes.io/not-ready:NoExecute"
    replica.see(kinds.PREEMPTIONS, record)
    replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
    await until(lambda: any(known.seen for known in replica.core.cache.preemptions.records.values()), "the taint")
    return record


async def test_a_signal_that_both_replicas_saw_is_retracted_by_the_one_that_lives(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await see_learned(replica)
        clock.move(3)
        replica.see(kinds.NODES, objects.node("node-1"))
        await replica.phase("Retracted")


async def test_a_signal_that_went_away_is_not_taken_for_a_later_one_of_the_same_pod(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock) as replica:
        record = await see_learned(replica)
        record["spec"] |= {"signal": "taint of a device", "deadline": objects.stamp(NOW + 30), "moves": 1}
        replica.see(kinds.PREEMPTIONS, record)
        replica.see(kinds.NODES, objects.node("node-1"))
        told = replica.subscribe(0)
        assert not any(isinstance(frame, Retraction) for frame in await frames(told))
        clock.move(SIGNALS_COME_S + 0.1)
        await replica.phase("Retracted")


async def test_a_nearer_signal_that_comes_and_goes_does_not_retract_one_that_was_not_seen(
    api: MemoryApi, clock: Clock
) -> None:
    record = objects.preemption(cancelable=True, deadline_at=NOW + 900)
    record["spec"]["signal"] = "taint of a device"
    async with running(api, clock) as replica:
        replica.see(kinds.PREEMPTIONS, record)
        replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
        await until(lambda: replica.preemptions[0]["spec"]["moves"] == 1, "the nearer deadline")
        replica.see(kinds.NODES, objects.node("node-1"))
        told = replica.subscribe(0)
        assert not any(isinstance(frame, Retraction) for frame in await frames(told))
        clock.move(SIGNALS_COME_S + 0.1)
        await replica.phase("Retracted")


async def test_a_record_that_comes_before_its_signal_is_not_retracted(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        told = replica.subscribe(0)
        replica.see(kinds.PREEMPTIONS, objects.preemption(cancelable=True, deadline_at=NOW + 300))
        (notice,) = await frames(told)
        assert isinstance(notice, Notice)
        clock.move(0.075)
        replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
        assert await frames(told) == []
        assert [body["metadata"]["name"] for body in replica.preemptions] in ([], [NAME])


async def test_a_retraction_that_came_during_an_outage_is_sent_on_the_return(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        told = replica.subscribe(0)
        replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
        await replica.phase("Noticed")
        await frames(told)
        replica.core.subscribers.remove(told)
        replica.see(kinds.NODES, objects.node("node-1"))
        await replica.phase("Retracted")
        for _ in range(2):  # an outage after it, as well
            returned = replica.subscribe(0)
            (frame,) = await frames(returned)
            assert isinstance(frame, Retraction)
            assert frame.preemption == NAME


async def test_a_returning_process_is_notified_only_of_the_newest_retractions(api: MemoryApi, clock: Clock) -> None:
    for number in range(1, 41):
        api.add(kinds.PREEMPTIONS, objects.preemption(number, phase="Retracted", ended_at=NOW, cancelable=True))
    async with running(api, clock) as replica:
        returned = replica.subscribe(0)
        told = [frame.preemption for frame in await frames(returned) if isinstance(frame, Retraction)]
        assert told == [f"train-{JOBSET_UID[:8]}-{number}" for number in range(33, 41)]
        for preemption in replica.core.cache.preemptions.of_workload(JOBSET_UID):
            replica.core.notifier.notify(preemption)  # as a listing of all of them brings about
        assert await frames(returned) == []


async def test_a_deadline_that_is_put_off_is_sent_as_well(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        replica.see(kinds.REQUESTS, objects.request(deadlineSeconds=300))
        await replica.phase_of(NAME, "Noticed")
        replica.see(kinds.REQUESTS, objects.request(deadlineSeconds=900))
        await until(lambda: replica.named(NAME)["spec"]["moves"] == 1, "the record of it")
        remaining = [frame.remaining_s for frame in await frames(subscriber) if isinstance(frame, Notice)]
        assert remaining == [900.0] or remaining == [300.0, 900.0]


async def test_a_request_that_is_put_off_is_not_held_up_by_a_replica_that_sees_it_late(
    api: MemoryApi, clock: Clock
) -> None:
    cluster(api)
    async with running(api, clock, "first") as first, running(api, clock, "late") as late:

        async def deadline_in(seconds: float) -> None:
            def is_so() -> bool:
                first.watches_bring(*api.of(kinds.PREEMPTIONS))
                late.watches_bring(*api.of(kinds.PREEMPTIONS))
                return [body["spec"]["deadline"] for body in first.preemptions] == [objects.stamp(NOW + seconds)]

            await until(is_so, f"a deadline in {seconds:.0f} s")

        first.see(kinds.REQUESTS, objects.request(deadlineSeconds=30))
        late.watches_bring(*api.of(kinds.REQUESTS))
        await deadline_in(30)
        clock.move(2)
        first.see(kinds.REQUESTS, objects.request(deadlineSeconds=600))
        await until(lambda: first.preemptions[0]["spec"]["moves"] == 1, "the first replica to put it off")
        await deadline_in(30)  # as the late one knows the request
        late.watches_bring(*api.of(kinds.REQUESTS))
        await deadline_in(600)


async def test_gang_training_to_its_limit_is_notified_to_leave_with_its_node(api: MemoryApi, clock: Clock) -> None:
    limited = objects.job() | {
        "spec": {"completions": 2, "activeDeadlineSeconds": 1000},
        "status": {"startTime": objects.stamp(NOW - 100)},
    }
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        replica.see(kinds.JOBS, limited)
        assert (await replica.phase_of(NAME, "Noticed"))["spec"]["exits"] is False
        replica.taint()
        await replica.phase_of(NAME, "Retracted")
        second = await replica.phase_of(f"{NAME[:-1]}2", "Noticed")
        assert (second["spec"]["exits"], second["spec"]["cause"]) == (True, "SpotTermination")
        told = [
            (frame.preemption, frame.mode if isinstance(frame, Notice) else type(frame))
            for frame in await frames(subscriber)
            if isinstance(frame, Notice | Retraction)
        ]
        assert told == [(NAME, Mode.DRILL), (NAME, Retraction), (second["metadata"]["name"], Mode.ENFORCE)]
        await until(lambda: replica.reasons.count("PreemptionNoticed") == 2, "the Events")
        assert "TimeLimit" in replica.reasons


async def test_a_request_is_answered_where_it_stands(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        replica.see(kinds.REQUESTS, objects.request(mode="Drill"))
        await replica.phase_of("leave", "Adopted", seen=True)
        assert replica.named("leave")["status"]["preemption"] == NAME
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert notice.mode is Mode.DRILL
        await replica.report(Phase.COMMITTED)
        await replica.phase_of("leave", "Committed", seen=True)


async def test_a_request_for_no_jobset_is_answered_after_a_while(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.REQUESTS, objects.request(jobset="nobody"))
        await asyncio.sleep(0.05)
        assert "status" not in replica.named("leave")  # the JobSet may be on its way
        clock.move(6)
        await replica.phase_of("leave", "Superseded")
        assert "there is no JobSet nobody" in replica.named("leave")["status"]["message"]


async def test_gang_over_the_exit_limit_saves_and_trains_on(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, exitBreaker={"savedExits": 1, "withinSeconds": 600})
    before = objects.preemption(phase="Committed", created_at=NOW - 300, ended_at=NOW - 290, pods=[])
    api.add(kinds.PREEMPTIONS, before)
    second = f"train-{JOBSET_UID[:8]}-2"
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        replica.taint()
        body = await replica.phase_of(second, "Noticed")
        assert (body["spec"]["mode"], body["spec"]["exits"]) == ("Enforce", False)
        assert condition(body, "Exits")["reason"] == "ExitBreakerOpen"
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert notice.mode is Mode.DRILL
        await until(lambda: "ExitBreakerOpen" in replica.reasons, "the Event")


def others_were_told(api: MemoryApi, number: int, *, jobset: bool = True) -> None:
    """Another gang of the namespace was told just now of what is not sure; or somebody forged that."""
    other = objects.preemption(number)
    other["spec"] |= {"confidence": "likely", "jobSet": {"name": f"other-{number}", "uid": f"uid-jobset-{number}"}}
    other["metadata"] |= {"name": f"other-{number}", "uid": f"uid-other-{number}"}
    api.add(kinds.PREEMPTIONS, other)
    if jobset:
        body = objects.jobset(uid=f"uid-jobset-{number}")
        body["metadata"]["name"] = f"other-{number}"
        api.add(JOBSETS, body)


async def test_records_of_gangs_that_are_not_there_hold_nobody_back(api: MemoryApi, clock: Clock) -> None:
    for number in range(1, 11):
        others_were_told(api, number, jobset=False)
    async with running(api, clock) as replica:
        replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
        await until(lambda: (NAMESPACE, NAME) in replica.core.cache.preemptions.records, "the epoch")


async def test_a_gang_waits_while_many_are_notified_of_what_is_not_sure(api: MemoryApi, clock: Clock) -> None:
    for number in range(1, 11):
        others_were_told(api, number)
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
        await until(lambda: "node-1" in replica.core.cache.objects.disrupted_nodes, "the taint to be seen")
        await asyncio.sleep(0.05)
        assert await frames(subscriber) == []
        clock.move(60)
        await until(lambda: (NAMESPACE, NAME) in replica.core.cache.preemptions.records, "its turn")
        assert len(await frames(subscriber)) == 1


async def test_a_deadline_that_moves_is_sent_again_under_the_same_name(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        replica.taint("node-1", "node.kubernetes.io/not-ready", "NoExecute")
        await replica.phase("Noticed")
        replica.taint("node-2")
        await until(lambda: replica.preemptions[0]["spec"]["deadline"] < "2026-03-01T12:01", "the new deadline")
        first, second = await frames(subscriber)
        assert isinstance(first, Notice)
        assert isinstance(second, Notice)
        assert (first.preemption, second.preemption) == (NAME, NAME)
        assert (first.remaining_s, second.remaining_s) == (300, 15)


async def test_a_subscriber_that_comes_later_gets_the_open_notice(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        clock.move(4)
        (notice,) = await frames(replica.subscribe())
        assert isinstance(notice, Notice)
        assert notice.remaining_s == 11


async def test_a_restarted_operator_continues_to_notify_under_the_same_name(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
    clock.move(1)
    async with running(api, clock, "replica-b") as replica:
        (notice,) = await frames(replica.subscribe())
        assert isinstance(notice, Notice)
        assert (notice.preemption, notice.remaining_s) == (NAME, 14)
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")
        assert len(replica.preemptions) == 1


async def test_the_twin_notifies_its_own_subscribers_and_adds_its_own_entry(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        one, two = first.subscribe(0, "s-0"), second.subscribe(1, "s-1")
        first.taint()
        await first.phase("Noticed")
        second.core.feed(kinds.PREEMPTIONS, "ADDED", api.of(kinds.PREEMPTIONS)[0])
        await until(lambda: second.core.cache.preemptions.records, "the watch")
        assert len(await frames(one)) == 1
        assert len(await frames(two)) == 1
        await until(lambda: len(entries(api)) == 2, "both entries")
        assert {name: entry["told"] for name, entry in entries(api).items()} == {"replica-a": 1, "replica-b": 1}


def entries(api: MemoryApi) -> dict[str, client.JsonObject]:
    (body,) = api.of(kinds.PREEMPTIONS)
    return {entry["name"]: entry for entry in body.get("status", {}).get("replicas", [])}


async def test_two_replicas_that_decide_at_once_make_one_object_and_one_event(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        one, two = first.subscribe(0, "s-0"), second.subscribe(1, "s-1")
        node = api.add(kinds.NODES, objects.node("node-1", taints=[objects.taint()]))
        first.core.feed(kinds.NODES, "MODIFIED", node)
        second.core.feed(kinds.NODES, "MODIFIED", node)
        await first.phase("Noticed")
        assert len(await frames(one)) == 1
        assert len(await frames(two)) == 1
        await until(lambda: len(entries(api)) == 2, "both entries")
        assert len(api.of(kinds.PREEMPTIONS)) == 1
        assert first.reasons == ["PreemptionNoticed"]


async def test_deleted_pod_is_read_again_and_a_restart_is_no_disruption(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        api.add(JOBSETS, objects.jobset(restarts=1))  # the watch has not brought it yet
        replica.see(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
        await until(lambda: replica.core.cache.objects.workloads[JOBSET_UID].restarts == 1, "the fresh look")
        assert await frames(subscriber) == []
        assert replica.preemptions == []


async def test_a_pod_that_somebody_deleted_disrupts_the_gang(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1, "s-1")
        replica.see(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
        body = await replica.phase("Noticed")
        assert body["spec"]["cause"] == "PodDeletion"
        assert len(await frames(subscriber)) == 1


async def test_a_deleted_pod_is_believed_where_the_api_does_not_answer(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await until(lambda: "status" in api.of(kinds.POLICIES)[0], "the policy's status")
        api.failing = [client.Unavailable("down")] * 3
        replica.see(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
        await replica.phase("Noticed")


async def test_gang_informed_by_sigterm_gets_a_record_and_no_notice(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe()
        await replica.report(Phase.AGREED, preemption="")
        await replica.report(Phase.COMMITTED, preemption="")
        body = await replica.phase("Committed")
        assert body["spec"]["cause"] == "SpotTermination"
        assert body["spec"]["signal"].startswith("SIGTERM")
        assert await frames(subscriber) == []
        assert len(replica.preemptions) == 1


async def test_a_gang_that_learnt_by_sigterm_of_a_restart_gets_no_record(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        api.add(JOBSETS, objects.jobset(restarts=1))
        await replica.report(Phase.COMMITTED, preemption="")
        assert replica.core.cache.preemptions.records == {}


async def test_nameless_reports_at_the_same_moment_are_of_one_preemption(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = api.get

    async def after_a_while(*about: Any) -> client.JsonObject:
        await asyncio.sleep(0)  # others come in between, as they do while an API server answers
        return await get(*about)

    monkeypatch.setattr(api, "get", after_a_while)
    async with running(api, clock) as replica:
        await asyncio.gather(*(replica.report(phase, preemption="") for phase in (Phase.FROZEN, Phase.AGREED)))
        await replica.phase("Agreed")
        assert len(replica.preemptions) == 1


async def test_a_nameless_report_goes_to_the_preemption_that_is_in_progress(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.COMMITTED, preemption="")
        await replica.phase("Committed")
        assert len(replica.preemptions) == 1


async def test_the_restarted_gang_says_from_where_it_continues(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")
        clock.move(8)
        replica.see(JOBSETS, objects.jobset(restarts=1))
        replica.drop(kinds.JOBS, objects.job())
        replica.see(kinds.JOBS, objects.job(attempt=1))
        for index in (0, 1):
            replica.drop(kinds.PODS, objects.pod(index))
            body = objects.pod(index, attempt=1, on="node-2", created_at=clock())
            replica.see(kinds.PODS, body)
        await until(lambda: "uid-pod-0-1" in replica.core.cache.objects.pods, "the new pods")
        assert await frames(replica.subscribe(0, "s-9", attempt=1)) == []
        pod = replica.core.cache.objects.pods["uid-pod-0-1"]
        for training in (False, True):
            clock.move(1)
            # On its way, while the replica that it was sent to had gone.
            message = resumption(training=training, age_s=0.5)
            await replica.core.reports.take(pod, dataclasses.replace(message, session="s-9"))
        await until(lambda: "training" in timings(replica.preemptions[0]), "the stage")
        body = replica.preemptions[0]
        assert body["status"]["restoredStep"] == 40
        assert timings(body)["exited"] == timings(body)["podsBack"] == pytest.approx(8)
        assert timings(body)["restored"] == pytest.approx(8.5)
        assert timings(body)["training"] == pytest.approx(9.5)
        await until(lambda: "Resumed" in replica.reasons, "the Event")
        assert len(replica.preemptions) == 1


@pytest.mark.parametrize(
    ("save_s", "send_s", "status", "reason"),
    [
        pytest.param(10.0, None, "True", "Fits", id="fits"),
        pytest.param(10.0, 60.0, "True", "Fits", id="fits, and servers are slower"),
        pytest.param(60.0, None, "False", "TooSlow", id="too slow"),
        pytest.param(60.0, 50.0, "False", "TooSlow", id="too slow both ways"),
        pytest.param(60.0, 10.0, "True", "FitsInMemory", id="only servers are quick enough"),
    ],
)
async def test_the_policy_says_whether_an_emergency_fits_into_the_grace_period(
    api: MemoryApi, clock: Clock, save_s: float, send_s: float | None, status: str, reason: str
) -> None:
    async with running(api, clock) as replica:
        await until(lambda: "status" in api.of(kinds.POLICIES)[0], "the policy's status")
        (policy,) = api.of(kinds.POLICIES)
        assert condition(policy, "Ready")["status"] == "True"
        assert condition(policy, "FitsGrace")["status"] == "Unknown"
        assert policy["status"]["jobSets"] == {"count": 1, "names": ["train"]}
        figures = dataclasses.replace(forecast(save_s=save_s), send_s=send_s)
        await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], figures)
        await until(lambda: condition(api.of(kinds.POLICIES)[0], "FitsGrace")["status"] == status, "the condition")
        found = condition(api.of(kinds.POLICIES)[0], "FitsGrace")
        assert found["reason"] == reason
        assert "30 s granted" in found["message"]


async def test_an_unreadable_policy_is_left_out_and_harms_no_other(api: MemoryApi, clock: Clock) -> None:
    wrong = objects.policy(deadline={"margin": 0})
    wrong["metadata"].update(name="newer", uid="uid-newer")
    api.add(kinds.POLICIES, wrong)
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")


async def test_a_sweep_finds_what_was_deleted_while_nobody_watched(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        api.remove(kinds.PODS, objects.pod(1))
        await sweep(api, replica.core.cache, replica.core.cache.drop, replica.core.watches)
        assert set(replica.core.cache.objects.pods) == {"uid-pod-0-0"}


def is_doomed(replica: Replica) -> bool:
    """True once it is known that the namespace is being deleted."""
    workload = replica.core.cache.gang(JOBSET_UID).workload
    return workload is not None and workload.deleted


async def test_a_pod_that_goes_with_its_namespace_is_no_disruption(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1, "s-1")
        api.add(kinds.NAMESPACES, objects.namespace(deleted=True))
        replica.see(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
        await until(lambda: is_doomed(replica), "the fresh look")
        replica.see(JOBSETS, objects.jobset())  # its status changes while it is still there
        replica.see(kinds.PODS, objects.pod(1, deleting_at=NOW + 30))
        await until(lambda: replica.core.cache.objects.pods["uid-pod-1-0"].deletion_at, "the watch")
        assert await frames(subscriber) == []
        await replica.report(Phase.COMMITTED, preemption="")
        assert replica.preemptions == []


async def test_a_slow_api_delays_belief_in_a_deletion_only_shortly(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1, "s-1")
        hanging = asyncio.Event()

        async def get(*_: object) -> client.JsonObject:
            await hanging.wait()
            raise client.Unavailable("too late")

        monkeypatch.setattr(api, "get", get)
        replica.see(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
        await until(lambda: replica.core.cache.preemptions.records, "the decision")
        hanging.set()
        assert len(await frames(subscriber)) == 1


async def test_many_events_that_waited_bring_about_one_decision(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[str] = []

    def decide(reconciler: Reconciler, uid: str) -> Steps:
        decided.append(uid)
        yield
        return None

    monkeypatch.setattr(Reconciler, "decide", decide)
    async with running(api, clock) as replica:
        await until(lambda: decided, "the decision after the first list")
        decided.clear()
        for number in range(50):
            replica.see(kinds.PODS, objects.pod(0, phase=("Failed", "Running")[number % 2]))
        await until(lambda: decided, "the decision")
        assert decided == [JOBSET_UID]


async def test_of_a_large_gang_what_is_only_recorded_comes_after_other_work_of_the_loop(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "SLICE_S", 0.0)
    monkeypatch.setattr(controller, "MANY_PODS", 1)  # it has two
    order: list[str] = []
    async with running(api, clock) as replica:
        subscriber, writers = replica.subscribe(), replica.core.writers
        await until(lambda: "status" in api.of(kinds.POLICIES)[0], "the policy's status")
        carry_out, observe = replica.core.notifier.carry_out, writers.policies.goodput.observe

        def carried_out(decision: StartPreemption | Move | End | Reached) -> None:
            carry_out(decision)
            order.append("carried out")
            asyncio.get_running_loop().call_soon(order.append, "other work")

        def observed(gang: GangSnapshot) -> float | None:
            order.append(f"observed with {len(gang.preemptions)}")
            return observe(gang)

        monkeypatch.setattr(replica.core.notifier, "carry_out", carried_out)
        monkeypatch.setattr(writers.policies.goodput, "observe", observed)
        replica.taint()
        await until(lambda: len(order) >= 3, "the whole decision")
        assert order[:3] == ["carried out", "other work", "observed with 1"]
        assert len(await frames(subscriber)) == 1


def forecast(workload_uid: str = JOBSET_UID, save_s: float = 10.0) -> Forecast:
    return Forecast(
        pod_uid="uid-pod-0-0",
        session="s-0",
        workload_uid=workload_uid,
        state_bytes=10**9,
        step_s=0.5,
        drain_s=1.0,
        save_s=save_s,
        margin=1.25,
    )


def fits(api: MemoryApi) -> client.JsonObject:
    return condition(api.of(kinds.POLICIES)[0], "FitsGrace")


def policy_writes(api: MemoryApi) -> int:
    return sum(call.startswith("PATCH") and call.endswith("checkpointpolicies/careful/status") for call in api.calls)


async def test_replicas_with_different_forecasts_agree_on_the_newest(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        replicas = (first, second)

        def seen_by_both() -> None:
            for replica in replicas:
                replica.core.feed(kinds.POLICIES, "MODIFIED", api.of(kinds.POLICIES)[0])

        for replica, save_s in zip(replicas, (10.0, 60.0), strict=True):
            clock.move(1)
            await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], forecast(save_s=save_s))
            status = "True" if save_s < 30 else "False"
            await until(lambda expected=status: fits(api)["status"] == expected, "the condition")  # type: ignore[misc]
            seen_by_both()
        await asyncio.sleep(0.1)  # several write intervals
        before = policy_writes(api)
        for _ in range(5):
            seen_by_both()
            await asyncio.sleep(0.05)
        assert policy_writes(api) == before
        assert fits(api)["reason"] == "TooSlow"


async def test_fits_grace_outlives_the_operator_and_forgets_jobsets_that_are_gone(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], forecast(save_s=60.0))
        await until(lambda: "status" in api.of(kinds.POLICIES)[0] and fits(api)["status"] == "False", "the condition")
    async with running(api, clock, "replica-b") as replica:
        replica.core.feed(kinds.POLICIES, "MODIFIED", api.of(kinds.POLICIES)[0])
        await asyncio.sleep(0.1)
        assert fits(api)["reason"] == "TooSlow"
        replica.drop(JOBSETS, objects.jobset())
        await until(lambda: fits(api)["reason"] == "NoForecast", "the condition")


async def test_a_jobset_that_is_older_than_its_policy_is_named_on_it(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await until(lambda: "status" in api.of(kinds.POLICIES)[0], "the policy's status")
        assert condition(api.of(kinds.POLICIES)[0], "Injected")["status"] == "True"
        replica.see(JOBSETS, objects.jobset(injected=False))
        await until(lambda: condition(api.of(kinds.POLICIES)[0], "Injected")["status"] == "False", "the condition")
        found = condition(api.of(kinds.POLICIES)[0], "Injected")
        assert found["reason"] == "CreatedBeforePolicy"
        assert "train" in found["message"]
        assert "create them again" in found["message"]


@pytest.mark.parametrize("phase", ["Retracted", "Expired"])
async def test_unobserved_second_disruption_gets_its_own_record(api: MemoryApi, clock: Clock, phase: str) -> None:
    api.add(kinds.PREEMPTIONS, objects.preemption(phase=phase, ended_at=NOW))
    clock.move(1000)
    async with running(api, clock) as replica:
        await replica.report(Phase.COMMITTED, preemption="")
        body = await replica.phase("Committed", 1)
        assert body["spec"]["epoch"] == 2
        assert replica.preemptions[0]["status"]["phase"] == phase


async def test_the_last_word_is_written_after_an_outage_of_the_api(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        api.failing = [client.Unavailable("down")] * 5
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")


async def test_record_without_an_end_is_written_again_when_seen(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        noticed = await replica.phase("Noticed")
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")
        replica.core.feed(kinds.PREEMPTIONS, None, api.add(kinds.PREEMPTIONS, noticed))  # restored from a backup
        await replica.phase("Committed")


async def test_receipts_that_come_after_the_end_are_not_written_one_by_one(api: MemoryApi, clock: Clock) -> None:
    async with started(Replica(api, clock, "replica-a", write_interval_s=30.0)) as replica:
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")
        await asyncio.sleep(0.1)
        before = len(api.calls)
        for index in (0, 1):
            await acknowledge(replica, index)
            await asyncio.sleep(0.05)
        assert received(replica) <= 1
        assert sum("PATCH" in call for call in api.calls[before:]) <= 2


async def test_what_vanished_while_nobody_watched_is_forgotten_wholly(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1, "s-1")
        api.remove(kinds.PODS, objects.pod(1))
        replica.core.watches.answered(kinds.PODS, listed=True)  # as its watch begins again
        await until(lambda: subscriber.closed, "the end of its connection")
        assert kept_of(replica, "uid-pod-1-0", replica.core.subscribers) == []


async def test_a_report_with_impossible_figures_is_a_bad_message(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        pod = replica.core.cache.objects.pods["uid-pod-0-0"]
        with pytest.raises(ValidationError, match="step"):
            await replica.core.reports.take(pod, dataclasses.replace(report(Phase.AGREED), step=-1))


async def test_jobset_without_its_label_keeps_its_preemption_until_deleted(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        bare = objects.jobset()
        del bare["metadata"]["labels"][names.LABEL_POLICY]
        replica.core.feed(JOBSETS, "DELETED", api.add(JOBSETS, bare))
        await until(
            lambda: (jobset := replica.core.cache.objects.workloads.get(JOBSET_UID)) is not None and not jobset.policy,
            "a fresh look at the JobSet",
        )
        replica.taint("node-2")
        await until(lambda: replica.preemptions[0]["spec"]["nodes"] == ["node-1", "node-2"], "the other node to join")
        assert replica.preemptions[0]["status"]["phase"] == "Noticed"
        replica.drop(JOBSETS, bare)
        body = await replica.phase("Retracted")
        assert condition(body, "Ended")["reason"] == "JobSetDeleted"


async def test_eviction_waits_for_the_save_though_the_policy_was_deleted(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        pod = objects.pod(0)["metadata"]["name"]
        assert await replica.core.evictions.attempted(NAMESPACE, pod, None) is not None
        replica.drop(kinds.POLICIES, objects.policy())
        await until(lambda: not list(replica.core.cache.policies), "the policy to be gone")
        assert await replica.core.evictions.attempted(NAMESPACE, pod, None) is not None


async def test_record_without_status_is_completed_by_the_next_replica(api: MemoryApi, clock: Clock) -> None:
    made = objects.preemption(deadline_at=NOW + 300)
    del made["status"]
    api.add(kinds.PREEMPTIONS, made)
    async with running(api, clock) as replica:
        body = await replica.phase("Noticed")
        assert body["status"]["acknowledgements"]["expected"] == 2
        assert body["status"]["message"].startswith("SpotTermination: taint")
        await until(lambda: replica.reasons == ["PreemptionNoticed"], "the Event")


async def test_a_jobset_that_was_deleted_while_no_operator_ran_ends_its_preemption(
    api: MemoryApi, clock: Clock
) -> None:
    api.add(kinds.PREEMPTIONS, objects.preemption(deadline_at=NOW + 300))
    api.remove(JOBSETS, objects.jobset())
    async with running(api, clock) as replica:
        body = await replica.phase("Retracted")
        assert condition(body, "Ended")["reason"] == "JobSetDeleted"


async def test_gang_disrupted_again_before_training_still_reports_its_return(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.PREEMPTIONS, objects.preemption(phase="Committed", ended_at=NOW))
    clock.move(10)
    api.remove(kinds.JOBS, objects.job())
    api.add(kinds.JOBS, objects.job(attempt=1))
    api.add(JOBSETS, objects.jobset(restarts=1))
    for index in (0, 1):
        api.remove(kinds.PODS, objects.pod(index))
        api.add(kinds.PODS, objects.pod(index, attempt=1, created_at=clock()))
    async with running(api, clock) as replica:
        clock.move(5)
        replica.taint()
        await replica.phase("Noticed", epoch=1)
        pod = replica.core.cache.objects.pods["uid-pod-0-1"]
        said = dataclasses.replace(resumption(training=True), session="s-0")
        await replica.core.reports.take(pod, said)
        await until(lambda: replica.preemptions[0]["status"].get("restoredStep") == 40, "the first record to say so")
        assert "restoredStep" not in replica.preemptions[1]["status"]


class OldCrds(MemoryApi):
    """A cluster whose CRDs are of an older version: it does not serve the one that the operator reads.

    Attributes:
        upgraded: Whether the CRDs of this version are there.
    """

    upgraded = False

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if path.startswith(kinds.POLICIES.prefix) and not self.upgraded:
            raise client.NotFound(f"{method} {path}: 404 page not found")


async def test_a_replica_whose_crds_are_not_served_is_not_ready_and_says_so(clock: Clock) -> None:
    """An upgrade would replace replicas that protect jobs by some that know no policy."""
    api = OldCrds(clock)
    cluster(api)
    replica = Replica(api, clock, "replica-a")
    task = asyncio.create_task(replica.core.run())
    try:
        await until(lambda: "does not serve" in (replica.core.why_not_ready() or ""), "the reason")
        assert "checkpointpolicies" in (replica.core.why_not_ready() or "")
        assert not replica.core.ready
        api.upgraded = True
        replica.core.watches.answered(kinds.POLICIES, listed=True)  # as their watch begins
        await until(lambda: replica.core.ready, "the replica to be ready")
        assert replica.core.why_not_ready() is None
        assert len(replica.core.cache.policies) == 1
    finally:
        task.cancel()
        await asyncio.wait({task})
