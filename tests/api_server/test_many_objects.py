"""What a replica asks for, keeps and decides in a cluster of 200 nodes, counted. ``benchmarks.operator_scale`` measures
the times, and larger clusters."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from benchmarks import operator_scale_etcd
from benchmarks.operator_scale_objects import Gang, Size, gangs, stored
from gracepoint_operator import controller
from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.watches import Watches
from gracepoint_operator.workloads import JOBSETS
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer, open_api_server, why_not
from tests.testcluster.shell import wait_until

_ROOT = Path(__file__).parents[2]
SIZE = Size(nodes=200, pods=800, jobsets=20, unrelated=1_200, records=200, big=160)
TAINT = "aws-node-termination-handler/scheduled-maintenance"
_PAGE_BYTES = 1024 * 1024
_WAIT_S = 60.0


class Call(NamedTuple):
    """A request that was answered."""

    method: str
    path: str
    is_list: bool
    number_of_bytes: int


class CountingClient(KubeClient):
    """Notes each request. ``calls`` has them in order."""

    calls: list[Call]

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        read: Callable[[JsonObject, int], Any] = lambda answer, size: answer,
        **others: Any,
    ) -> Any:
        def read_and_note(answer: JsonObject, size: int) -> Any:
            self.calls.append(Call(method, path, "limit" in (query or {}), size))
            return read(answer, size)

        return await super()._call(method, path, query=query, read=read_and_note, **others)

    def lists(self, kind: objects.Kind) -> list[Call]:
        return [call for call in self.calls if call.is_list and call.path == kind.path()]


class Replica:
    """A replica with its watches. Notes what it is fed with by watches, and whom it decides about."""

    def __init__(self, api: CountingClient) -> None:
        self.api = api
        self.decided: list[str] = []
        self.fed: list[tuple[objects.Kind, str | None]] = []
        metrics = Metrics()
        noted = self.decided

        class Reconciler(controller.Reconciler):
            def decide(self, uid: str) -> controller.Steps:
                noted.append(uid)
                return super().decide(uid)

        with mock.patch.object(controller, "Reconciler", Reconciler):
            self.core = Controller(api, metrics, time.time, ControllerSettings("replica-a"))
        feed = self.core.feed

        def note_event(kind: objects.Kind, event: str | None, body: JsonObject) -> None:
            self.fed.append((kind, event))
            feed(kind, event, body)

        self.core.feed = note_event  # type: ignore[method-assign]
        self.watches = Watches(self.core, api, metrics, replica="replica-a")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with all these objects."""
    if reason := why_not():
        pytest.skip(reason)

    def fill(url: str) -> None:
        operator_scale_etcd.fill(url, stored(SIZE, time.time()))

    folder = tmp_path_factory.mktemp("many-objects")
    with open_api_server(folder, etcd_flags=operator_scale_etcd.FLAGS, fill=fill) as made:
        made.define(_ROOT / "crds", parts.module_folder("jobset") / "config" / "components" / "crd" / "bases")
        for plural, number in (("jobsets", SIZE.jobsets), ("checkpointpolicies", 1), ("preemptions", SIZE.records)):
            served = functools.partial(_serves, made, plural, number)
            wait_until(f"{number} {plural} to be served", served, timeout_s=30)
        yield made


def _serves(server: ApiServer, plural: str, number: int) -> bool:
    found = server.kubectl("get", plural, "--all-namespaces", "--output=name", check=False)
    return len(found.stdout.splitlines()) >= number


@pytest.fixture
def api(server: ApiServer) -> Iterator[CountingClient]:
    connected = KubeClient.connect(str(server.kubeconfig))
    made = CountingClient(connected._client)
    made.calls = []
    yield made
    made.close()
    connected.close()
    connected._client.rest_client.pool_manager.clear()


@contextlib.asynccontextmanager
async def running(api: CountingClient) -> AsyncIterator[Replica]:
    """A replica that is ready, and whose watches have begun."""
    replica = Replica(api)
    task = asyncio.create_task(replica.core.run())
    await asyncio.sleep(0)
    replica.watches.start()
    try:
        await until(lambda: replica.core.ready, "the replica to be ready")
        await until(lambda: len(set(replica.decided)) == SIZE.jobsets, "the first decisions")
        yield replica
    finally:
        await asyncio.to_thread(replica.watches.close, 5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(_WAIT_S):
            while not holds():  # noqa: ASYNC110  the state of the replica is asked, not one event
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"waited {_WAIT_S:.0f} s for: {what}") from None


async def taint(api: KubeClient, gang: Gang) -> None:
    taints = [{"key": TAINT, "value": "1", "effect": "NoSchedule"}]
    await api.merge(objects.NODES, None, gang.node(0), {"spec": {"taints": taints}})


async def test_replica_lists_each_kind_once_in_small_pages_and_keeps_only_gangs(api: CountingClient) -> None:
    async with running(api) as replica:
        await asyncio.sleep(2.0)  # a list that follows would have begun
        cache = replica.core.cache
        held = {kind: len(cache.uids(kind)) for kind in (objects.NODES, objects.PODS, JOBSETS, objects.PREEMPTIONS)}
        assert held == {objects.NODES: 200, objects.PODS: 800, JOBSETS: 20, objects.PREEMPTIONS: 200}
        assert [event for _, event in replica.fed if event is None] == [], "kopf lists nothing"
        pages = api.lists(objects.PODS)
        assert max(page.number_of_bytes for page in pages) < 1.2 * _PAGE_BYTES
        assert sum(page.number_of_bytes for page in pages) < 1.05 * 800 * 20_400, "each pod was listed once"
        assert len(pages) <= 18
        assert sum(page.number_of_bytes for page in api.lists(objects.NODES)) < 1.1 * 200 * 17_000


async def test_event_of_a_node_brings_decisions_about_its_gang_alone(api: CountingClient) -> None:
    async with running(api) as replica:
        gang = gangs(SIZE)[3]
        replica.decided.clear()
        await taint(api, gang)
        epochs = replica.core.cache.preemptions
        await until(lambda: gang.uid in epochs.disrupted_workload_uids(), "the preemption")
        await until(lambda: [call for call in api.calls if call.path.endswith("/status")], "its record")
        await asyncio.sleep(3.0)  # its status comes back from the watch
        assert set(replica.decided) == {gang.uid}
        assert len(replica.decided) <= 6
        replica.decided.clear()
        api.calls.clear()
        await asyncio.sleep(2.5)
        assert replica.decided == [], "an open preemption waits for its time"
        assert [call for call in api.calls if call.is_list] == []


async def test_later_list_compares_versions_without_whole_objects(api: CountingClient) -> None:
    async with running(api) as replica:
        in_full = sum(page.number_of_bytes for page in api.lists(objects.PODS))
        api.calls.clear()
        replica.core._relister.look_again(objects.PODS, in_full=False)
        await until(lambda: sum(page.number_of_bytes for page in api.lists(objects.PODS)) > 800 * 1000, "the list")
        await asyncio.sleep(2.0)
        compared = sum(page.number_of_bytes for page in api.lists(objects.PODS))
        assert compared < 0.6 * in_full
        assert len(api.lists(objects.PODS)) <= 12
