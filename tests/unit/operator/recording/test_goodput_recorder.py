"""The accounts of a workload's time in the policy's status and in the metrics."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from prometheus_client import parser

from gracepoint.wire.messages import Forecast, SavedFor, Spent
from gracepoint_operator.goodput import accounts
from gracepoint_operator.goodput.accounts import GoodputLedger
from gracepoint_operator.goodput.life import Category
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.recording.goodput_recorder import GoodputRecorder
from gracepoint_operator.resources import CheckpointPolicy, WorkloadGoodput
from gracepoint_operator.workloads import Workload
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, Clock
from tests.unit.operator.fakes.replica import Replica, forecast, resumption, running, subscription, until
from tests.unit.operator.fakes.scene import Scene

SPENT = Spent(now_s=50.0, joined_s=2.0, restored_s=4.0, trained_s=8.0, saving_s=1.0, saves=2, saves_s=1.0)


async def tell(replica: Replica, message: Forecast) -> None:
    await replica.core.reports.take(replica.core.cache.objects.pods[message.pod_uid], message)


def account(api: MemoryApi) -> WorkloadGoodput | None:
    (body,) = api.of(kinds.POLICIES)
    found = CheckpointPolicy.of(body).status.goodput
    return found[0] if found else None


def newest(api: MemoryApi) -> WorkloadGoodput:
    found = account(api)
    assert found is not None
    return found


def trains(api: MemoryApi) -> bool:
    found = account(api)
    return found is not None and found.state == "training"


async def test_what_a_process_says_is_in_the_policys_status(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await tell(replica, forecast(SPENT))
        await until(lambda: trains(api), "the account")
        found = account(api)
        assert found is not None
        assert (found.name, found.seconds.training, found.seconds.saving) == ("train", 41.0, 1.0)
        (life,) = accounts.read(found).lives
        assert life.joined_ms == round((objects.NOW - 48) * 1000)


async def test_another_replica_continues_with_the_account(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await tell(replica, forecast(SPENT))
        await until(lambda: trains(api), "the account")
    clock.move(30)
    async with running(api, clock, "replica-b") as replica:
        await tell(replica, forecast(dataclasses.replace(SPENT, now_s=80.0, saves=3, saves_s=2.0, saving_s=2.0)))
        await replica.core.connection_writer.look()  # as every half minute
        await until(lambda: accounts.read(newest(api)).all_saves == (3, 2000), "the account")
        assert accounts.read(newest(api)).spent(round(clock() * 1000))[Category.TRAINING] == 70_000


async def test_a_restart_of_the_gang_is_a_disruption_of_the_account(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await tell(replica, forecast(SPENT))
        await until(lambda: trains(api), "the account")
        clock.move(10)
        for index in range(2):
            replica.drop(kinds.PODS, objects.pod(index))
        await until(lambda: newest(api).state == "waiting", "the end of the first life")
        clock.move(5)
        for index in range(2):
            replica.see(kinds.PODS, objects.pod(index, attempt=1, created_at=clock(), phase="Pending", on=""))
        await until(lambda: newest(api).state == "scheduling", "the second life")
        ledger = accounts.read(newest(api))
        assert ledger.disruptions == 1
        assert ledger.spent(round(clock() * 1000))[Category.TRAINING] == 51_000


async def test_a_survivor_of_a_lost_node_reports_when_training_ended(api: MemoryApi, clock: Clock) -> None:
    """No replica ran when the node was lost, and the process that tells of the time was on it."""
    async with running(api, clock) as replica:
        await tell(replica, forecast(SPENT))
        await until(lambda: trains(api), "the account")
    clock.move(60)
    async with running(api, clock, "replica-b") as replica:
        survivor = replica.core.cache.objects.pods["uid-pod-1-0"]
        replica.core.reports.subscribed(survivor, dataclasses.replace(subscription(1, "s-1"), stalled_s=50.0))
        for nonsense_s in (-1.0, float("nan"), 1e300):
            replica.core.reports.subscribed(survivor, dataclasses.replace(subscription(1, "s-1"), stalled_s=nonsense_s))
        clock.move(30)
        for index in range(2):
            replica.drop(kinds.PODS, objects.pod(index))
        await until(lambda: newest(api).state == "waiting", "the end of the life")
        spent = accounts.read(newest(api)).spent(round(clock() * 1000))
        assert (spent[Category.TRAINING], spent[Category.LEAVING]) == (41_000 + 10_000, 80_000)


@pytest.mark.parametrize("session", ["s-0", "s-unknown"], ids=["of the life before", "of no known life"])
async def test_a_restart_reports_when_the_life_before_stopped(api: MemoryApi, clock: Clock, session: str) -> None:
    """The operator was down from the save on, so that it never heard of it."""
    async with running(api, clock) as replica:
        await tell(replica, forecast(SPENT))
        await until(lambda: trains(api), "the account")
        clock.move(20)  # it trains for 15 s, saves, and leaves
        for index in range(2):
            replica.drop(kinds.PODS, objects.pod(index))
            replica.see(kinds.PODS, objects.pod(index, attempt=1, created_at=clock()))
        await until(lambda: newest(api).disruptions == 1, "the second life")
        stopped = dataclasses.replace(SPENT, now_s=65.0, left_s=65.0, passed={"40": 56.0})
        said = dataclasses.replace(
            resumption(),
            spent=Spent(now_s=1.0, joined_s=0.5, restored_s=1.0, first_step=40),
            saved_for=SavedFor(preemption="", session=session, restart_attempt=0, spent=stopped),
        )
        clock.move(2)
        await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-1"], said)
        await until(lambda: newest(api).state == "compile", "the restore")
        spent = accounts.read(newest(api)).spent(round(clock() * 1000))
        known = session == "s-0"
        assert (spent[Category.TRAINING], spent.get(Category.LEAVING, 0)) == ((56_000, 5_000) if known else (61_000, 0))
        assert Category.RECOMPUTATION not in spent
        assert len(accounts.read(newest(api)).lives) == 2


async def test_the_metrics_show_the_account_as_of_now(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await tell(replica, forecast(SPENT))
        await until(lambda: trains(api), "the account")
        replica.core.feed(kinds.POLICIES, "MODIFIED", api.of(kinds.POLICIES)[0])
        await asyncio.sleep(0)
        clock.move(100)
        line = (
            f'gracepoint_goodput_seconds{{category="training",namespace="{objects.NAMESPACE}",workload="train"}} 141.0'
        )
        await replica.metrics.update_accounts()
        text = replica.metrics.text().decode()
        assert line in text.splitlines()
        (family,) = [one for one in parser.text_string_to_metric_families(text) if one.name.endswith("goodput_seconds")]
        assert {sample.labels["category"] for sample in family.samples} == set(Category)


async def test_accounts_can_be_left_out_of_the_metrics() -> None:
    rows = [("research", "train", "training", 1.0)]
    for shown in (True, False):
        metrics = Metrics(accounts=shown)
        metrics.show_accounts(lambda: rows)
        await metrics.update_accounts()
        metrics.show_accounts(lambda: rows)
        assert ("goodput_seconds" in metrics.text().decode()) is shown


@pytest.mark.parametrize(
    "spent",
    [pytest.param(None, id="an older library"), pytest.param(dataclasses.replace(SPENT, now_s=0.0), id="impossible")],
)
async def test_time_that_nobody_accounts_for_is_unknown(api: MemoryApi, clock: Clock, spent: Spent | None) -> None:
    for index in range(2):
        body = objects.pod(index)
        body["status"]["containerStatuses"] = [{"state": {"running": {"startedAt": objects.stamp(clock())}}}]
        api.add(kinds.PODS, body)
    async with running(api, clock) as replica:
        await tell(replica, forecast(spent))
        await until(lambda: account(api), "the account")
        assert newest(api).state == "unknown"


def test_a_large_gang_is_looked_at_less_often() -> None:
    scene, touched = Scene(), list[str]()
    for index in range(100):
        scene.seen(kinds.PODS, objects.pod(index, on="node-1"))
    recorder = GoodputRecorder(scene.cache, lambda namespace, name, news: touched.append(name), Metrics(), scene.clock)
    assert recorder.observe(scene.cache.gang(JOBSET_UID)) is None
    assert recorder.observe(scene.cache.gang(JOBSET_UID)) == pytest.approx(scene.clock() + 0.05)
    scene.clock.move(0.06)
    assert recorder.observe(scene.cache.gang(JOBSET_UID)) is None
    assert set(touched) == {"careful"}


@pytest.mark.parametrize("known", [True, False], ids=["looked at before", "of a replica that has just started"])
def test_a_large_gang_that_stalls_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """All its processes say so when they connect again. Each has passed its last step at a moment of its own."""
    scene = Scene()
    for index in range(100):
        scene.seen(kinds.PODS, objects.pod(index, on="node-1"))
    pods, snapshot, looks = scene.cache.objects.pods, scene.cache.gang, list[str]()

    def counted(uid: str) -> GangSnapshot:
        looks.append(uid)
        return snapshot(uid)

    recorder = GoodputRecorder(scene.cache, lambda namespace, name, news: None, Metrics(), scene.clock)
    if known:
        recorder.take_times(pods["uid-pod-0-0"], "s-0", SPENT)
        scene.clock.move(0.06)
    monkeypatch.setattr(scene.cache, "gang", counted)
    stalled_ms = round((scene.clock() - 30) * 1000)
    for index in range(100):
        recorder.stalled(pods[f"uid-pod-{index}-0"], 30 + (index % 10) / 100)
    assert looks == [JOBSET_UID]
    scene.clock.move(0.06)
    for index in range(100):
        recorder.stalled(pods[f"uid-pod-{index}-0"], 30 + 0.06)
    assert looks == [JOBSET_UID], "what is no news needs no look"
    (workload,) = scene.cache.objects.workloads.values()
    entries = recorder.entries(CheckpointPolicy.of(objects.policy()), [workload], [])
    assert entries is not None
    (life,) = accounts.read(entries[0]).lives
    assert life.stalled_ms == (stalled_ms - 90 if known else None)


def test_what_a_process_says_before_its_gang_was_looked_at_counts() -> None:
    """A replica that has just started hears processes while its first decisions still wait."""
    scene = Scene()
    told, late = (
        GoodputRecorder(scene.cache, lambda namespace, name, news: None, Metrics(), scene.clock) for _ in range(2)
    )
    pod = scene.cache.objects.pods["uid-pod-0-0"]
    told.take_times(pod, "s-0", SPENT)
    told.observe(scene.cache.gang(JOBSET_UID))
    late.observe(scene.cache.gang(JOBSET_UID))
    late.take_times(pod, "s-0", SPENT)
    (workload,) = scene.cache.objects.workloads.values()
    policy = CheckpointPolicy.of(objects.policy())
    entries = told.entries(policy, [workload], [])
    assert entries is not None
    assert [entry.state for entry in entries] == ["training"]
    assert entries == late.entries(policy, [workload], [])


def test_a_full_status_keeps_its_accounts_until_workloads_have_finished() -> None:
    scene = Scene()
    recorder = GoodputRecorder(scene.cache, lambda namespace, name, news: None, Metrics(), scene.clock)
    (workload,) = scene.cache.objects.workloads.values()
    recorder.observe(scene.cache.gang(JOBSET_UID))
    others = [dataclasses.replace(workload, name=f"other-{number}", uid=f"uid-{number}") for number in range(50)]
    now_ms = round(scene.clock() * 1000)
    full = [accounts.written(GoodputLedger(since_ms=0), other, now_ms) for other in others]
    assert names(recorder, [workload, *others], full) == {other.name for other in others}
    full[7] = accounts.written(GoodputLedger(since_ms=0).with_end(5), others[7], now_ms)
    assert names(recorder, [workload, *others], full) == {other.name for other in others} - {"other-7"} | {"train"}


def names(recorder: GoodputRecorder, workloads: list[Workload], entries: list[WorkloadGoodput]) -> set[str]:
    policy = CheckpointPolicy.of({**objects.policy(), "status": {"goodput": [entry.to_json() for entry in entries]}})
    return {entry.name for entry in recorder.entries(policy, workloads, []) or ()}
