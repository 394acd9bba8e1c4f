"""Replicas that are killed at a chosen step, over one API server in memory, with a gang that goes on beside them.

A step is a call to the API (killed before it, or after it was carried out and before anybody heard of that) or a
frame to a process (killed before it is written, or right after). A replica that is killed does nothing more, and
another one takes its place. Everything runs on the test's event loop, on a clock that stands.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from gracepoint.wire.frames import Notice, Retraction
from gracepoint.wire.messages import Acknowledgement, Phase
from gracepoint_operator.channel.notifier import Subscriber
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import Replica, report, subscription, until


class Fuse:
    """Counts the steps of one replica.

    Attributes:
        steps: How many there have been.
        blown: Set at the last one, which does not return before the replica is buried.
        buried: Set when the replica is ended. What it tries from then on fails at once.
    """

    def __init__(self, last: int | None) -> None:
        self.steps = 0
        self.blown = asyncio.Event()
        self.buried = asyncio.Event()
        self._last = last

    async def burn(self) -> None:
        self.steps += 1
        if self._last is not None and self.steps > self._last:
            self.blown.set()
            await self.buried.wait()
            raise client.Refused("the replica was killed")


class LoggingApi(MemoryApi):
    """Remembers every version of every object, for watches."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.log: list[tuple[str, JsonObject]] = []

    def store(self, body: JsonObject) -> None:
        self.log.append(("MODIFIED", body))

    def remove(self, kind: kinds.Kind, body: JsonObject) -> None:
        super().remove(kind, body)
        self.log.append(("DELETED", body))


class FusedApi(client.KubeClient):
    """A replica's way to the API server."""

    def __init__(self, shared: LoggingApi, fuse: Fuse) -> None:
        self._shared = shared
        self._fuse = fuse
        self._urgent = client.Urgent()

    def apart(self) -> client.KubeClient:
        return self

    def close(self) -> None:
        pass

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        await self._fuse.burn()
        answer = await self._shared.answer(method, path, **options)
        if method != "GET":
            await self._fuse.burn()
        return answer


