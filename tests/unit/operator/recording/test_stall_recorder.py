"""What a gang that makes no progress shows: a condition, an Event and metrics."""

from __future__ import annotations

import dataclasses
import functools

from gracepoint.wire.messages import Forecast, Phase, Resumption, Stall
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import parse_time
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, Clock
from tests.unit.operator.fakes.replica import Replica, frames, progressing, resumption, running, until

STALL = Stall(
    pod_uid="uid-pod-0-0",
    session="s-0",
    workload_uid=JOBSET_UID,
    over=False,
    stage="training after step 40",
    step=40,
    for_s=900.0,
    suspects=[1],
    message="process 1 (train-workers-0-1) did not say so as well",
    stack='  File "train.py", line 4, in main\n    block_until_ready(state)\n',
    pods=["train-workers-0-1"],
)


def metrics(replica: Replica) -> tuple[float | None, float | None]:
    """How many stalls there were, and how many gangs are stalled now."""
    get = replica.metrics.registry.get_sample_value
    return get("gracepoint_stalls_total"), get("gracepoint_stalled_workloads")


def stalled_pods(replica: Replica) -> list[tuple[str, str, str]]:
    """Workload, pod and stage of what the metric names."""
    (metric,) = replica.metrics.stalled_pods.collect()
    return [(each.labels["workload"], each.labels["trainer"], each.labels["stage"]) for each in metric.samples]


async def take(replica: Replica, message: Stall | Resumption) -> None:
    await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], message)


async def test_a_stall_shows_on_policy_and_workload_until_it_is_over(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, STALL)
        await until(lambda: progressing(api)[0] == "False", "the condition")
        assert "no progress for 900 s in training after step 40" in progressing(api)[1]
        assert "process 1 (train-workers-0-1) did not say so" in progressing(api)[1]
        assert "block_until_ready(state)" in progressing(api)[1]
        await until(lambda: replica.reasons == ["TrainingStalled"], "the Event")
        assert metrics(replica) == (1, 1)
        assert stalled_pods(replica) == [("train", "train-workers-0-1", "training")]
        clock.move(10)
        await take(replica, dataclasses.replace(STALL, over=True))
        await until(lambda: progressing(api)[0] == "True", "the condition's end")
        await until(lambda: "TrainingProgresses" in replica.reasons, "the Event of the end")
        assert metrics(replica) == (1, 0)
        assert stalled_pods(replica) == []


async def test_a_gang_that_started_again_is_not_stalled(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, STALL)
        await until(lambda: progressing(api)[0] == "False", "the condition")
        await take(replica, dataclasses.replace(resumption(training=True), pod_uid="uid-pod-0-0"))
        await until(lambda: progressing(api)[0] == "True", "the condition's end")


