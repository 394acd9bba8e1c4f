"""What people and their tools are told of a preemption: EventRecorder, each once, and figures, each counted once."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import kubernetes.client
import pytest

from gracepoint.wire.frames import Frame, Notice
from gracepoint.wire.messages import Phase, StageTiming
from gracepoint_operator.decisions import policy_conditions, preemption_status, snapshot_placement, waiting
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.preemption_record import EndReason, PreemptionRecord
from gracepoint_operator.recording import event_recorder, preemption_writer, trouble_recorder
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.resources import PreemptionStatus
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Clock
from tests.unit.operator.fakes.replica import Replica, frames, report, running, until

NAME = f"train-{JOBSET_UID[:8]}-1"
PAGE = Path(__file__).parents[4] / "docs" / "observability.md"


def figure(replica: Replica, name: str, **labels: str) -> float:
    return replica.metrics.registry.get_sample_value(f"gracepoint_{name}", labels) or 0.0


def watch(replica: Replica) -> None:
    replica.core.feed(kinds.PREEMPTIONS, "MODIFIED", replica.api.of(kinds.PREEMPTIONS)[0])


async def test_a_large_gang_is_notified_in_portions(api: MemoryApi, clock: Clock) -> None:
    for index in range(2, 600):
        api.add(kinds.PODS, objects.pod(index, on="node-2"))
    async with running(api, clock) as replica:
        gang = [replica.subscribe(index, f"s-{index}") for index in range(600)]
        told: list[int] = []  # in each turn of the loop
        replica.taint()
        while (known := sum(not subscriber.is_idle for subscriber in gang)) < len(gang):
            told.append(known)
            await asyncio.sleep(0)
        assert {0, 512} <= set(told)
        assert [len(await frames(subscriber)) for subscriber in (gang[0], gang[-1])] == [1, 1]


async def test_pods_are_notified_before_the_record_is_written(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()

    async def arrives(method: str, path: str, query: Mapping[str, str]) -> None:
        if method == "POST" and path.endswith(kinds.PREEMPTIONS.plural):
            await answers.wait()

    monkeypatch.setattr(api, "arrives", arrives)
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0, "s-0")
        replica.taint()
        assert len(await frames(subscriber)) == 1
        assert api.of(kinds.PREEMPTIONS) == []
        answers.set()
    assert len(api.of(kinds.PREEMPTIONS)) == 1, "a replica that ends writes it"


async def test_pod_counts_as_notified_when_its_notice_was_written(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0, "s-0")
        replica.taint()
        outgoing = await subscriber.next()
        assert outgoing is not None
        outgoing.make()
        clock.move(3)  # the pod reads slowly
        outgoing.sent()
        clock.move(5)  # the controller's loop is busy
        outgoing.written()
        assert figure(replica, "signal_to_notice_seconds_sum") == pytest.approx(3)


async def test_events_are_in_order_on_jobset_and_preemption(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await frames(replica.subscribe(0, "s-0"))
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.AGREED)
        await replica.phase("Agreed")
        await replica.report(Phase.COMMITTED)
        story = ["PreemptionNoticed", "SaveAgreed", "CheckpointCommitted"]
        await until(lambda: replica.reasons_on("Preemption") == story, "the EventRecorder on the Preemption")
        assert replica.reasons_on("JobSet") == story
        by_name = [body["reason"] for body in api.of(kinds.EVENTS) if body["regarding"]["kind"] == "JobSet"]
        assert by_name == story, "kubectl shows them by name"
        uids = {body["regarding"]["kind"]: body["regarding"]["uid"] for body in api.of(kinds.EVENTS)}
        assert uids == {"JobSet": JOBSET_UID, "Preemption": replica.preemptions[0]["metadata"]["uid"]}


async def test_unwritten_agreement_is_reported_before_the_end(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await frames(replica.subscribe(0, "s-0"))
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.COMMITTED)
        await until(lambda: "CheckpointCommitted" in replica.reasons, "the Event")
        assert replica.reasons == ["PreemptionNoticed", "SaveAgreed", "CheckpointCommitted"]


async def test_a_deadline_that_came_nearer_is_an_event(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint(key="cloud.google.com/maintenance-window-started")
        await replica.phase("Noticed")
        replica.taint("node-2")
        await until(lambda: "DeadlineMoved" in replica.reasons, "the Event")


def reclaimed() -> tuple[objects.Body, objects.Body]:
    """A Node and its NodeClaim, which Karpenter deletes as EC2 takes a Spot machine back."""
    spot = {"karpenter.sh/capacity-type": "spot"}
    claim = objects.node_claim(deleted_at=NOW, labels=spot, expire_after="Never")
    return objects.node(deleted_at=NOW), claim


def causes(sent: Sequence[Frame]) -> list[str]:
    """The causes of notices."""
    return [frame.cause for frame in sent if isinstance(frame, Notice)]


async def test_a_cause_that_becomes_known_late_is_in_the_record_and_in_another_notice(
    api: MemoryApi, clock: Clock
) -> None:
    node, claim = reclaimed()
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0, "s-0")
        replica.see(kinds.NODES, node)
        noticed = await replica.phase("Noticed")
        assert (noticed["spec"]["cause"], causes(await frames(subscriber))) == ("ScaleDown", ["ScaleDown"])
        replica.see(kinds.NODE_CLAIMS, claim)
        said = "SpotTermination: deletion of the NodeClaim on node-1, 120 s ahead; the gang is notified"
        await until(lambda: replica.preemptions[0]["status"]["message"] == said, "the message")
        assert replica.preemptions[0]["spec"]["cause"] == "SpotTermination"
        assert causes(await frames(subscriber)) == ["SpotTermination"]
        watch(replica)
        replica.see(kinds.NODES, objects.node(deleted_at=NOW, taints=[objects.taint("karpenter.sh/disrupted")]))
        assert causes(await frames(subscriber)) == []
        await replica.report(Phase.COMMITTED)
        await replica.phase("Committed")
        labels = {"phase": "Committed", "mode": "Enforce"}
        assert figure(replica, "preemption_phases_total", cause="SpotTermination", **labels) == 1


async def test_a_cause_that_becomes_known_after_the_freeze_is_not_said(api: MemoryApi, clock: Clock) -> None:
    node, claim = reclaimed()
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0, "s-0")
        replica.see(kinds.NODES, node)
        await replica.phase("Noticed")
        await replica.report(Phase.FROZEN)
        await replica.phase("Frozen")
        assert causes(await frames(subscriber)) == ["ScaleDown"]
        replica.see(kinds.NODE_CLAIMS, claim)
        assert causes(await frames(subscriber)) == []
        assert replica.preemptions[0]["spec"]["cause"] == "ScaleDown"


async def test_replicas_that_learn_of_a_deleted_node_in_different_orders_agree_on_its_cause(
    api: MemoryApi, clock: Clock
) -> None:
    node, claim = reclaimed()
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        one, two = first.subscribe(0, "s-0"), second.subscribe(1, "s-1")
        first.see(kinds.NODES, node)
        await first.phase("Noticed")
        watch(first)
        second.see(kinds.NODE_CLAIMS, claim)
        watch(second)
        second.see(kinds.NODES, node)
        await until(lambda: first.preemptions[0]["spec"]["cause"] == "SpotTermination", "the right cause")
        watch(first)
        assert causes(await frames(one))[-1] == causes(await frames(two))[-1] == "SpotTermination"
        moves = first.preemptions[0]["spec"].get("moves", 0)
        first.see(kinds.NODES, objects.node(deleted_at=NOW, taints=[objects.taint("karpenter.sh/disrupted")]))
        first.see(kinds.NODE_CLAIMS, claim)
        for replica in (first, second, first, second):
            watch(replica)
            assert causes(await frames(one)) == causes(await frames(two)) == []
        assert first.preemptions[0]["spec"].get("moves", 0) == moves


async def test_a_replica_that_knows_less_does_not_change_the_cause(api: MemoryApi, clock: Clock) -> None:
    node, claim = reclaimed()
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        other = second.subscribe(1, "s-1")
        second.see(kinds.NODES, node)
        assert causes(await frames(other)) == ["ScaleDown"]
        await second.phase("Noticed")
        api.remove(kinds.PREEMPTIONS, second.preemptions[0])  # as if that had not been written yet
        clock.move(2)
        first.see(kinds.NODE_CLAIMS, claim)
        await first.phase("Noticed")
        watch(second)
        assert causes(await frames(other)) == ["SpotTermination"]
        second.see(kinds.PODS, objects.pod(0, disruption="EvictionByEvictionAPI"))  # which moves the deadline
        await until(lambda: first.preemptions[0]["spec"].get("moves"), "the move")
        assert first.preemptions[0]["spec"]["cause"] == "SpotTermination"


async def test_a_cause_that_becomes_known_before_the_record_is_made_is_its_only_one(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()

    async def arrives(method: str, path: str, query: Mapping[str, str]) -> None:
        if path.endswith(kinds.PREEMPTIONS.plural) and method == "POST":
            await answers.wait()

    monkeypatch.setattr(api, "arrives", arrives)
    node, claim = reclaimed()
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(0, "s-0")
        replica.see(kinds.NODES, node)
        assert causes(await frames(subscriber)) == ["ScaleDown"]
        replica.see(kinds.NODE_CLAIMS, claim)
        assert causes(await frames(subscriber)) == ["SpotTermination"]
        answers.set()
        await until(lambda: replica.preemptions and replica.preemptions[0]["spec"]["cause"] == "SpotTermination", "it")
        await until(lambda: "PreemptionNoticed" in replica.reasons, "the Event")
        for _ in range(2):
            watch(replica)
            assert causes(await frames(subscriber)) == []
        (noticed,) = {body["note"] for body in api.of(kinds.EVENTS)}
        assert "SpotTermination: deletion of the NodeClaim" in noticed


async def test_the_record_says_where_it_stands_in_a_sentence(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await frames(replica.subscribe(0, "s-0"))
        replica.taint()
        noticed = await replica.phase("Noticed")
        assert noticed["status"]["message"] == (
            f"SpotTermination: taint {objects.GKE_TAINT}:NoSchedule on node-1, 15 s ahead; the gang is notified"
        )
        pod = replica.core.cache.objects.pods["uid-pod-0-0"]
        said = {
            Phase.FROZEN: "every process is held at its next sync point",
            Phase.AGREED: "all processes save at their sync point 41",
            Phase.DRAINED: "all processes have reached step 40, and their devices are idle",
            Phase.WRITTEN: "every process has written its part of step 40",
            Phase.DURABLE: "all parts of step 40 are on stable storage",
            Phase.COMMITTED: "step 40 is saved, 0 steps lost, 9.5 s to spare",
        }
        for phase, message in said.items():
            await replica.core.reports.take(pod, dataclasses.replace(report(phase), message=""))
            assert (await replica.phase(phase))["status"]["message"] == message


async def test_an_event_that_is_posted_again_is_the_same_event(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first:
        first.taint()
        await first.phase("Noticed")
        await until(lambda: first.reasons, "the Event")
        preemption = first.core.cache.preemptions.records[objects.NAMESPACE, NAME]
        before = len(api.of(kinds.EVENTS))
        uid = str(first.preemptions[0]["metadata"]["uid"])
        for name in ("replica-a", "replica-b"):
            note = preemption_status.note_of_phase(preemption, Phase.NOTICED)
            assert note is not None
            await EventRecorder(api, clock, name).post(preemption, uid, note)
        assert len(api.of(kinds.EVENTS)) == before


async def test_a_preemption_is_counted_by_one_of_two_replicas(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        both = (first, second)
        await frames(first.subscribe(0, "s-0"))
        for replica in both:
            replica.taint()
        await first.phase("Noticed")
        for replica in both:
            watch(replica)
        stages = {
            name: StageTiming(p50_s=at_s, max_s=at_s)
            for name, at_s in [("frozen", 1.0), ("agreed", 1.5), ("drained", 2.0), ("durable", 5.0), ("committed", 5.5)]
        }
        pod = first.core.cache.objects.pods["uid-pod-0-0"]
        await first.core.reports.take(pod, dataclasses.replace(report(Phase.COMMITTED), stages=stages, steps_lost=3))
        await first.phase("Committed")
        for replica in both:
            watch(replica)
        await until(lambda: "CheckpointCommitted" in first.reasons, "the Event")

        def total(name: str, **labels: str) -> float:
            return sum(figure(replica, name, **labels) for replica in both)

        assert total("preemption_phases_total", phase="Noticed", cause="SpotTermination", mode="Enforce") == 1
        assert total("preemption_phases_total", phase="Committed", cause="SpotTermination", mode="Enforce") == 1
        assert total("signal_lead_seconds_count", cause="SpotTermination") == 1
        assert total("signal_lead_seconds_sum", cause="SpotTermination") == 15
        assert total("steps_lost_total") == 3
        assert total("spare_seconds_bucket", le="5.0") == 0
        assert total("spare_seconds_bucket", le="10.0") == 1
        took_s = {part: total("emergency_seconds_sum", part=part) for part in ("agreement", "drain", "save", "commit")}
        assert took_s == pytest.approx({"agreement": 0.5, "drain": 0.5, "save": 3.0, "commit": 0.5})
        # Both pods were expected, and neither acknowledged; they still might.
        assert total("notices_undelivered_total") == 0
        for index in (0, 1):
            first.drop(kinds.PODS, objects.pod(index))
        await until(lambda: total("notices_undelivered_total") == 2, "the count once the gang is gone")


async def test_preemption_first_recorded_in_a_later_phase_was_noticed_too(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        before = replica.core.cache.preemptions.records[objects.NAMESPACE, NAME]
    before = dataclasses.replace(before, status=PreemptionStatus())
    after = dataclasses.replace(before, status=PreemptionStatus(phase=Phase.AGREED))
    metrics = Metrics()
    preemption_writer.count_outcome(metrics, before, after, pods_live=True)
    for phase in ("Noticed", "Agreed"):
        labels = {"phase": phase, "cause": "SpotTermination", "mode": "Enforce"}
        assert metrics.registry.get_sample_value("gracepoint_preemption_phases_total", labels) == 1


async def test_the_causes_that_people_write_into_requests_are_one_time_series(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.REQUESTS, objects.request(cause="JustOnce", deadlineSeconds=60))
        await until(lambda: replica.reasons, "the Event")
        assert figure(replica, "preemption_phases_total", phase="Noticed", cause="JustOnce", mode="Enforce") == 0
        assert figure(replica, "preemption_phases_total", phase="Noticed", cause="Requested", mode="Enforce") == 1
        assert figure(replica, "signal_lead_seconds_count", cause="Requested") == 1


async def test_an_event_says_no_more_bytes_than_the_api_server_takes(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        preemption = replica.core.cache.preemptions.records[objects.NAMESPACE, NAME]
        await EventRecorder(api, clock, "replica-a").post(
            preemption, "uid", preemption_status.Note("PreemptionFailed", "ä" * 1000)
        )
        (body, *_) = (body for body in api.of(kinds.EVENTS) if body["reason"] == "PreemptionFailed")
        assert len(body["note"].encode()) == 1024


async def test_a_signal_that_went_away_was_a_false_alarm(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint(key="aws-node-termination-handler/scheduled-maintenance")
        await replica.phase("Noticed")
        replica.see(kinds.NODES, objects.node("node-1"))
        await replica.phase("Retracted")
        await until(
            lambda: figure(replica, "false_alarms_total", cause="Maintenance", phase="Retracted") == 1, "the figure"
        )


@pytest.mark.parametrize("lives", [True, False], ids=["the pod lives on", "the pod is gone"])
async def test_an_expired_preemption_was_a_false_alarm_if_its_pod_lives_on(
    api: MemoryApi, clock: Clock, lives: bool
) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        if not lives:
            replica.drop(kinds.PODS, objects.pod(0))
        clock.move(100)
        replica.taint("node-2", key="unrelated")
        await replica.phase("Expired")
        await until(lambda: "PreemptionExpired" in replica.reasons, "the Event")
        assert figure(replica, "false_alarms_total", cause="SpotTermination", phase="Expired") == lives


@pytest.mark.parametrize("rehearsal", [False, True], ids=["a disruption", "a rehearsal"])
@pytest.mark.parametrize("reason", EndReason)
def test_only_what_was_said_and_did_not_happen_was_a_false_alarm(reason: EndReason, rehearsal: bool) -> None:
    metrics, before = Metrics(), PreemptionRecord.of(objects.preemption(mode="Drill" if rehearsal else "Enforce"))
    phase = Phase.EXPIRED if reason in (EndReason.DEADLINE_PASSED, EndReason.PODS_REPLACED) else Phase.RETRACTED
    ended = preemption_status.ended(before.status, phase, reason, "told by the test", objects.NOW)
    after = dataclasses.replace(before, status=ended)
    preemption_writer.count_outcome(metrics, before, after, pods_live=reason is EndReason.DEADLINE_PASSED)
    found = metrics.registry.get_sample_value(
        "gracepoint_false_alarms_total", {"cause": "SpotTermination", "phase": str(phase)}
    )
    wrong = reason in (EndReason.SIGNAL_WENT_AWAY, EndReason.DEADLINE_PASSED) and not rehearsal
    assert (found or 0) == wrong


async def test_requests_to_the_api_are_counted_by_outcome() -> None:
    counted: list[tuple[str, str]] = []
    configuration = kubernetes.client.Configuration(host="http://127.0.0.1:9")  # nobody listens on the discard port
    configuration.retries = False
    api = client.KubeClient(kubernetes.client.ApiClient(configuration), lambda *what: counted.append(what))
    with pytest.raises(client.Unavailable):
        await api.get(kinds.NODES, None, "node-1")
    api.close()
    assert counted == [("GET", "Unavailable")]


def test_the_page_lists_every_metric_and_no_other() -> None:
    listed = set(re.findall(r"^\| `(gracepoint_\w+)`", PAGE.read_text(), re.M))
    exposed = {family.name + ("_total" if family.type == "counter" else "") for family in Metrics().families()}
    assert listed == exposed


def test_the_page_names_every_reason_of_an_event() -> None:
    reasons = {
        *preemption_status.PHASE_REASONS.values(),
        *(value for name, value in vars(preemption_status).items() if name.startswith("REASON")),
    }
    stalls = {preemption_status.REASON_STALLED, preemption_status.REASON_PROGRESS}
    assert set(preemption_status.STORY) == reasons - stalls
    listed = set(re.findall(r"^\| `([A-Z]\w+)` \|", PAGE.read_text(), re.M))
    beside = {policy_conditions.REASON_NOT_CONNECTED, policy_conditions.REASON_CONNECTED}
    beside |= {snapshot_placement.REASON_SAFE, *snapshot_placement.REASONS}
    beside |= {trouble_recorder.REASON_MISSING, trouble_recorder.REASON_FOUND}
    beside |= {waiting.REASON_WAITING, waiting.REASON_WAIT_ENDED, waiting.REASON_POD_DELETED}
    beside |= {value for name, value in vars(event_recorder).items() if name.startswith("REASON")}
    beside |= {*policy_conditions.REASONS_FAIL.values(), *policy_conditions.REASONS_SUCCEED.values()}
    assert listed == reasons | beside