class Process:
    """A process of the gang: hears by the replica that it is connected to, acknowledges, and connects again."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.notices: set[str] = set()
        self.retractions: set[str] = set()

    async def live(self, team: Team) -> None:
        while True:
            await until(lambda: team.living, "a replica that lives")
            member = team.living[self.index % len(team.living)]
            subscriber = member.replica.core.subscribers.add(subscription(self.index, f"s-{self.index}"))
            member.replica.core.notifier.catch_up(subscriber)
            listening = asyncio.create_task(self._listen(member, subscriber))
            dying = asyncio.create_task(member.fuse.blown.wait())
            try:
                await asyncio.wait([listening, dying], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (listening, dying):
                    task.cancel()
                await asyncio.gather(listening, dying, return_exceptions=True)
            await team.without(member)

    async def _listen(self, member: Member, subscriber: Subscriber) -> None:
        while (outgoing := await subscriber.next()) is not None:
            await member.fuse.burn()
            frame = outgoing.make()
            if isinstance(frame, Notice):
                self.notices.add(frame.preemption)
            elif isinstance(frame, Retraction):
                self.retractions.add(frame.preemption)
            await member.fuse.burn()
            outgoing.sent()
            outgoing.written()
            if isinstance(frame, Notice):
                await self._acknowledge(member, frame.preemption)

    async def _acknowledge(self, member: Member, preemption: str) -> None:
        pod = member.replica.core.cache.objects.pods[f"uid-pod-{self.index}-0"]
        session = f"s-{self.index}"
        said = Acknowledgement(pod_uid=pod.uid, session=session, preemption=preemption, process_index=self.index)
        await member.replica.core.reports.take(pod, said)


class Member:
    """One replica, and the watch that brings it what the API server has."""

    def __init__(self, api: LoggingApi, clock: Clock, name: str, fuse: Fuse) -> None:
        self.fuse = fuse
        self._api = api
        self._seen = len(api.log)
        self.replica = Replica(FusedApi(api, fuse), clock, name)  # type: ignore[arg-type]

    async def ready(self) -> None:
        """Waits until it knows the cluster, or was killed before that."""
        await until(lambda: self.replica.core.ready or self.fuse.blown.is_set(), "the first sweep")

    async def watch(self) -> None:
        """Ends with its task."""
        while True:
            fresh, self._seen = self._api.log[self._seen :], len(self._api.log)
            for event, body in fresh:
                kind = _kind_of(body)
                if kind is not None and not self.fuse.blown.is_set():
                    self.replica.core.feed(kind, event, body)
            await asyncio.sleep(0.001)


class Team:
    """The replicas of one operator.

    Attributes:
        clock: The clock of all of them.
        living: Those that are ready; never empty but while the only one is replaced.
    """

    def __init__(self, api: LoggingApi, clock: Clock) -> None:
        self.api = api
        self.living: list[Member] = []
        self.clock = clock
        self._born = 0

    async def run(self, fuse: Fuse) -> None:
        """Keeps one replica alive; the first one has the fuse."""
        while True:
            self._born += 1
            member = Member(self.api, self.clock, f"replica-{self._born}", fuse)
            running = asyncio.create_task(member.replica.core.run())
            await asyncio.sleep(0)  # it takes objects from its first step on
            watching = asyncio.create_task(member.watch())
            try:
                await member.ready()
                if not fuse.blown.is_set():
                    self.living.append(member)
                await fuse.blown.wait()
            finally:
                fuse.buried.set()
                for task in (running, watching):
                    task.cancel()
                await asyncio.gather(running, watching, return_exceptions=True)
            if member in self.living:
                self.living.remove(member)
            fuse = Fuse(None)

    async def report(self, phase: Phase, preemption: str) -> None:
        """The primary process reports, as often as it takes until a replica has taken it."""
        while True:
            await until(lambda: self.living, "a replica that lives")
            member = self.living[0]
            pod = member.replica.core.cache.objects.pods["uid-pod-0-0"]
            taking = asyncio.create_task(member.replica.core.reports.take(pod, report(phase, preemption=preemption)))
            dying = asyncio.create_task(member.fuse.blown.wait())
            await asyncio.wait([taking, dying], return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            if taking.done() and not member.fuse.blown.is_set():
                taking.result()
                return
            taking.cancel()
            await self.without(member)

    async def without(self, member: Member) -> None:
        """Waits until a dead replica is gone, and another one lives."""
        await until(lambda: self.living and member not in self.living, "the dead replica to be replaced")


@contextlib.asynccontextmanager
async def team(api: LoggingApi, clock: Clock, fuses: list[Fuse]) -> AsyncIterator[tuple[Team, list[Process]]]:
    """An operator of so many replicas, and a gang of two that listens."""
    made, processes = Team(api, clock), [Process(0), Process(1)]
    tasks = [asyncio.create_task(made.run(fuse)) for fuse in fuses]
    try:
        await until(lambda: len(made.living) == len(fuses), "the replicas to be ready")
        tasks += [asyncio.create_task(process.live(made)) for process in processes]
        yield made, processes
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


def _kind_of(body: JsonObject) -> kinds.Kind | None:
    """By what tells the kinds of these tests' objects apart."""
    named = {
        "CheckpointPolicy": kinds.POLICIES,
        "Preemption": kinds.PREEMPTIONS,
        "PreemptionRequest": kinds.REQUESTS,
        "JobSet": JOBSETS,
    }
    uid = body["metadata"].get("uid", "")
    if body.get("kind") in named:
        return named[body["kind"]]
    return kinds.NODES if uid.startswith("uid-node") else None


def taint(api: MemoryApi, key: str = objects.GKE_TAINT, effect: str = "NoSchedule") -> None:
    api.add(kinds.NODES, objects.node("node-1", taints=[objects.taint(key, effect)]))