async def test_what_a_keeper_sees_is_shown_with_what_the_gang_says(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        seen = dataclasses.replace(
            STALL, message="process 0 (pod-0-0) does not run: it is stopped by a signal (state T)", beside=True
        )
        await take(replica, seen)
        await take(replica, STALL)
        await until(lambda: "did not say so" in progressing(api)[1], "what the gang says")
        assert "it is stopped by a signal (state T)" in progressing(api)[1]
        assert metrics(replica) == (1, 1)
        await take(replica, dataclasses.replace(STALL, over=True))
        await until(lambda: "did not say so" not in progressing(api)[1], "the end of what the gang says")
        assert progressing(api)[0] == "False"
        await take(replica, dataclasses.replace(seen, over=True))
        await until(lambda: progressing(api)[0] == "True", "the condition's end")


async def test_a_workload_without_stalls_has_no_condition(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await until(lambda: "status" in api.of(kinds.POLICIES)[0], "the policy's status")
        assert progressing(api) == ("", "")


async def test_a_stall_within_a_preemption_shows_on_it_until_it_is_over(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.taint()
        await replica.phase("Noticed")
        await take(replica, STALL)
        await until(lambda: of_preemption(replica)[0] == "False", "the condition")
        assert "in training after step 40; process 1 (train-workers-0-1) did not say so" in of_preemption(replica)[1]
        clock.move(10)
        await take(replica, dataclasses.replace(STALL, over=True))
        await until(lambda: of_preemption(replica)[0] == "True", "the condition's end")


async def test_a_stall_after_a_preemption_does_not_show_on_it(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.FAILED)
        await replica.phase("Failed")
        await take(replica, STALL)
        await until(lambda: progressing(api)[0] == "False", "the policy's condition")
        assert of_preemption(replica) == ("", "")


async def test_a_stall_that_ends_after_the_preemption_is_over_on_it_too(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.taint()
        await replica.phase("Noticed")
        await take(replica, STALL)
        await replica.report(Phase.FAILED)
        await replica.phase("Failed")
        clock.move(10)
        await take(replica, dataclasses.replace(STALL, over=True))
        await until(lambda: of_preemption(replica)[0] == "True", "the condition's end")


async def test_the_end_of_what_a_keeper_sees_leaves_the_gangs_stall(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.taint()
        await replica.phase("Noticed")
        seen = dataclasses.replace(STALL, message="process 0 does not run", beside=True)
        for message in (STALL, seen, dataclasses.replace(seen, over=True)):
            clock.move(10)
            await take(replica, message)
            await until(functools.partial(shows, replica, message is seen), "the condition")


def shows(replica: Replica, keeper: bool) -> bool:
    status, message = of_preemption(replica)
    return (status, "did not say so" in message, "does not run" in message) == ("False", True, keeper)


async def test_a_stall_that_a_lost_pod_reported_is_over(api: MemoryApi, clock: Clock) -> None:
    """The other replica may be told that the gang goes on, or nobody, as if the pod's node is lost."""
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await take(replica, STALL)
        await take(replica, dataclasses.replace(STALL, beside=True))
        await until(lambda: progressing(api)[0] == "False", "the condition")
        replica.drop(kinds.PODS, objects.pod(0))
        await until(lambda: progressing(api)[0] == "True", "the condition's end")
        assert stalled_pods(replica) == []
        assert metrics(replica) == (1, 0)


async def brings_policy(*replicas: Replica) -> None:
    """Their watches bring the policy as it is stored, and what follows from that is written."""
    (body,) = replicas[0].api.of(kinds.POLICIES)
    for replica in replicas:
        replica.core.feed(kinds.POLICIES, "MODIFIED", body)
    for replica in replicas:
        await frames(replica.subscribe(1, "s-1"))  # it is quiet after that


async def forecasts(replica: Replica) -> None:
    """The gang passes a sync point after a save, and the watch of no replica has brought that."""
    told = Forecast(
        pod_uid="uid-pod-0-0",
        session="s-0",
        workload_uid=JOBSET_UID,
        state_bytes=1024,
        step_s=1.0,
        drain_s=1.0,
        save_s=1.0,
        margin=1.5,
    )
    await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], told)
    at = replica.clock()

    def stored() -> bool:
        found = replica.api.of(kinds.POLICIES)[0]["status"].get("forecasts") or [{"time": objects.stamp(0)}]
        return (parse_time(found[0]["time"]) or 0.0) >= at

    await until(stored, "the forecast to be stored")


def writes(replica: Replica) -> None:
    """Writes the policy, as after each list of the cluster and each change of a JobSet."""
    replica.see(JOBSETS, objects.jobset())


async def test_a_stall_whose_end_the_other_replica_heard_is_over(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await take(first, STALL)
        await until(lambda: progressing(api)[0] == "False", "the condition")
        clock.move(60)
        await take(second, dataclasses.replace(STALL, over=True))
        await until(lambda: progressing(api)[0] == "True", "the condition's end")
        clock.move(300)
        await forecasts(second)
        await brings_policy(first, second)
        assert metrics(first) == (1, 0)
        assert stalled_pods(first) == []
        for replica in (first, second):
            writes(replica)
            await brings_policy(first, second)
            assert progressing(api)[0] == "True"


async def test_a_stall_that_lasts_is_shown_by_both_replicas(api: MemoryApi, clock: Clock) -> None:
    """The other replica was told of an earlier one, and the newest forecast came before this one began."""
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        await take(second, STALL)
        await until(lambda: progressing(api)[0] == "False", "the condition")
        await take(second, dataclasses.replace(STALL, over=True))
        await until(lambda: progressing(api)[0] == "True", "the condition's end")
        await forecasts(second)
        clock.move(STALL.for_s)
        await take(first, STALL)
        await until(lambda: progressing(api)[0] == "False", "the condition of the second stall")
        for replica in (first, second, first):
            writes(replica)
            await brings_policy(first, second)
            assert progressing(api)[0] == "False"
        assert metrics(first) == (1, 1)


async def test_storage_that_stops_a_large_gang_names_ten_of_its_pods(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        first = replica.core.cache.objects.pods["uid-pod-0-0"]
        for number in range(30):
            pod = dataclasses.replace(first, uid=f"uid-{number}", name=f"pod-{number}")
            await replica.core.reports.take(pod, dataclasses.replace(STALL, beside=True, pods=["of another job"]))
        named = stalled_pods(replica)
        assert len({pod for _, pod, _ in named}) == len(named) == 10
        assert all(pod.startswith("pod-") for _, pod, _ in named)
        await until(lambda: "; and 20 more" in progressing(api)[1], "the condition")


def of_preemption(replica: Replica) -> tuple[str, str]:
    """Status and message of the condition of the only Preemption."""
    (body,) = replica.preemptions
    found = [item for item in body["status"].get("conditions", []) if item["type"] == "Progressing"]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")
