"""The condition Connected, and the Events of gangs whose pods stay away, with two replicas."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from gracepoint_operator.decisions import policy_conditions
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import format_time
from gracepoint_operator.recording.connection_writer import EVERY_S
from gracepoint_operator.recording.replica_lease import STALE_S, ReplicaLease
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Body, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, running, subscription, until


def status(api: MemoryApi) -> client.JsonObject:
    """The status of the policy of the gang that most tests are about."""
    (body,) = (body for body in api.of(kinds.POLICIES) if body["metadata"]["namespace"] == objects.NAMESPACE)
    found: client.JsonObject = body.get("status", {})
    return found


def connected(api: MemoryApi) -> tuple[str, str, str]:
    """Status, reason and message of the condition."""
    found = [item for item in status(api).get("conditions", []) if item["type"] == "Connected"]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")


async def look(*replicas: Replica) -> None:
    """All replicas look, and their watches bring the policy."""
    for replica in replicas:
        await replica.core.connection_writer.look()
        for other in replicas:
            for body in other.api.of(kinds.POLICIES):
                other.core.feed(kinds.POLICIES, "MODIFIED", body)
    versions = {
        body["metadata"]["uid"]: body["metadata"]["resourceVersion"] for body in replicas[0].api.of(kinds.POLICIES)
    }

    def seen() -> bool:
        known = [store.get(key) for store in (replica.core.cache.policies for replica in replicas) for key in store]
        return all(
            policy is not None and str(policy.metadata["resourceVersion"]) >= versions[policy.uid] for policy in known
        )

    await until(seen, "the watch")


async def said(api: MemoryApi, status: str, reason: str) -> str:
    await until(lambda: connected(api)[:2] == (status, reason), f"Connected={status} {reason}")
    return connected(api)[2]


async def test_all_pods_of_a_gang_are_connected_to_one_of_two_replicas(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        first.subscribe(0)
        second.subscribe(1, "s-1")
        await look(first, second)
        await look(first, second)
        assert await said(api, "True", "PodsConnected") == "all running pods are connected"
        assert {entry["name"] for entry in status(api)["replicas"]} == {"replica-a", "replica-b"}


async def test_a_pod_that_stays_away_shows_on_policy_and_jobset(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        subscriber = first.subscribe(0)
        await look(first, second)
        await said(api, "Unknown", "Connecting")
        clock.move(policy_conditions.GRACE_S - 1)
        await look(first, second)
        assert first.reasons == []
        clock.move(1)
        await look(first, second)
        await look(first, second)
        assert "1 of 2 running pods are connected (train: 1 of 2)" in await said(api, "False", "PodsNotConnected")
        assert first.reasons == ["PodsNotConnected"], "once, though both replicas see it"
        second.subscribe(1, "s-1")
        await look(first, second)
        await look(first, second)
        await said(api, "True", "PodsConnected")
        assert first.reasons == ["PodsNotConnected", "PodsConnected"]
        first.core.subscribers.remove(subscriber)
        await look(first, second)
        await look(first, second)
        assert connected(api)[0] == "True", "it may connect again"
        clock.move(policy_conditions.GRACE_S)
        await look(first, second)
        await said(api, "False", "PodsNotConnected")


async def test_each_pod_that_starts_has_its_own_time_to_connect(api: MemoryApi, clock: Clock) -> None:
    """A gang grows by a pod every 100 s. Each connects after 90 s, so one is always missing, and none for long."""
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.subscribe(1, "s-1")
        for index in range(2, 6):
            replica.see(kinds.PODS, objects.pod(index, on="node-1", created_at=clock()))
            await until(lambda: len(replica.core.cache.objects.pods) > index, "the watch")  # noqa: B023
            for waited_s in (0, 30, 60):
                await look(replica)
                assert replica.metrics.registry.get_sample_value("gracepoint_pods_not_connected") == 0, f"{waited_s} s"
                clock.move(30)
            if index < 5:
                replica.subscribe(index, f"s-{index}")
            clock.move(10)
        assert replica.reasons == []
        clock.move(policy_conditions.GRACE_S)
        await look(replica)
        await said(api, "False", "PodsNotConnected")


async def test_the_entry_of_a_replica_that_is_gone_counts_no_more(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first:
        first.subscribe(0)
        first.subscribe(1, "s-1")
        await look(first)
        await said(api, "True", "PodsConnected")
    async with running(api, clock, "replica-b") as second:
        clock.move(STALE_S)
        await look(second)
        clock.move(policy_conditions.GRACE_S)
        await look(second)
        await said(api, "False", "PodsNotConnected")
        await until(lambda: status(api)["replicas"] == [], "the entry to go")


async def test_a_replica_that_ends_takes_its_numbers_back(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first:
        first.subscribe(0)
        first.subscribe(1, "s-1")
        await look(first)
        await said(api, "True", "PodsConnected")
    assert [entry.get("workloads", []) for entry in status(api)["replicas"]] == [[]]
    assert connected(api)[0] == "True", "its pods may just be connecting to another replica"


async def test_replicas_do_not_contradict_each_other(api: MemoryApi, clock: Clock) -> None:
    """The first replica has looked at a state that the second has changed since, and writes for another reason."""
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        first.subscribe(0)
        await look(first, second)
        clock.move(policy_conditions.GRACE_S)
        await look(first, second)
        await said(api, "False", "PodsNotConnected")
        second.subscribe(1, "s-1")
        await second.core.connection_writer.look()
        await said(api, "True", "PodsConnected")
        calls = len(api.calls)
        first.see(JOBSETS, objects.jobset())  # after which the policy is written
        await until(lambda: len(api.calls) > calls, "the first replica to read the policy")
        await asyncio.sleep(0.05)
        assert connected(api)[0] == "True"


async def test_a_write_of_the_status_is_not_answered_with_another_write(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.subscribe(1, "s-1")
        await look(replica)
        await said(api, "True", "PodsConnected")
        (body,) = api.of(kinds.POLICIES)
        looked = [call for call in api.calls if "checkpointpolicies" in call]
        for _ in range(3):
            body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 1)
            replica.core.feed(kinds.POLICIES, "MODIFIED", body)
            await asyncio.sleep(0.05)
        assert [call for call in api.calls if "checkpointpolicies" in call] == looked


async def test_pods_are_not_judged_while_the_api_server_does_not_answer(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replica cannot renew its numbers, and they would count no more."""
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        first.subscribe(0)
        second.subscribe(1, "s-1")
        await look(first, second)
        await look(first, second)
        await said(api, "True", "PodsConnected")
        monkeypatch.setattr(first.core.watches, "ages", lambda: {kinds.POLICIES: policy_conditions.RENEWED_S + 1})
        for _ in range(2):
            clock.move(STALE_S + policy_conditions.GRACE_S)
            await first.core.connection_writer.look()
        assert first.reasons == []
        assert first.metrics.registry.get_sample_value("gracepoint_pods_not_connected") == 0
        monkeypatch.undo()
        await first.core.connection_writer.look()
        assert first.reasons == [], "the other replica renews its numbers first"


