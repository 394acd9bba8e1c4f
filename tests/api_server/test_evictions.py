"""Evictions that wait for responders (KEP-4563), on an API server of the newest Kubernetes with the gate on.

No released Kubernetes has the controller for them, so the tests play its part: they make the Evictions, say whose turn
it is, and cancel those whose requests are withdrawn. The API server checks each step.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import AsyncIterator

import pytest

from gracepoint.wire.frames import Retraction
from gracepoint.wire.messages import Phase
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.model.eviction_requests import PRIORITY, RESPONDER
from gracepoint_operator.webhooks.injection import add_responder
from tests.api_server.gang import Gang, Replica, running, told, until
from tests.testcluster.api_server import ApiServer

pytestmark = [pytest.mark.newest, pytest.mark.timeout(300)]

REQUESTS = Kind("/apis/lifecycle.k8s.io/v1alpha1", "evictionrequests")
LAST = "imperative-eviction.k8s.io/evictor"
GANGS = 50


@pytest.fixture
async def api(newest: ApiServer) -> AsyncIterator[KubeClient]:
    made = KubeClient.connect(str(newest.kubeconfig))
    yield made
    made.close()


class EvictionController:
    """The part of Kubernetes that is not there yet, for the pods of one gang."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._api = gang.api

    async def evict(self, index: int) -> str:
        """Somebody asks for the eviction of a pod. Returns the name of the Eviction, in which it is our turn."""
        name = self._gang.pod(index)
        pod = await self._api.get(objects.PODS, self._gang.name, name)
        target = {"pod": {"name": name, "uid": pod["metadata"]["uid"]}}
        for kind, title, spec in (
            (REQUESTS, "EvictionRequest", {"requester": "example.com/drainer", "intent": "Eviction"}),
            (objects.EVICTIONS, "Eviction", {}),
        ):
            meta = {"name": name, "namespace": self._gang.name}
            body = {"apiVersion": kind.api_version, "kind": title, "metadata": meta, "spec": {"target": target, **spec}}
            await self._api.create(kind, self._gang.name, body)
        await self._write(
            name,
            requesters=[{"name": "example.com/drainer", "intent": "Eviction"}],
            targetResponders=_turns("Active", "Inactive"),
            responders=[{"name": RESPONDER, "startTime": _now()}, {"name": LAST}],
        )
        return name

    async def withdraw(self, index: int) -> None:
        """Who asked does not want the eviction any more."""
        name = self._gang.pod(index)
        await self._api.merge(REQUESTS, self._gang.name, name, {"spec": {"intent": "Withdrawn"}})
        failed = {
            "type": "Failed",
            "status": "True",
            "reason": "CanceledDueToNoRequesters",
            "message": "withdrawn",
            "lastTransitionTime": _now(),
        }
        await self._write(
            name,
            requesters=[{"name": "example.com/drainer", "intent": "Withdrawn"}],
            targetResponders=_turns("Canceled", "Inactive"),
            conditions=[failed],
        )

    async def pass_on(self, index: int) -> None:
        """Our turn is over: the last responder has its own."""
        name = self._gang.pod(index)
        ours = await entry(self._gang, name)
        await self._write(
            name,
            targetResponders=_turns("Completed", "Active"),
            responders=[ours, {"name": LAST, "startTime": _now()}],
        )

    async def _write(self, name: str, **status: object) -> None:
        await self._api.merge_status(objects.EVICTIONS, self._gang.name, name, {"status": status})


def _turns(ours: str, last: str) -> list[JsonObject]:
    return [
        {"name": RESPONDER, "priority": PRIORITY, "state": ours},
        {"name": LAST, "priority": 100, "state": last},
    ]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


async def entry(gang: Gang, name: str) -> JsonObject:
    """The operator's entry in an Eviction."""
    stored = await gang.api.get(objects.EVICTIONS, gang.name, name)
    return next(item for item in stored["status"]["responders"] if item["name"] == RESPONDER)


