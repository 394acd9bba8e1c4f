"""What is written for a job that only trains."""

from __future__ import annotations

import asyncio
import dataclasses
import random

from gracepoint.wire.messages import Forecast, Spent
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.recording.connection_writer import EVERY_S
from gracepoint_operator.recording.policy_writer import FIGURES_S
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import Replica, running, subscription, until, writes_under_way

ATTACHED = objects.NOW - 60


def spent(now: float, saves: int, save_s: float) -> Spent:
    """What the primary process says with each periodic save."""
    saving_s = saves * save_s
    return Spent(
        now_s=now - ATTACHED,
        joined_s=5.0,
        restored_s=10.0,
        trained_s=20.0,
        first_step=0,
        saving_s=saving_s,
        saves=saves,
        saves_s=saving_s,
        saved_s=now - ATTACHED - 0.5,
        passed={str(saves * 100): now - ATTACHED - 20.0 - saving_s},
    )


class Training:
    """A gang of two pods, connected to two replicas, that saves every 20 s."""

    def __init__(self, first: Replica, second: Replica, *, save_s: float) -> None:
        self.first, self.second, self.clock = first, second, first.clock
        self.save_s, self.saves = save_s, 0
        self.chance = random.Random(7)
        first.subscribe(0)
        second.subscribe(1, "s-1")

    async def save(self, save_s: float | None = None) -> None:
        self.saves += 1
        seconds = (self.save_s if save_s is None else save_s) * self.chance.uniform(0.9, 1.1)
        said = Forecast(
            pod_uid="uid-pod-0-0",
            session="s-0",
            workload_uid=objects.JOBSET_UID,
            state_bytes=1 << 30,
            step_s=0.01,
            drain_s=self.chance.uniform(0.01, 0.02),
            save_s=seconds,
            margin=1.25,
            spent=spent(self.clock(), self.saves, self.save_s),
        )
        await self.first.core.reports.take(self.first.core.cache.objects.pods["uid-pod-0-0"], said)

    async def go_on(self, seconds: float) -> None:
        """Trains and saves, and lets the replicas look as often as they do."""
        until_at = self.clock() + seconds
        look_at = self.clock()
        while self.clock() < until_at:
            self.clock.move(10)
            if round(self.clock() - objects.NOW) % 20 == 0:
                await self.save()
            if self.clock() >= look_at:
                look_at += EVERY_S
                for replica in (self.first, self.second):
                    await replica.core.connection_writer.look()
            await self.settle()  # the clock does not run away from what is to be written

    async def settle(self) -> None:
        """Lets writes end, and their watches bring them."""
        for _ in range(2):
            await asyncio.sleep(0)
            await until(lambda: not writes_under_way("policy"), "the writes")
            self.bring()

    def bring(self) -> None:
        for replica in (self.first, self.second):
            for body in replica.api.of(kinds.POLICIES):
                replica.core.feed(kinds.POLICIES, "MODIFIED", body)


def writes(api: MemoryApi) -> list[str]:
    """All writes but those of Leases."""
    return [call for call in api.calls if not call.startswith("GET") and "/leases" not in call]


