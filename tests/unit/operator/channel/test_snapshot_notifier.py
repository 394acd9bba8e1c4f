"""Processes are told which snapshot servers hold their parts, and what is left of workloads that end is dropped.

The servers are real ones, each with an address of its own on the loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gracepoint.deadline import Deadline
from gracepoint.snapshots.snapshot_client import SnapshotClient
from gracepoint.snapshots.snapshot_server import SnapshotFiles, SnapshotLimits, SnapshotServer
from gracepoint.wire import names
from gracepoint.wire.frames import Frame, SnapshotPlacement
from gracepoint.wire.messages import SnapshotReport
from gracepoint.wire.snapshot_requests import Right, read_capability
from gracepoint_operator.channel.notifier import Subscriber
from gracepoint_operator.decisions import snapshot_placement
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import SnapshotServerPod
from gracepoint_operator.recording import snapshot_holdings, trouble_recorder
from gracepoint_operator.recording.snapshot_holdings import SnapshotHoldings, SnapshotSettings
from gracepoint_operator.recording.trouble_recorder import SnapshotRecorder
from gracepoint_operator.trust import bundle
from gracepoint_operator.trust.bundle import CAPABILITY_S, CapabilityKey, capability_keys_text
from gracepoint_operator.workloads import JOBSETS
from tests.ports import held_ports
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NAMESPACE, Clock
from tests.unit.operator.fakes.replica import Replica, frames, started, subscription, until

pytestmark = pytest.mark.integration

NAME = "gp-snapshots.default.svc"
KEY = CapabilityKey("1-a", bytes(range(32)))
MIB = 1 << 20
MANY = 600
MEMORY = {"checkpoint": {"directory": "/checkpoints/{jobset}", "memory": {"everySeconds": 60}}}


class Servers:
    """Snapshot servers of an installation, one for each node."""

    def __init__(self, folder: Path, port: int) -> None:
        now = time.time()
        self.authority = bundle.make_authority("test", now, 3600.0)
        leaf = bundle.issue(self.authority, [NAME], now, 3600.0)
        texts = {"tls.crt": leaf.chain, "tls.key": leaf.key, "keys": capability_keys_text([KEY])}
        for name, text in texts.items():
            (folder / name).write_text(text)
        self._files = SnapshotFiles(
            certificate=folder / "tls.crt", key=folder / "tls.key", capability_keys=folder / "keys"
        )
        self.port = port
        self.by_node: dict[str, SnapshotServer] = {}

    @staticmethod
    def host(node: str) -> str:
        return f"127.90.0.{node.rpartition('-')[2]}"

    def start(self, node: str) -> None:
        limits = SnapshotLimits(capacity_bytes=64 * MIB, workload_bytes=64 * MIB)
        self.by_node[node] = SnapshotServer(self._files, limits, self.host(node), self.port, now=lambda: objects.NOW)

    def client(self, placement: SnapshotPlacement, node: str) -> SnapshotClient:
        host, _, port = placement.read_from[node].rpartition(":")
        return SnapshotClient(
            (host, int(port)),
            server_name=placement.server_name,
            authorities=lambda: self.authority.chain,
            capability=lambda: placement.capability,
        )

    def put(self, placement: SnapshotPlacement, node: str, key: str) -> None:
        client = self.client(placement, node)
        try:
            client.put(key, [memoryview(b"a part")], Deadline.after(30.0, time.monotonic))
        finally:
            client.close()

    def holds(self, node: str, workload: str = JOBSET_UID) -> int:
        workloads: Any = self.by_node[node].figures()["workloads"]
        return int(workloads.get(workload, {}).get("values", 0))

    def close(self) -> None:
        for server in self.by_node.values():
            server.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with held_ports(1) as (port,):
        made = Servers(tmp_path, port)
        yield made
        made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    """Three nodes, two of them with pods of the gang, and a policy with snapshots."""
    made = MemoryApi(clock)
    made.add(kinds.NAMESPACES, objects.namespace())
    made.add(kinds.POLICIES, objects.policy(**MEMORY))
    made.add(JOBSETS, objects.jobset())
    made.add(kinds.JOBS, objects.job())
    for index in range(3):
        made.add(kinds.NODES, objects.node(f"node-{index + 1}"))
    for index in range(2):
        made.add(kinds.PODS, objects.pod(index))
    return made


@contextlib.asynccontextmanager
async def operator(
    api: MemoryApi, clock: Clock, servers: Servers, nodes: tuple[str, ...] = ("node-1", "node-2"), name: str = "one"
) -> AsyncIterator[Replica]:
    """A replica that knows keys and authorities, with a server on each of these nodes."""
    for node in nodes:
        if node not in servers.by_node:
            servers.start(node)
        api.add(kinds.SNAPSHOT_SERVERS, objects.snapshot_server(node, host=servers.host(node)))
    replica = Replica(api, clock, name, snapshots=SnapshotSettings("gp-snapshots", servers.port))
    replica.core.capability_keys.keys = (KEY,)
    replica.core.trust_notifier.set_authorities(servers.authority.chain)
    async with started(replica):
        yield replica


async def placements(subscriber: Subscriber, what: str = "a placement") -> list[SnapshotPlacement]:
    await until(lambda: not subscriber.is_idle, what)
    return [frame for frame in await frames(subscriber) if isinstance(frame, SnapshotPlacement)]


def add_hundreds(api: MemoryApi) -> None:
    """Gives the gang more pods than are told at once."""
    for index in range(2, MANY):
        api.add(kinds.PODS, objects.pod(index, on=f"node-{index % 2 + 1}"))


def subscribe_hundreds(replica: Replica) -> list[Subscriber]:
    return [replica.subscribe(index, f"s-{index}", takes_snapshots=True) for index in range(MANY)]


async def newest_placements(subscribers: Sequence[Subscriber]) -> list[SnapshotPlacement]:
    """What each of them is told next."""
    found = []
    async with asyncio.timeout(30.0):
        for subscriber in subscribers:
            outgoing = await subscriber.next()
            assert outgoing is not None
            frame = outgoing.make()
            assert isinstance(frame, SnapshotPlacement)
            found.append(frame)
    return found


def report(step: int | None = 100, *, index: int = 0, **changes: Any) -> SnapshotReport:
    fields: dict[str, Any] = {
        "pod_uid": f"uid-pod-{index}-0",
        "session": "s-0",
        "workload_uid": JOBSET_UID,
        "process_index": index,
        "safe_step": step,
        "copies": 2,
        "age_s": 1.0,
        "interval_s": 60.0,
        "skipped": 0,
        "skipped_reason": "",
        "bytes": MIB,
        "servers": ["node-1", "node-2"],
    }
    return SnapshotReport(**fields | changes)


async def test_each_process_is_told_its_own_server_and_a_peer_with_a_capability_of_its_pods_attempt(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    async with operator(api, clock, servers) as replica:
        one, two, other = (
            replica.subscribe(0, takes_snapshots=True),
            replica.subscribe(1, "s-1", takes_snapshots=True),
            replica.subscribe(1, "s-2"),
        )
        (first,) = await placements(one)
        assert list(first.write_to) == ["node-1", "node-2"]
        assert first.write_to["node-2"] == f"127.90.0.2:{servers.port}"
        assert first.server_name == NAME
        assert (first.pod_uid, first.session) == ("uid-pod-0-0", "s-0")
        written = Frame.read(first.to_json())
        assert dataclasses.asdict(written) == dataclasses.asdict(first), "though its servers are encoded apart"
        capability = read_capability(first.capability, {KEY.id: KEY.key})
        assert (capability.namespace, capability.workload, capability.attempt) == (NAMESPACE, JOBSET_UID, 0)
        assert capability.rights == {Right.WRITE, Right.READ, Right.DROP}
        assert capability.until == clock() + CAPABILITY_S
        assert two.closed, "a newer session of the pod took its place"
        assert await frames(other) == [], "it takes none"
        servers.put(first, "node-2", "7/0/0/done")
        assert servers.holds("node-2") == 1


async def test_a_process_that_subscribes_again_is_told_where_values_are_by_a_replica_that_has_just_started(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    async with operator(api, clock, servers, ("node-1", "node-2", "node-3")) as replica:
        (placement,) = await placements(replica.subscribe(0, takes_snapshots=True))
        servers.put(placement, "node-1", "7/0/0/done")
    api.remove(kinds.PODS, objects.pod(0))
    api.add(JOBSETS, objects.jobset(restarts=1))
    api.add(kinds.PODS, objects.pod(0, on="node-3", attempt=1))
    api.add(kinds.PODS, objects.pod(1, attempt=1))
    async with operator(api, clock, servers, ("node-1", "node-2", "node-3"), "two") as replica:
        (placement,) = await placements(replica.subscribe(0, attempt=1, takes_snapshots=True))
        assert set(placement.write_to) == {"node-3", "node-2"}
        assert set(placement.read_from) == {"node-1", "node-2", "node-3"}
        client = servers.client(placement, "node-1")
        try:
            entries = client.entries("", Deadline.after(30.0, time.monotonic))
        finally:
            client.close()
        assert [entry.key for entry in entries] == ["7/0/0/done"], "of the earlier attempt"


@pytest.mark.parametrize("how", ["signal", "ending", "not ready", "gone"])
async def test_another_server_is_chosen_when_one_goes_or_its_node_gets_a_signal(
    api: MemoryApi, clock: Clock, servers: Servers, how: str
) -> None:
    async with operator(api, clock, servers, ("node-1", "node-2", "node-3")) as replica:
        subscriber = replica.subscribe(0, takes_snapshots=True)
        assert [list(placement.write_to) for placement in await placements(subscriber)] == [["node-1", "node-2"]]
        body = objects.snapshot_server("node-2", host=servers.host("node-2"))
        match how:
            case "signal":
                replica.taint("node-2")
            case "ending":
                body = objects.snapshot_server("node-2", host=servers.host("node-2"), deleted_at=clock())
                replica.see(kinds.SNAPSHOT_SERVERS, body)
            case "not ready":
                replica.see(
                    kinds.SNAPSHOT_SERVERS, objects.snapshot_server("node-2", host=servers.host("node-2"), ready=False)
                )
            case _:
                replica.drop(kinds.SNAPSHOT_SERVERS, api.objects[kinds.PODS.path("default", body["metadata"]["name"])])
        newest = (await placements(subscriber, how))[-1]
        assert list(newest.write_to) == ["node-1", "node-3"], "outside of the gang, as no other node of it is left"
        assert ("node-2" in newest.read_from) is (how in ("signal", "ending")), "as long as it can be asked"


async def test_a_server_is_used_again_once_what_announced_the_end_of_its_node_is_gone(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    async with operator(api, clock, servers, ("node-1", "node-3")) as replica:
        subscriber = replica.subscribe(0, takes_snapshots=True)
        assert [list(placement.write_to) for placement in await placements(subscriber)] == [["node-1", "node-3"]]
        claim = objects.node_claim("node-3", deleted_at=clock())
        replica.see(kinds.NODE_CLAIMS, claim)
        assert list((await placements(subscriber, "less"))[-1].write_to) == ["node-1"]
        replica.drop(kinds.NODE_CLAIMS, claim)
        assert list((await placements(subscriber, "more"))[-1].write_to) == ["node-1", "node-3"]


async def test_servers_of_which_nothing_has_changed_are_not_looked_at(
    api: MemoryApi, clock: Clock, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(api, clock, servers, ("node-1", "node-2", "node-3")) as replica:
        await placements(replica.subscribe(0, takes_snapshots=True))
        await until(lambda: capacity(replica) == 3 * 64 * MIB, "all to be asked")
        looked_at: list[str] = []
        serves, look = vars(SnapshotServerPod)["serves"].fget, SnapshotHoldings.look
        looks = 0

        def noted(server: SnapshotServerPod) -> bool:
            looked_at.append(server.node)
            return bool(serves(server))

        def counted(holdings: SnapshotHoldings, lives: Callable[[str], bool]) -> None:
            nonlocal looks
            look(holdings, lives)
            looks += 1

        monkeypatch.setattr(SnapshotServerPod, "serves", property(noted))
        monkeypatch.setattr(SnapshotHoldings, "look", counted)
        await until(lambda: looks >= 5, "looks")
        assert looked_at == []
        replica.see(
            kinds.SNAPSHOT_SERVERS, objects.snapshot_server("node-3", host=servers.host("node-3"), deleted_at=clock())
        )
        await until(lambda: figure(replica, "snapshot_servers", state="ending") == 1, "a server to end")
        assert set(looked_at) == {"node-3"}
        assert figure(replica, "snapshot_servers", state="ready") == 2


async def test_figures_are_of_the_servers_that_are_there(api: MemoryApi, clock: Clock, servers: Servers) -> None:
    async with operator(api, clock, servers, ("node-1", "node-2", "node-3")) as replica:
        await until(lambda: capacity(replica) == 3 * 64 * MIB, "all to be asked")
        replica.see(kinds.SNAPSHOT_SERVERS, objects.snapshot_server("node-2", host=servers.host("node-2"), ready=False))
        await until(lambda: figure(replica, "snapshot_servers", state="not_ready") == 1, "one not to be ready")
        assert capacity(replica) == 3 * 64 * MIB, "what it holds has not gone"
        replica.drop(kinds.SNAPSHOT_SERVERS, objects.snapshot_server("node-3"))
        await until(lambda: capacity(replica) == 2 * 64 * MIB, "one to be gone")
        states = {each: figure(replica, "snapshot_servers", state=each) for each in ("ready", "not_ready", "ending")}
        assert states == {"ready": 1, "not_ready": 1, "ending": 0}


async def test_servers_are_asked_again_and_again_also_after_a_time_in_which_they_were_not_ready(
    api: MemoryApi, clock: Clock, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_holdings, "ASKED_AGAIN_S", 0.1)
    monkeypatch.setattr(snapshot_holdings, "PAUSE_OF_EACH_S", 0.0)
    async with operator(api, clock, servers, ("node-1", "node-2", "node-3")) as replica:
        (placement,) = await placements(replica.subscribe(0, takes_snapshots=True))
        used = [figure(replica, "snapshot_server_bytes", kind="used")]
        for ready in (True, False, True):
            body = objects.snapshot_server("node-2", host=servers.host("node-2"), ready=ready)
            replica.see(kinds.SNAPSHOT_SERVERS, body)
            await frames(replica.core.subscribers.all()[0])
        servers.put(placement, "node-2", "7/0/0/done")
        await until(lambda: figure(replica, "snapshot_server_bytes", kind="used") not in used, "it to be asked again")


async def test_with_one_server_there_is_one_copy_and_it_is_said_why(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    async with operator(api, clock, servers, ("node-1",)) as replica:
        (placement,) = await placements(replica.subscribe(0, takes_snapshots=True))
        assert list(placement.write_to) == ["node-1"]
        assert "1 of 2 copies" in placement.reason
        servers.start("node-3")
        replica.see(kinds.SNAPSHOT_SERVERS, objects.snapshot_server("node-3", host=servers.host("node-3")))
        replica.see(kinds.SNAPSHOT_SERVERS, objects.snapshot_server("node-2", installation="another release"))
        (later,) = await placements(replica.core.subscribers.all()[0])
        assert list(later.write_to) == ["node-1", "node-3"]
        assert later.reason == ""


async def test_a_capability_is_renewed_long_before_it_ends(api: MemoryApi, clock: Clock, servers: Servers) -> None:
    async with operator(api, clock, servers) as replica:
        subscriber = replica.subscribe(0, takes_snapshots=True)
        (first,) = await placements(subscriber)
        clock.move(CAPABILITY_S / 2 - 1)
        assert await frames(subscriber) == []
        clock.move(300)
        (second,) = await placements(subscriber)
        ends = [read_capability(each.capability, {KEY.id: KEY.key}).until for each in (first, second)]
        assert ends[1] - ends[0] > CAPABILITY_S / 2 - 60


@pytest.mark.parametrize("how", ["finished", "workload deleted", "policy deleted", "no snapshots in the policy"])
async def test_what_is_left_of_a_workload_is_dropped_after_its_end(
    api: MemoryApi, clock: Clock, servers: Servers, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_holdings, "DROPPED_AFTER_S", 0.3)
    monkeypatch.setattr(snapshot_holdings, "DROPPED_AGAIN_S", 0.1)
    async with operator(api, clock, servers) as replica:
        subscriber = replica.subscribe(0, takes_snapshots=True)
        (placement,) = await placements(subscriber)
        for node in ("node-1", "node-2"):
            servers.put(placement, node, "7/0/0/done")
        match how:
            case "finished":
                replica.see(JOBSETS, objects.jobset(finished="Completed"))
            case "workload deleted":
                replica.drop(JOBSETS, objects.jobset())
            case "policy deleted":
                replica.drop(kinds.POLICIES, objects.policy(**MEMORY))
            case _:
                replica.see(kinds.POLICIES, objects.policy() | {"metadata": objects.policy()["metadata"]})
        if how in ("policy deleted", "no snapshots in the policy"):
            (last,) = await placements(subscriber, "the end of snapshots")
            assert (last.write_to, last.read_from, last.capability) == ({}, {}, "")
        await until(lambda: not servers.holds("node-1") + servers.holds("node-2"), "nothing to be left")


async def test_a_replica_finds_what_was_left_while_nobody_looked_and_leaves_the_rest_alone(
    api: MemoryApi, clock: Clock, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(api, clock, servers) as replica:
        (placement,) = await placements(replica.subscribe(0, takes_snapshots=True))
        servers.put(placement, "node-1", "7/0/0/done")
    monkeypatch.setattr(snapshot_holdings, "DROPPED_AFTER_S", 0.3)
    monkeypatch.setattr(snapshot_holdings, "WORKLOADS_A_LOOK", 1)
    async with operator(api, clock, servers, name="two") as replica:
        (placement,) = await placements(replica.subscribe(0, takes_snapshots=True))
        await frames(replica.core.subscribers.all()[0])
        assert servers.holds("node-1") == 1, "its workload lives"
    api.remove(JOBSETS, objects.jobset())
    async with operator(api, clock, servers, name="three"):
        await until(lambda: not servers.holds("node-1"), "nothing to be left")


async def test_a_pod_of_another_namespace_gets_no_capability_for_the_workload(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    body = objects.pod(7, on="node-1")
    body["metadata"]["namespace"] = "thieves"
    api.add(kinds.PODS, body)
    async with operator(api, clock, servers) as replica:
        thief = replica.subscribe(7, "s-7", takes_snapshots=True)
        honest = replica.subscribe(0, takes_snapshots=True)
        assert len(await placements(honest)) == 1
        assert await frames(thief) == []


async def test_a_pod_of_an_earlier_attempt_gets_no_new_placement(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    api.add(JOBSETS, objects.jobset(restarts=1))
    api.add(kinds.PODS, objects.pod(0, attempt=1))
    async with operator(api, clock, servers) as replica:
        late = replica.subscribe(0, takes_snapshots=True)
        current = replica.subscribe(0, "s-1", attempt=1, takes_snapshots=True)
        (placement,) = await placements(current)
        assert read_capability(placement.capability, {KEY.id: KEY.key}).attempt == 1
        assert await frames(late) == []


def condition(api: MemoryApi) -> tuple[str, str, str]:
    """Status, reason and message of the policy's condition SnapshotsSafe."""
    (body,) = api.of(kinds.POLICIES)
    items = [item for item in body.get("status", {}).get("conditions", []) if item["type"] == "SnapshotsSafe"]
    return (items[0]["status"], items[0]["reason"], items[0]["message"]) if items else ("", "", "")