async def watch(replica: Replica) -> None:
    """Brings every object as it is now, with the Evictions."""
    await replica.watch()
    for body in (await replica.api.list(objects.EVICTIONS)).items:
        replica.core.feed(objects.EVICTIONS, "MODIFIED", body)


async def completed(api: KubeClient) -> set[str]:
    """Namespaces of the Evictions in which the operator has said that its turn is over."""
    found = set()
    for body in (await api.list(objects.EVICTIONS)).items:
        entries = body["status"].get("responders", [])
        if any(item["name"] == RESPONDER and "completionTime" in item for item in entries):
            found.add(body["metadata"]["namespace"])
    return found


async def made(newest: ApiServer, api: KubeClient, name: str) -> Gang:
    gang = Gang(newest, api, name)
    await gang.make()
    await api.merge(objects.POLICIES, name, "careful", {"spec": {"evictionHold": {"boundSeconds": 3600}}})
    return gang


async def test_no_eviction_of_a_hundred_completes_before_its_commit(newest: ApiServer, api: KubeClient) -> None:
    gangs = [await made(newest, api, f"hundred-{number}") for number in range(GANGS)]
    evictions = [(gang, await EvictionController(gang).evict(index)) for gang in gangs for index in (0, 1)]
    assert len(evictions) == 100
    async with running(gangs[0]) as replica:
        await watch(replica)

        async def at_work() -> bool:
            found = (await api.list(objects.EVICTIONS)).items
            entries = [item for body in found for item in body["status"]["responders"] if item["name"] == RESPONDER]
            return sum("heartbeatTime" in item for item in entries) == 100

        await until(at_work, "the operator to be at work in all of them", within_s=60)
        assert await completed(api) == set()
        committed: set[str] = set()
        random.Random(7).shuffle(gangs)
        for gang in gangs:
            replica.gang = gang
            await replica.report(Phase.WRITTEN, gang.epoch(1))
            assert await completed(api) == committed
            await replica.report(Phase.COMMITTED, gang.epoch(1))
            committed.add(gang.name)

            async def over(gang: Gang = gang) -> bool:
                return all(["completionTime" in await entry(gang, gang.pod(index)) for index in (0, 1)])

            await until(over, f"the Evictions of {gang.name} to be over")
            assert await completed(api) == committed
        await EvictionController(gangs[0]).pass_on(0)
    for body in (await api.list(objects.EVICTIONS)).items:
        assert body["status"]["responders"][0]["message"].startswith("step 40 is saved")


async def test_withdrawn_eviction_lets_the_gang_train_on(newest: ApiServer, api: KubeClient) -> None:
    gang = await made(newest, api, "withdrawn")
    async with running(gang) as replica:
        subscriber = await replica.connect(1)
        name = await EvictionController(gang).evict(0)
        await watch(replica)
        assert (await told(subscriber)).signal == "eviction requested by example.com/drainer"
        await until(functools.partial(_has_heartbeat, gang, name), "the operator to be at work")
        await EvictionController(gang).withdraw(0)
        await watch(replica)

        async def retracted() -> bool:
            return [body.get("status", {}).get("phase") for body in await gang.records()] == ["Retracted"]

        await until(retracted, "the preemption to be retracted")
        frame = None
        while not isinstance(frame, Retraction):
            outgoing = await subscriber.next()
            assert outgoing is not None
            frame = outgoing.make()
            outgoing.sent()
            outgoing.written()
        assert "completionTime" not in await entry(gang, name)


async def test_pod_keeps_the_operator_among_its_responders(newest: ApiServer, api: KubeClient) -> None:
    await api.create(objects.NAMESPACES, None, {"metadata": {"name": "responders"}})
    body = {"metadata": {"name": "pod"}, "spec": {"containers": [{"name": "train", "image": "train"}]}}
    stored = await api.create(objects.PODS, "responders", add_responder(body))
    assert stored["spec"]["evictionResponders"] == [{"name": RESPONDER, "priority": PRIORITY}]


async def _has_heartbeat(gang: Gang, name: str) -> bool:
    return "heartbeatTime" in await entry(gang, name)