async def test_a_job_that_only_trains_writes_nothing(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        job = Training(first, second, save_s=0.1)
        await job.go_on(120)
        before = writes(api)
        (policy,) = api.of(kinds.POLICIES)
        assert policy["status"]["forecasts"], "the first forecast is written"
        assert policy["status"]["goodput"][0]["state"] == "training"
        await job.go_on(3600)
        assert writes(api) == before, "in an hour, with 180 saves: longer than any pause between writes"
        text = first.metrics.text().decode()
    assert "gracepoint_status_write_failures_total 0.0" in text


async def test_figures_that_have_moved_far_are_written_every_five_minutes_at_most(api: MemoryApi, clock: Clock) -> None:
    """Saves stop training for a fifth of the time, which the account that was written first does not show."""
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        job = Training(first, second, save_s=4.0)
        await job.go_on(120)
        before = len(writes(api))
        await job.go_on(3600)
        made = writes(api)[before:]
        assert 1 <= len(made) <= 3600 / FIGURES_S
        (policy,) = api.of(kinds.POLICIES)
        (account,) = policy["status"]["goodput"]
        assert account["seconds"]["saving"] > 0.1 * account["seconds"]["training"]


async def test_a_save_that_takes_much_longer_is_written_within_five_minutes(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        job = Training(first, second, save_s=0.5)
        await job.go_on(1200)
        before = len(writes(api))
        job.save_s = 10.0
        job.saves = 0  # the sums of its process do not show it, only the forecast does
        await job.go_on(FIGURES_S)
        assert len(writes(api)) - before in (1, 2)
        (policy,) = api.of(kinds.POLICIES)
        assert policy["status"]["forecasts"][0]["saveSeconds"] > 5


async def test_a_forecast_that_does_not_fit_any_more_is_written_at_once(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        job = Training(first, second, save_s=0.5)
        await job.go_on(120)
        await job.save(60.0)  # the pods have 30 s
        await job.settle()
        (policy,) = api.of(kinds.POLICIES)
        fits = next(item for item in policy["status"]["conditions"] if item["type"] == "FitsGrace")
        assert fits["status"] == "False"


async def test_a_stage_of_a_gang_is_written_at_once(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        job = Training(first, second, save_s=0.1)
        await job.go_on(600)
        before = len(writes(api))
        left = dataclasses.replace(spent(clock(), job.saves, 0.1), left_s=clock() - ATTACHED)
        pod = first.core.cache.objects.pods["uid-pod-0-0"]
        first.core.reports.subscribed(pod, dataclasses.replace(subscription(), spent=left))
        await job.settle()
        assert len(writes(api)) > before
        (policy,) = api.of(kinds.POLICIES)
        assert policy["status"]["goodput"][0]["lives"][-1]["left"]


async def test_the_account_of_a_job_that_has_finished_is_whole_whichever_replica_sees_the_end_first(
    api: MemoryApi, clock: Clock
) -> None:
    """Only the first hears of saves, and has not written the last of them."""
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        job = Training(first, second, save_s=0.1)
        await job.go_on(1800)
        for replica in (second, first):
            replica.see(JOBSETS, objects.jobset(finished="Completed"))
            await until(lambda: _finished(api), "the end in the account")
            await job.settle()
        await until(lambda: account(api)["seconds"]["saving"] == 9.0, "all saves in the account")
        assert account(api)["lives"][-1]["periodicSaves"] == 90


def account(api: MemoryApi) -> objects.Body:
    (policy,) = api.of(kinds.POLICIES)
    (found,) = policy["status"]["goodput"]
    made: objects.Body = found
    return made


def _finished(api: MemoryApi) -> bool:
    return "finished" in account(api)


async def test_where_pods_are_protected_by_checkpoints_the_newest_one_is_written_in_time(clock: Clock) -> None:
    api = MemoryApi(clock)
    body = objects.policy(voluntaryDisruption={"checkpointYoungerThanSeconds": 200})
    for kind, item in (
        (kinds.NAMESPACES, objects.namespace()),
        (kinds.POLICIES, body),
        (kinds.NODES, objects.node("node-1")),
        (kinds.NODES, objects.node("node-2")),
    ):
        api.add(kind, item)
    _gang(api)
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        job = Training(first, second, save_s=0.1)
        await job.go_on(1200)
        protected = [pod for pod in api.of(kinds.PODS) if "karpenter.sh/do-not-disrupt" in _annotations(pod)]
        assert protected == []


def _gang(api: MemoryApi) -> None:
    api.add(JOBSETS, objects.jobset())
    api.add(kinds.JOBS, objects.job())
    for index in (0, 1):
        api.add(kinds.PODS, objects.pod(index))


def _annotations(pod: objects.Body) -> objects.Body:
    found: objects.Body = pod["metadata"].get("annotations") or {}
    return found