def figure(replica: Replica, name: str, **labels: str) -> float | None:
    return replica.metrics.registry.get_sample_value(f"gracepoint_{name}", labels)


def capacity(replica: Replica) -> float | None:
    return figure(replica, "snapshot_server_bytes", kind="capacity")


async def test_what_process_0_reports_is_in_the_policys_status_the_metrics_and_events_and_gets_old(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    async with operator(api, clock, servers) as replica:
        subscriber = replica.subscribe(0, takes_snapshots=True)
        await placements(subscriber)
        pods = replica.core.cache.objects.pods
        await replica.core.reports.take(pods["uid-pod-1-0"], report(90, index=1))
        assert condition(api) == ("", "", "")
        await replica.core.reports.take(pods["uid-pod-0-0"], report(100, skipped=2, skipped_reason="it was busy"))
        await until(lambda: condition(api)[0] == "True", "the condition")
        (entry,) = api.of(kinds.POLICIES)[0]["status"]["snapshots"]
        assert (entry["safeStep"], entry["copies"], entry["skipped"]) == (100, 2, 2)
        assert figure(replica, "snapshot_age_seconds", namespace=NAMESPACE, workload="train") == 1.0
        assert figure(replica, "snapshots_skipped_total") == 2
        assert figure(replica, "snapshot_servers", state="ready") == 2
        assert "SnapshotsSafe" not in replica.reasons, "that they are safe from the beginning is no news"
        clock.move(300)
        await until(lambda: condition(api)[:2] == ("False", "SnapshotsLate"), "the condition")
        assert "step 100, 301 s ago; one is due every 60 s; 2 were skipped" in condition(api)[2]
        await until(lambda: "SnapshotsLate" in replica.reasons, "the Event")
        assert figure(replica, "snapshots_unsafe_workloads", reason="SnapshotsLate") == 1
        await replica.core.reports.take(pods["uid-pod-0-0"], report(160))
        await until(lambda: condition(api)[0] == "True", "the condition")
        await until(lambda: "SnapshotsSafe" in replica.reasons, "the Event")
        replica.core.subscribers.remove(subscriber)
        await until(
            lambda: figure(replica, "snapshot_age_seconds", namespace=NAMESPACE, workload="train") is None,
            "the other replica to be told from now on",
        )


async def test_the_ages_of_snapshots_are_looked_at_in_turns(
    api: MemoryApi, clock: Clock, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble_recorder, "REPORTS_A_LOOK", 1)
    jobset, pod = objects.jobset(uid="uid-other"), objects.pod(5, on="node-2")
    jobset["metadata"]["name"] = "other"
    pod["metadata"]["labels"] |= {names.JOBSET_LABEL_UID: "uid-other", names.JOBSET_LABEL_NAME: "other"}
    api.add(JOBSETS, jobset)
    api.add(kinds.PODS, pod)
    async with operator(api, clock, servers) as replica:
        replica.subscribe(0, takes_snapshots=True)
        replica.core.subscribers.add(dataclasses.replace(subscription(5), workload_uid="uid-other"))
        pods = replica.core.cache.objects.pods
        await replica.core.reports.take(pods["uid-pod-0-0"], report(100))
        await replica.core.reports.take(
            pods["uid-pod-5-0"], report(100, pod_uid="uid-pod-5-0", workload_uid="uid-other")
        )
        seen: list[int] = []
        look, snapshots_of = SnapshotRecorder.look, snapshot_placement.snapshots_of

        def counted(recorder: SnapshotRecorder, is_connected: Callable[[str, str], bool]) -> None:
            seen.append(0)
            look(recorder, is_connected)

        def noted(*of: Any) -> Any:
            seen[-1] += 1
            return snapshots_of(*of)

        monkeypatch.setattr(SnapshotRecorder, "look", counted)
        monkeypatch.setattr(snapshot_placement, "snapshots_of", noted)
        await until(lambda: len(seen) >= 5, "looks")
        assert max(seen) == 1
        clock.move(300)
        late = partial(figure, replica, "snapshots_unsafe_workloads", reason="SnapshotsLate")
        await until(lambda: late() == 2, "both to be late")


async def test_without_snapshots_in_the_chart_nothing_is_watched_or_said(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    async with started(Replica(api, clock, "plain")) as replica:
        subscriber = replica.subscribe(0, takes_snapshots=True)
        pods = replica.core.cache.objects.pods
        await replica.core.reports.take(pods["uid-pod-0-0"], report())
        assert await frames(subscriber) == []
        assert kinds.SNAPSHOT_SERVERS not in replica.core.watched
        assert not [call for call in api.calls if "secrets" in call]


async def test_a_gang_of_hundreds_is_told_in_portions_and_each_process_once(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    add_hundreds(api)
    async with operator(api, clock, servers) as replica:
        gang = subscribe_hundreds(replica)
        await until(lambda: all(not subscriber.is_idle for subscriber in gang), "placements")
        for index in (0, 1, MANY - 1):
            (placement,) = await placements(gang[index])
            assert next(iter(placement.write_to)) == f"node-{index % 2 + 1}"
        assert figure(replica, "snapshot_placements_total") == MANY


async def test_a_pod_that_is_labelled_as_of_another_workload_meanwhile_gives_its_gang_no_capability_for_that(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    add_hundreds(api)
    async with operator(api, clock, servers) as replica:
        gang = subscribe_hundreds(replica)
        notifier = replica.core.snapshot_notifier
        assert notifier is not None
        await newest_placements(gang)
        clock.move(CAPABILITY_S - 60)  # so that all get another capability
        relabelled = objects.pod(0)
        relabelled["metadata"]["labels"][names.JOBSET_LABEL_UID] = "uid-other"
        notifier.notify(replica.core.cache.gang(JOBSET_UID))
        replica.see(kinds.PODS, relabelled)  # the loop takes it after the gang was looked at, before it is told
        await notifier.look()
        for placement in await newest_placements(gang[1:]):
            capability = read_capability(placement.capability, {KEY.id: KEY.key})
            assert (capability.workload, capability.attempt) == (JOBSET_UID, 0)


async def test_during_a_preemption_a_process_without_placement_gets_one_at_once_and_others_no_second_one(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    async with operator(api, clock, servers, ("node-1", "node-2", "node-3")) as replica:
        first = replica.subscribe(0, takes_snapshots=True)
        await placements(first)
        replica.taint("node-2")
        await placements(first, "another server")
        later = replica.subscribe(1, "s-1", takes_snapshots=True)
        assert replica.core.snapshot_notifier is not None
        replica.core.snapshot_notifier.notify(replica.core.cache.gang(JOBSET_UID))
        assert not later.is_idle
        assert [frame for frame in await frames(first) if isinstance(frame, SnapshotPlacement)] == []


async def test_the_replica_without_connections_of_a_gang_knows_where_its_values_are_after_the_restart(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    nodes = ("node-1", "node-2", "node-3", "node-4")
    api.add(kinds.NODES, objects.node("node-4"))
    async with operator(api, clock, servers, nodes) as one, operator(api, clock, servers, nodes, "two") as two:
        subscriber = one.subscribe(0, takes_snapshots=True)
        (placement,) = await placements(subscriber)
        holdings = two.core.snapshot_holdings
        assert holdings is not None
        await until(lambda: len(holdings.holding(JOBSET_UID)) == 2, "the placement of the other replica's gang")
        for node in ("node-1", "node-2"):
            servers.put(placement, node, "7/0/0/done")
        two.see(JOBSETS, objects.jobset(restarts=1))
        for index, node in enumerate(("node-3", "node-4")):
            two.drop(kinds.PODS, objects.pod(index))
            two.see(kinds.PODS, objects.pod(index, on=node, attempt=1))
        found = await placements(two.subscribe(1, "s-1", attempt=1, takes_snapshots=True))
        assert set(found[-1].read_from) >= {"node-1", "node-2"}


@pytest.mark.parametrize("younger_s", [0, 600])
async def test_snapshots_that_stay_late_cost_no_writes(
    api: MemoryApi, clock: Clock, servers: Servers, younger_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.add(kinds.POLICIES, objects.policy(**MEMORY, voluntaryDisruption={"checkpointYoungerThanSeconds": younger_s}))
    async with operator(api, clock, servers) as replica:
        await placements(replica.subscribe(0, takes_snapshots=True))
        await replica.core.reports.take(replica.core.cache.objects.pods["uid-pod-0-0"], report(100))
        clock.move(300)
        await until(lambda: condition(api)[:2] == ("False", "SnapshotsLate"), "the condition")
        written = 0
        write = api.merge_status

        async def counted(*values: Any, **options: Any) -> Any:
            nonlocal written
            written += 1
            return await write(*values, **options)

        monkeypatch.setattr(api, "merge_status", counted)
        for _ in range(20):
            clock.move(1)
            await asyncio.sleep(0.05)
        assert written <= 1


async def test_a_capability_of_a_key_that_is_gone_is_not_given_out(
    api: MemoryApi, clock: Clock, servers: Servers
) -> None:
    """The Secret was deleted, and is made anew with another key."""
    async with operator(api, clock, servers) as replica:
        subscriber = replica.subscribe(0, takes_snapshots=True)
        await placements(subscriber)
        new = CapabilityKey("2-b", bytes(range(1, 33)))
        replica.core.capability_keys.keys = (new,)
        (later,) = await placements(subscriber, "a capability with the new key")
        assert read_capability(later.capability, {new.id: new.key}).workload == JOBSET_UID
