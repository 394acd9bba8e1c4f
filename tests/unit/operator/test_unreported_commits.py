"""Saves of which the operator got no report: what the next start restores proves that they were committed."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint.wire.messages import Phase, SavedFor, Spent
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, Clock
from tests.unit.operator.fakes.replica import Replica, forecast, report, resumption, running, until

FIRST, SECOND = (f"train-{JOBSET_UID[:8]}-{number}" for number in (1, 2))


def saved_for(preemption: str = FIRST, *, attempt: int = 0) -> SavedFor:
    return SavedFor(
        preemption=preemption,
        session=f"s-{attempt}",
        restart_attempt=attempt,
        spent=Spent(now_s=30.0, joined_s=1.0, left_s=30.0),
    )


async def reach(replica: Replica, phase: Phase) -> None:
    """The gang is noticed, and reports the phase."""
    replica.taint()
    await replica.phase("Noticed")
    await replica.report(phase)
    await replica.phase(phase)


def restart(replica: Replica, attempt: int = 1) -> None:
    """JobSet makes the pods anew, on the other node."""
    replica.clock.move(8)
    replica.see(JOBSETS, objects.jobset(restarts=attempt))
    replica.drop(kinds.JOBS, objects.job(attempt=attempt - 1))
    replica.see(kinds.JOBS, objects.job(attempt=attempt))
    for index in (0, 1):
        replica.drop(kinds.PODS, objects.pod(index, attempt=attempt - 1))
        replica.see(kinds.PODS, objects.pod(index, attempt=attempt, on="node-2", created_at=replica.clock()))


async def resume(
    replica: Replica, step: int = 40, saved: SavedFor | None = None, *, attempt: int = 1, from_memory: bool = False
) -> None:
    """The restarted gang says what it has restored."""
    uid = f"uid-pod-0-{attempt}"
    await until(lambda: uid in replica.core.cache.objects.pods, "the new pods")
    message = dataclasses.replace(
        resumption(step, attempt=attempt),
        spent=Spent(now_s=3.0, joined_s=1.0),
        saved_for=saved,
        from_memory=from_memory,
    )
    await replica.core.reports.take(replica.core.cache.objects.pods[uid], message)


async def recorded(replica: Replica, name: str, phase: str) -> JsonObject:
    found = await replica.phase_of(name, phase, seen=True)
    await until(lambda: "restoredStep" in replica.named(name)["status"] or phase != "Committed", "the restored step")
    return found


def end(body: JsonObject) -> JsonObject:
    (found,) = (item for item in body["status"]["conditions"] if item["type"] == "Ended")
    return dict(found)


def assert_proven(body: JsonObject) -> None:
    status = body["status"]
    assert (status["phase"], status["step"], status["stepsLost"], status["restoredStep"]) == ("Committed", 40, 0, 40)
    assert end(body)["reason"] == "NextStartRestored"
    assert "the next start has restored it" in status["message"]


@pytest.mark.parametrize("reported", [None, Phase.FROZEN, Phase.DRAINED], ids=["nothing", "frozen", "drained"])
@pytest.mark.parametrize("operator", ["went on", "was restarted"])
async def test_a_restored_step_proves_the_commit_that_nobody_reported(
    api: MemoryApi, clock: Clock, operator: str, reported: Phase | None
) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        if reported is not None:
            await replica.report(reported)
            await replica.phase(str(reported))
        if operator == "went on":
            restart(replica)
            await resume(replica, saved=saved_for())
            assert_proven(await recorded(replica, FIRST, "Committed"))
            return
    async with running(api, clock, "replica-b") as replica:
        restart(replica)
        await resume(replica, saved=saved_for())
        assert_proven(await recorded(replica, FIRST, "Committed"))


async def test_proof_comes_after_the_operator_has_given_up(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        clock.move(100)
        await recorded(replica, FIRST, "Expired")
        restart(replica)
        await resume(replica, saved=saved_for())
        assert_proven(await recorded(replica, FIRST, "Committed"))
        await until(lambda: "Resumed" in replica.reasons, "the Events")
        assert replica.reasons == ["PreemptionNoticed", "PreemptionExpired", "CheckpointCommitted", "Resumed"]


async def hear(replica: Replica, attempt: int = 0) -> None:
    """A start says that it trains, before the network to the operator is cut."""
    spent = Spent(now_s=9.0, joined_s=1.0, restored_s=2.0, trained_s=3.0)
    pod = replica.core.cache.objects.pods[f"uid-pod-0-{attempt}"]
    await replica.core.reports.take(pod, forecast(spent, attempt=attempt))


async def give_up(replica: Replica, name: str = FIRST, node: str = "node-1") -> None:
    """The gang is to leave, and nothing is heard of it."""
    replica.taint(node)
    await replica.phase_of(name, "Noticed")
    replica.clock.move(100)
    await recorded(replica, name, "Expired")


@pytest.mark.parametrize("operator", ["went on", "was restarted"])
async def test_a_gang_that_the_operator_did_not_reach_proves_its_commit_by_what_it_left_with(
    api: MemoryApi, clock: Clock, operator: str
) -> None:
    unnamed = saved_for("")
    async with running(api, clock) as replica:
        await hear(replica)
        await give_up(replica)
        if operator == "went on":
            restart(replica)
            await resume(replica, saved=unnamed)
            assert_proven(await recorded(replica, FIRST, "Committed"))
            await until(lambda: "Resumed" in replica.reasons, "the Events")
            await resume(replica, saved=unnamed)  # said again when it trains
            assert replica.reasons == ["PreemptionNoticed", "PreemptionExpired", "CheckpointCommitted", "Resumed"]
            return
    async with running(api, clock, "replica-b") as replica:
        restart(replica)
        await resume(replica, saved=unnamed)
        assert_proven(await recorded(replica, FIRST, "Committed"))


@pytest.mark.parametrize(
    ("heard", "session"),
    [
        pytest.param(True, "s-of-another", id="another workload left with it, and had the directory before"),
        pytest.param(False, "s-0", id="no start of this workload was heard"),
    ],
)
async def test_what_another_start_left_with_proves_nothing(
    api: MemoryApi, clock: Clock, heard: bool, session: str
) -> None:
    async with running(api, clock) as replica:
        if heard:
            await hear(replica)
        await give_up(replica)
        restart(replica)
        await resume(replica, saved=dataclasses.replace(saved_for(""), session=session))
        await until(lambda: "restoredStep" in replica.named(FIRST)["status"], "the restored step")
        assert replica.named(FIRST)["status"]["phase"] == "Expired"


async def test_what_a_start_left_with_proves_nothing_of_the_next_one_that_saved_nothing(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock) as replica:
        await hear(replica)
        await give_up(replica)
        restart(replica)
        await resume(replica, saved=saved_for(""))
        assert_proven(await recorded(replica, FIRST, "Committed"))
        await hear(replica, attempt=1)
        await give_up(replica, SECOND, "node-2")
        restart(replica, attempt=2)
        await resume(replica, saved=saved_for(""), attempt=2)
        await until(lambda: "restoredStep" in replica.named(SECOND)["status"], "the restored step")
        assert replica.named(SECOND)["status"]["phase"] == "Expired"


async def test_proof_during_the_next_preemption_leaves_that_one_open(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        restart(replica)
        replica.taint("node-2")
        await recorded(replica, FIRST, "Expired")
        await recorded(replica, SECOND, "Noticed")
        await resume(replica, saved=saved_for())
        assert_proven(await recorded(replica, FIRST, "Committed"))
        assert replica.named(SECOND)["status"]["phase"] == "Noticed"


async def test_a_checkpoint_of_an_earlier_preemption_proves_nothing_of_the_last(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await reach(replica, Phase.COMMITTED)
        restart(replica)
        replica.taint("node-2")
        await recorded(replica, SECOND, "Noticed")
        clock.move(100)
        await recorded(replica, SECOND, "Expired")
        restart(replica, attempt=2)
        await resume(replica, saved=saved_for(), attempt=2)
        await until(lambda: "restoredStep" in replica.named(SECOND)["status"], "the restored step")
        assert replica.named(SECOND)["status"]["phase"] == "Expired"
        assert end(replica.named(FIRST))["reason"] == "Committed"


@pytest.mark.parametrize(
    ("restored", "attempt", "phase"),
    [
        pytest.param(40, 1, "Committed", id="the step that was being saved"),
        pytest.param(30, 1, "Drained", id="an older step"),
        pytest.param(40, 2, "Drained", id="two starts later"),
    ],
)
async def test_without_a_note_the_step_that_was_being_saved_counts(
    api: MemoryApi, clock: Clock, restored: int, attempt: int, phase: str
) -> None:
    async with running(api, clock) as replica:
        await reach(replica, Phase.DRAINED)
        for number in range(attempt):
            restart(replica, number + 1)
        await resume(replica, restored, attempt=attempt)
        await until(lambda: "restoredStep" in replica.named(FIRST)["status"], "the restored step")
        assert replica.named(FIRST)["status"]["phase"] == phase


async def test_a_save_that_failed_stays_failed_whatever_is_restored(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await reach(replica, Phase.FAILED)
        restart(replica)
        await resume(replica, saved=saved_for())
        await until(lambda: "restoredStep" in replica.named(FIRST)["status"], "the restored step")
        found = replica.named(FIRST)
        assert (found["status"]["phase"], found["status"].get("stepsLost")) == ("Failed", None)


@pytest.mark.parametrize("restored", [40, 30], ids=["the evacuated step", "an older step"])
async def test_an_evacuated_step_is_committed_once_the_gang_that_restored_it_has_saved(
    api: MemoryApi, clock: Clock, restored: int
) -> None:
    async with running(api, clock) as replica:
        await reach(replica, Phase.EVACUATED)
        restart(replica)
        await resume(replica, restored, from_memory=True)
        await until(lambda: "restoredStep" in replica.named(FIRST)["status"], "the restored step")
        pod = replica.core.cache.objects.pods["uid-pod-0-1"]
        for saved_s in (None, 8.0):
            assert replica.named(FIRST)["status"]["phase"] == "Evacuated"
            spent = Spent(now_s=9.0, joined_s=1.0, first_step=restored, saved_s=saved_s)
            await replica.core.reports.take(pod, forecast(spent, attempt=1))
        if restored == 40:
            status = (await recorded(replica, FIRST, "Committed"))["status"]
            assert (status["step"], end(replica.named(FIRST))["reason"]) == (40, "Evacuated")
            await until(lambda: "CheckpointCommitted" in replica.reasons, "the Event")
            assert [reason for reason in replica.reasons if reason != "Resumed"] == [
                "PreemptionNoticed", "SaveAgreed", "StepEvacuated", "CheckpointCommitted",
            ]  # fmt: skip
        else:
            assert replica.core.cache.preemptions.records[objects.NAMESPACE, FIRST].phase is Phase.EVACUATED


async def test_an_evacuated_step_is_committed_with_the_save_of_the_next_preemption(
    api: MemoryApi, clock: Clock
) -> None:
    """Without periodic saves there is none before that."""
    async with running(api, clock) as replica:
        await reach(replica, Phase.EVACUATED)
        restart(replica)
        await resume(replica, 40, from_memory=True)
        await until(lambda: "restoredStep" in replica.named(FIRST)["status"], "the restored step")
        replica.taint("node-2")
        await recorded(replica, SECOND, "Noticed")
        assert replica.named(FIRST)["status"]["phase"] == "Evacuated"
        pod = replica.core.cache.objects.pods["uid-pod-0-1"]
        saved = report(Phase.COMMITTED, preemption=SECOND)
        saved = dataclasses.replace(saved, spent=Spent(now_s=9.0, joined_s=1.0, first_step=40))
        await replica.core.reports.take(pod, saved)
        await recorded(replica, FIRST, "Committed")


async def test_a_late_report_adds_its_figures_to_a_proven_commit(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        pod = replica.core.cache.objects.pods["uid-pod-0-0"]
        restart(replica)
        await resume(replica, saved=saved_for())
        await recorded(replica, FIRST, "Committed")
        await replica.core.reports.take(pod, report(Phase.COMMITTED))
        await until(lambda: "bytes" in replica.named(FIRST)["status"], "the figures of the report")
        assert_proven(replica.named(FIRST))
