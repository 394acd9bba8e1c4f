"""What an operator that was started anew knows of signs of which the API does not tell since when they are there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import pytest

from gracepoint_operator.cache.indexes import digest
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.recording.first_seen_writer import GRACE_S
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NOW, Body, Clock, stamp
from tests.unit.operator.fakes.replica import Replica, cluster, running, started, until, writes_under_way

PLACE = ("gp-system", "gp-sightings")
LABEL = "cloud.google.com/active-node-maintenance"


@pytest.fixture
def api(api: MemoryApi) -> MemoryApi:
    api.add(kinds.CONFIG_MAPS, {"metadata": {"namespace": PLACE[0], "name": PLACE[1]}})
    return api


def kept(api: MemoryApi) -> dict[str, str]:
    found: dict[str, str] = api.of(kinds.CONFIG_MAPS)[0].get("data", {})
    return found


def maintained(name: str = "node-1", *, written_at: float) -> Body:
    """A node under maintenance; the owner of the label last wrote something of the node at that time."""
    body = objects.node(name, labels={LABEL: "ONGOING"})
    fields: Body = {"f:metadata": {"f:labels": {f"f:{LABEL}": {}, "f:pool": {}}}}
    body["metadata"]["managedFields"] = [{"manager": "gke", "time": stamp(written_at), "fieldsV1": fields}]
    return body


def replica_of(
    api: MemoryApi, clock: Clock, name: str = "replica-a"
) -> contextlib.AbstractAsyncContextManager[Replica]:
    return running(api, clock, name, first_seen_place=PLACE)


async def decided(replica: Replica) -> None:
    """Waits until everything that is known was decided about."""
    replica.see(kinds.NODES, objects.node("node-9"))
    await until(lambda: "node-9" in replica.core.cache.objects.nodes, "the other node")


def move_gang(api: MemoryApi, clock: Clock) -> None:
    """The job starts anew, now."""
    for index in (0, 1):
        api.remove(kinds.PODS, objects.pod(index))
    api.remove(kinds.JOBS, objects.job())
    bring_gang_back(api, clock)


async def test_sign_older_than_the_pod_starts_no_preemption_after_a_restart(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.NODES, maintained(written_at=NOW - 200))
    async with replica_of(api, clock):
        await until(lambda: len(kept(api)) == 1, "the sign to be kept")
    clock.move(500)
    api.add(kinds.NODES, maintained(written_at=NOW + 400))
    async with replica_of(api, clock) as replica:
        await decided(replica)
        assert replica.preemptions == []


class WatchedApi(MemoryApi):
    """Lets something happen between the beginning of the watches and the first list of nodes."""

    def before_nodes(self) -> None:
        pass

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if path == kinds.NODES.path():
            self.before_nodes()
            await asyncio.sleep(0)  # what happened is seen before the list


async def test_old_sign_on_a_node_that_changes_before_the_list_is_old(clock: Clock) -> None:
    api = WatchedApi(clock)
    cluster(api)
    api.add(kinds.CONFIG_MAPS, {"metadata": {"namespace": PLACE[0], "name": PLACE[1]}})
    api.add(kinds.NODES, maintained(written_at=NOW - 200))
    async with replica_of(api, clock):
        await until(lambda: len(kept(api)) == 1, "the sign to be kept")
    clock.move(500)
    replica = Replica(api, clock, "replica-b", PLACE)
    # As the kubelet's status of the node every few seconds.
    api.before_nodes = lambda: replica.see(kinds.NODES, maintained(written_at=NOW - 200))  # type: ignore[method-assign]
    async with started(replica):
        await decided(replica)
        assert replica.preemptions == []


async def test_what_is_not_kept_is_taken_for_news_if_it_may_be(api: MemoryApi, clock: Clock) -> None:
    """The same without a memory: this is what it is for."""
    api.add(kinds.NODES, maintained(written_at=NOW - 50))
    async with running(api, clock) as replica:
        await replica.phase("Noticed")
    assert kept(api) == {}


async def test_a_sign_that_came_while_no_operator_ran_starts_a_preemption(api: MemoryApi, clock: Clock) -> None:
    async with replica_of(api, clock):
        pass
    clock.move(60)
    api.add(kinds.NODES, maintained(written_at=NOW + 30))
    async with replica_of(api, clock) as replica:
        await replica.phase("Noticed")


async def test_sign_counts_for_the_current_life_of_the_pod_only(api: MemoryApi, clock: Clock) -> None:
    async with replica_of(api, clock) as replica:
        clock.move(10)
        replica.see(kinds.NODES, maintained(written_at=NOW + 10))
        await replica.phase("Noticed")
        await until(lambda: len(kept(api)) == 1, "the sign to be kept")
    assert [float(text) for text in kept(api).values()] == [NOW + 10]
    clock.move(100)
    move_gang(api, clock)
    clock.move(100)
    api.add(kinds.NODES, maintained(written_at=clock()))
    async with replica_of(api, clock) as replica:
        await decided(replica)
        assert len(replica.preemptions) == 1


async def test_what_goes_away_is_forgotten_also_if_nobody_saw_it_go(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.NODES, maintained("node-1", written_at=NOW - 200))
    api.add(kinds.NODES, maintained("node-2", written_at=NOW - 200))
    async with replica_of(api, clock) as replica:
        await until(lambda: len(kept(api)) == 2, "both signs to be kept")
        replica.see(kinds.NODES, objects.node("node-1"))
        await until(lambda: len(kept(api)) == 1, "the first one to be forgotten")
    api.add(kinds.NODES, objects.node("node-2"))
    async with replica_of(api, clock) as replica:
        await until(lambda: kept(api) == {}, "the second one to be forgotten")
        replica.see(kinds.NODES, maintained("node-2", written_at=NOW))
        await replica.phase("Noticed")


def take_gang_away(replica: Replica) -> None:
    """Deletes the pods and the Job of the gang; the JobSet stays."""
    for index in (0, 1):
        replica.drop(kinds.PODS, objects.pod(index))
    replica.drop(kinds.JOBS, objects.job())


def bring_gang_back(api: MemoryApi, clock: Clock) -> None:
    for index in (0, 1):
        api.add(kinds.PODS, objects.pod(index, attempt=1, created_at=clock()))
    api.add(kinds.JOBS, objects.job(attempt=1))
    api.add(JOBSETS, objects.jobset(restarts=1))


async def written(replica: Replica) -> None:
    """Waits for an attempt to write what the events so far have changed."""
    await asyncio.sleep(0)
    await until(lambda: not writes_under_way("first seen"), "the writes")


async def test_old_sign_stays_old_for_a_job_that_is_made_again(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.NODES, maintained(written_at=NOW - 200))
    async with replica_of(api, clock) as replica:
        await until(lambda: len(kept(api)) == 1, "the sign to be kept")
        clock.move(500)
        take_gang_away(replica)
        await written(replica)
    clock.move(GRACE_S / 3)
    async with replica_of(api, clock):  # which begins while there are no pods
        pass
    bring_gang_back(api, clock)
    clock.move(GRACE_S / 3)
    api.add(kinds.NODES, maintained(written_at=clock()))  # the owner wrote something else of the node
    async with replica_of(api, clock) as replica:
        await decided(replica)
        assert replica.preemptions == []
    assert [float(text) for text in kept(api).values()] == [NOW - 200]


async def test_sign_on_a_node_without_pods_is_forgotten_after_a_while(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.NODES, maintained(written_at=NOW - 200))
    async with replica_of(api, clock) as replica:
        await until(lambda: len(kept(api)) == 1, "the sign to be kept")
        take_gang_away(replica)
        await written(replica)
        clock.move(GRACE_S - 1)
        replica.see(JOBSETS, objects.jobset(restarts=1))
        await written(replica)
        assert len(kept(api)) == 1
        clock.move(2)
        replica.see(JOBSETS, objects.jobset(restarts=2))
        await until(lambda: kept(api) == {}, "the sign to be forgotten")


async def test_sign_that_comes_again_is_kept_with_its_new_time(api: MemoryApi, clock: Clock) -> None:
    api.add(kinds.NODES, maintained(written_at=NOW - 200))
    async with replica_of(api, clock) as replica:
        await until(lambda: len(kept(api)) == 1, "the sign to be kept")
        clock.move(30)
        replica.see(kinds.NODES, objects.node("node-1"))
        replica.see(kinds.NODES, maintained(written_at=clock()))  # before anything was written
        await until(lambda: [float(text) for text in kept(api).values()] == [NOW + 30], "the new time")


async def test_only_what_needs_it_is_kept(api: MemoryApi, clock: Clock) -> None:
    exact = objects.taint("example.com/evacuate", "NoExecute", added_at=NOW - 500)
    api.add(kinds.NODES, objects.node("node-1", taints=[exact]))  # the API tells since when
    api.add(kinds.NODES, maintained("node-8", written_at=NOW - 200))  # no pod is there
    api.add(kinds.NODE_CLAIMS, objects.node_claim("node-2"))  # a time limit counts whenever it was set
    async with replica_of(api, clock) as replica:
        await decided(replica)
        replica.see(kinds.NODES, maintained("node-2", written_at=NOW))
        await until(lambda: kept(api), "the sign to be kept")
        assert list(kept(api)) == [digest(f"uid-node-2/gke-active-maintenance/label/{LABEL}=ONGOING")]


async def test_a_replica_takes_nothing_away_that_only_the_other_one_knows(api: MemoryApi, clock: Clock) -> None:
    async with replica_of(api, clock) as first, replica_of(api, clock, "replica-b") as second:
        first.see(kinds.NODES, maintained(written_at=NOW))
        await until(lambda: len(kept(api)) == 1, "the first one's sign to be kept")
        second.see(kinds.NODES, maintained("node-2", written_at=NOW))
        await until(lambda: len(kept(api)) == 2, "the second one's sign to be kept beside it")


class RefusingApi(MemoryApi):
    """Does not let the operator list one kind, as a cluster whose role was not upgraded."""

    refuses: kinds.Kind | None = kinds.NODE_CLAIMS

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if self.refuses is not None and path == self.refuses.path():
            raise client.Refused(f"{method} {path}: forbidden")


async def test_signs_are_kept_while_an_optional_kind_cannot_be_listed(clock: Clock) -> None:
    api = RefusingApi(clock)
    cluster(api)
    old = {"a-sign-of-a-node-claim": str(NOW - 900)}
    api.add(kinds.CONFIG_MAPS, {"metadata": {"namespace": PLACE[0], "name": PLACE[1]}, "data": old})
    api.add(kinds.NODES, maintained(written_at=NOW - 200))
    async with replica_of(api, clock) as replica:
        await until(lambda: len(kept(api)) == 2, "the sign to be kept")
        assert kept(api).items() >= old.items(), "its object may be of the kind that is not known"
        api.refuses = None
        replica.core.watches.answered(kinds.NODE_CLAIMS, listed=True)  # as its watch begins
        await until(lambda: not kept(api).keys() & old.keys(), "a sign that is gone to be forgotten")
        assert len(kept(api)) == 1
        await decided(replica)


@pytest.mark.parametrize("data", [{"x": "no number"}, None], ids=["nonsense", "nothing"])
async def test_what_cannot_be_read_is_no_memory(api: MemoryApi, clock: Clock, data: dict[str, str] | None) -> None:
    api.add(kinds.CONFIG_MAPS, {"metadata": {"namespace": PLACE[0], "name": PLACE[1]}, "data": data})
    api.add(kinds.NODES, maintained(written_at=NOW - 200))
    async with replica_of(api, clock):
        await until(lambda: [float(text) for text in kept(api).values()] == [NOW - 200], "the sign alone")


@pytest.mark.parametrize("error", [client.NotFound("no"), client.Refused("no"), client.Unavailable("no")], ids=repr)
async def test_an_operator_starts_without_its_memory(api: MemoryApi, clock: Clock, error: client.KubeError) -> None:
    api.failing = [error]
    async with replica_of(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