def writes(api: MemoryApi) -> list[str]:
    """All writes but those of Leases."""
    return [call for call in api.calls if not call.startswith("GET") and "/leases" not in call]


async def test_nothing_but_a_lease_is_written_while_nothing_changes(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        first.subscribe(0)
        second.subscribe(1, "s-1")
        await look(first, second)
        await look(first, second)
        await said(api, "True", "PodsConnected")
        before = writes(api)
        for _ in range(240):
            clock.move(EVERY_S)
            await look(first, second)
        assert writes(api) == before, "in two hours"
        assert connected(api)[0] == "True"
        assert {entry["name"] for entry in status(api)["replicas"]} == {"replica-a", "replica-b"}
        renewed = {item["spec"]["holderIdentity"]: item["spec"]["renewTime"] for item in api.of(kinds.LEASES)}
        assert renewed == dict.fromkeys(("replica-a", "replica-b"), format_time(clock()))
    assert api.of(kinds.LEASES) == [], "a replica that ends takes its Lease along"


async def test_the_numbers_of_a_replica_that_dies_count_no_more(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        first.subscribe(0)
        second.subscribe(1, "s-1")
        await look(first, second)
        await look(first, second)
        await said(api, "True", "PodsConnected")
        clock.move(STALE_S)
        for _ in range(2):  # the second is there no more, and its pod has come to nobody
            await look(first)
            clock.move(policy_conditions.GRACE_S)
        await said(api, "False", "PodsNotConnected")
        assert {entry["name"] for entry in status(api)["replicas"]} == {"replica-a"}


async def test_a_replica_that_has_not_looked_for_long_takes_no_other_one_for_dead(api: MemoryApi, clock: Clock) -> None:
    first, second = (ReplicaLease(api, clock, name, "gracepoint", lambda: 0.0) for name in ("replica-a", "replica-b"))
    await first.renew()
    await second.renew()
    clock.move(2 * STALE_S)
    await first.renew()
    assert second.lives("replica-a", 0.0)
    assert not first.lives("replica-b", 0.0)


async def test_an_old_lease_that_may_not_be_deleted_stops_no_replica(api: MemoryApi, clock: Clock) -> None:
    """An administrator may have given the label to another Lease, which the operator's account may not delete."""
    first, second = (ReplicaLease(api, clock, name, "gracepoint", lambda: 0.0) for name in ("replica-a", "replica-b"))
    await second.renew()
    await first.renew()
    clock.move(7200.0)
    api.failing, api.failing_only = [client.Refused("leases.coordination.k8s.io is forbidden")], "DELETE"
    await first.renew()
    assert not api.failing
    assert first.sees_others(1.0)
    assert not first.lives("replica-b", 0.0)


async def test_a_replica_that_cannot_renew_its_lease_judges_nothing(
    api: MemoryApi, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await look(replica)
        await said(api, "Unknown", "Connecting")
        api.failing_only = "PATCH"
        for _ in range(3):
            clock.move(policy_conditions.GRACE_S)
            api.failing = [client.Refused("leases.coordination.k8s.io is forbidden")]
            await replica.core.connection_writer.look()
        assert replica.reasons == []
    assert len([record for record in caplog.records if "Lease is not renewed" in record.message]) == 1


async def test_parts_of_a_jobset_of_which_no_pod_has_come_are_named(api: MemoryApi, clock: Clock) -> None:
    """A helper was taken for a process, as the policy names none."""
    helper = objects.pod(0, on="node-2")
    helper["metadata"] |= {"name": "train-data-0-0-abc", "uid": "uid-data"}
    helper["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] = "data"
    api.add(kinds.PODS, helper)
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        first.subscribe(0)
        second.subscribe(1, "s-1")
        await look(first, second)
        clock.move(policy_conditions.GRACE_S)
        for _ in range(2):
            await look(first, second)
        text = await said(api, "False", "PodsNotConnected")
        wanted = "No pod of data of train has introduced itself, and the others wait for them"
        assert wanted in text
        assert "spec.training.replicatedJobs" in text
        (event,) = api.of(kinds.EVENTS)
        assert wanted in event["note"]


@pytest.mark.parametrize("phase", ["Pending", "Succeeded"])
async def test_pods_that_do_not_run_need_not_be_connected(api: MemoryApi, clock: Clock, phase: str) -> None:
    for index in (0, 1):
        api.add(kinds.PODS, objects.pod(index, phase=phase))
    async with running(api, clock) as replica:
        await look(replica)
        clock.move(policy_conditions.GRACE_S)
        await look(replica)
        await said(api, "Unknown", "NoPods")
        assert "PodsNotConnected" not in replica.reasons


async def test_an_unreadable_policy_is_stalled_until_it_is_corrected(api: MemoryApi, clock: Clock) -> None:
    def conditions() -> dict[str, str]:
        return {item["type"]: item["status"] for item in status(api).get("conditions", [])}

    async with running(api, clock) as replica:
        await until(lambda: conditions().get("Ready") == "True", "the policy to be ready")
        assert "Stalled" not in conditions()
        good = objects.policy()
        bad = objects.policy()
        bad["spec"]["deadline"] = {"margin": "much"}
        bad["status"] = status(api)
        replica.see(kinds.POLICIES, bad)
        await until(lambda: conditions().get("Stalled") == "True", "the policy to be stalled")
        assert conditions()["Ready"] == "False"
        good["status"] = status(api)
        replica.see(kinds.POLICIES, good)
        await until(lambda: conditions().get("Stalled") == "False", "the policy to go on")
        assert conditions()["Ready"] == "True"


async def test_a_pass_ends_when_the_api_server_does_not_answer(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        await look(replica)
        await said(api, "Unknown", "Connecting")
        clock.move(policy_conditions.GRACE_S)  # the numbers are due to be renewed, and a pod is late
        api.failing = [client.Unavailable("no answer")]
        await replica.core.connection_writer.look()
        assert api.failing == []
        assert connected(api)[0] == "Unknown"
        assert replica.reasons == []


class OneRefuses(MemoryApi):
    """An API server that takes no write of one policy's status, as while the webhook of its namespace is down."""

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if method == "PATCH" and path == f"{kinds.POLICIES.path('team-0', 'careful')}/status":
            raise client.Unavailable("HTTP 500: failed calling webhook: connection refused")


def elsewhere(body: Body, number: int = 0) -> Body:
    """The same object of another gang, in a namespace that is listed first."""
    text = json.dumps(body).replace("team-a", f"team-{number}").replace("uid-", f"uid-{number}-")
    made: Body = json.loads(text.replace(objects.JOBSET_UID, f"{objects.JOBSET_UID}-{number}"))
    return made


@contextlib.asynccontextmanager
async def one_refuses(clock: Clock) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two replicas. A pod of a gang whose policy cannot be written is connected to both."""
    async with beside_others(OneRefuses(clock), clock, 1) as replicas:
        yield replicas


@contextlib.asynccontextmanager
async def beside_others(api: MemoryApi, clock: Clock, count: int) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two replicas. A pod of each of ``count`` other gangs is connected to both."""
    for number in range(count):
        for kind, body in (
            (kinds.POLICIES, objects.policy()),
            (JOBSETS, objects.jobset()),
            (kinds.JOBS, objects.job()),
            (kinds.PODS, objects.pod(0)),
        ):
            api.add(kind, elsewhere(body, number))
    cluster(api)
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        for replica in (first, second):
            for number in range(count):
                replica.core.subscribers.add(
                    dataclasses.replace(
                        subscription(0, f"s-{number}-of-others"),
                        namespace=f"team-{number}",
                        pod_uid=elsewhere(objects.pod(0), number)["metadata"]["uid"],
                        workload_uid=elsewhere(objects.jobset(), number)["metadata"]["uid"],
                    )
                )
        yield first, second


def not_connected(*replicas: Replica) -> list[float | None]:
    return [each.metrics.registry.get_sample_value("gracepoint_pods_not_connected") for each in replicas]


async def test_a_policy_that_cannot_be_written_does_not_hold_up_others(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with one_refuses(clock) as replicas:
        first, second = replicas
        first.subscribe(0)
        second.subscribe(1, "s-1")
        for _ in range(round((STALE_S + policy_conditions.GRACE_S) / EVERY_S) + 2):
            await look(*replicas)
            clock.move(EVERY_S)
        assert connected(first.api)[:2] == ("True", "PodsConnected")
        assert not_connected(*replicas) == [0, 0]
        assert "PodsNotConnected" not in first.reasons
    said = [record for record in caplog.records if record.message.startswith("connections not recorded")]
    assert len(said) == 2, "once by each replica"


class ManyRefuseLate(MemoryApi):
    """An API server whose writes of the status of some policies end by a timeout."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.moves = clock.move
        self.tried = collections.Counter[str]()

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if method == "PATCH" and path.endswith("/status") and "/team-a/" not in path:
            if "fieldManager" in query:
                self.tried[path] += 1
                self.moves(5.0)  # the queue's writes of conditions wait beside these, in no time of their own
            raise client.Unavailable("no answer within 5 s")


async def test_policies_that_are_written_to_no_end_do_not_make_others_old(clock: Clock) -> None:
    """All of them in one round would take longer than the numbers in the others count."""
    api, count = ManyRefuseLate(clock), round(STALE_S / 5) + 6
    async with beside_others(api, clock, count) as replicas:
        first, second = replicas
        first.subscribe(0)
        second.subscribe(1, "s-1")
        for number in range(20):
            await look(*replicas)
            clock.move(EVERY_S)
            if number > 3:  # first it must be seen which of them cannot be written
                assert connected(api)[:2] == ("True", "PodsConnected")
        assert not_connected(*replicas) == [0, 0]
        assert len(api.tried) == count
        assert min(api.tried.values()) > 2, "each has its turn"


class OneSlowWrite(MemoryApi):
    """An API server that takes its time for a write of a replica's numbers, in which something else happens."""

    def __init__(self, clock: Clock, took_s: float) -> None:
        super().__init__(clock)
        self.clock, self.took_s = clock, took_s
        self.meanwhile: Callable[[], object] = lambda: None

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if method == "PATCH" and path.endswith("/status") and "fieldManager" in query:
            self.clock.move(self.took_s)
            self.meanwhile()


@pytest.mark.parametrize(("took_s", "missing"), [pytest.param(6.0, 0, id="slow"), pytest.param(0.1, 1, id="quick")])
async def test_pods_are_counted_again_before_they_are_judged_only_after_slow_writes(
    clock: Clock, took_s: float, missing: int
) -> None:
    api = OneSlowWrite(clock, took_s)
    cluster(api)
    async with running(api, clock) as replica:
        await look(replica)
        await said(api, "Unknown", "Connecting")
        clock.move(policy_conditions.GRACE_S)
        replica.subscribe(0)
        api.meanwhile = lambda: replica.subscribe(1, "s-1")
        await look(replica)
        assert not_connected(replica) == [missing]
        api.meanwhile = lambda: None
        await look(replica)
        assert not_connected(replica) == [0]


async def test_missing_pods_are_noticed_while_another_policy_cannot_be_written(clock: Clock) -> None:
    async with one_refuses(clock) as replicas:
        first = replicas[0]
        first.subscribe(0)
        for _ in range(round(policy_conditions.GRACE_S / EVERY_S) + 2):
            await look(*replicas)
            clock.move(EVERY_S)
        await said(first.api, "False", "PodsNotConnected")
        assert not_connected(first) == [1]
        assert first.reasons.count("PodsNotConnected") == 1
