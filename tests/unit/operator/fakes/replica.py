"""One replica's core on the test's own event loop, over an API server in memory, on a clock that stands."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import types
from collections.abc import AsyncIterator, Callable

from gracepoint.wire.frames import Frame
from gracepoint.wire.messages import Forecast, Phase, Report, Resumption, Spent, StageTiming, Subscription
from gracepoint_operator.channel.notifier import Subscriber
from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.decisions.policy_conditions import PodRights
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording.snapshot_holdings import SnapshotSettings
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Body, Clock

_WAIT_S = 60.0
_QUIET_S = 0.05
_QUIET_TURNS = 30


async def until(holds: Callable[[], object], what: str) -> None:
    """Lets the loop work until ``holds()`` is true."""
    try:
        async with asyncio.timeout(_WAIT_S):
            while not holds():  # noqa: ASYNC110  the state of the world is asked, not one event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {_WAIT_S:.0f} s for: {what}") from None


def writes_under_way(what: str) -> list[str]:
    """The names of the tasks that have to write something of that sort, of all replicas of this loop."""
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith(f"write {what} ")]


def kept_of(replica: Replica, key: object, part: object = None) -> list[object]:
    """The dictionaries and sets of a replica, or of a part of it, that have the key: what it keeps of an object.

    Not the versions of deleted objects, which it keeps for a while on purpose.
    """
    besides = (replica.api, replica.metrics, replica.clock, replica.core.cache.versions)
    seen, found = {id(part) for part in besides}, list[object]()
    to_look_at: list[object] = [replica.core if part is None else part]
    while to_look_at:
        looked_at = to_look_at.pop()
        if id(looked_at) in seen or isinstance(looked_at, type | types.ModuleType | asyncio.AbstractEventLoop):
            continue
        seen.add(id(looked_at))
        if isinstance(looked_at, dict | set | frozenset) and key in looked_at:
            found.append(looked_at)
        if isinstance(looked_at, types.FunctionType):
            to_look_at += looked_at.__closure__ or ()
        else:
            to_look_at += gc.get_referents(looked_at)
    return found


def cluster(api: MemoryApi, **policy: object) -> None:
    """A namespace, two nodes, a policy, a JobSet, its Job and two pods that train."""
    api.add(kinds.NAMESPACES, objects.namespace())
    api.add(kinds.POLICIES, objects.policy(**policy))
    api.add(JOBSETS, objects.jobset())
    api.add(kinds.JOBS, objects.job())
    for index, name in enumerate(("node-1", "node-2")):
        api.add(kinds.NODES, objects.node(name))
        api.add(kinds.PODS, objects.pod(index))


class Replica:
    """A core that runs, and the watches that a test plays to it."""

    def __init__(
        self,
        api: MemoryApi,
        clock: Clock,
        name: str,
        first_seen_place: tuple[str, str] | None = None,
        *,
        protects_pods: bool = True,
        deletes_pods: bool = True,
        write_interval_s: float = 0.02,
        snapshots: SnapshotSettings | None = None,
    ) -> None:
        self.api = api
        self.clock = clock
        self.metrics = Metrics()
        settings = ControllerSettings(
            name,
            write_interval_s=write_interval_s,
            first_seen_place=first_seen_place,
            rights=PodRights(protects_pods, deletes_pods),
            tick_s=0.05,
            snapshots=snapshots,
        )
        self.core = Controller(api, self.metrics, clock, settings)

    def see(self, kind: kinds.Kind, body: Body) -> None:
        """The cluster changed: the API has it, and the watch brings it."""
        self.core.feed(kind, "MODIFIED", self.api.add(kind, body))

    def drop(self, kind: kinds.Kind, body: Body) -> None:
        self.api.remove(kind, body)
        self.core.feed(kind, "DELETED", body)

    def taint(self, name: str = "node-1", key: str = objects.GKE_TAINT, effect: str = "NoSchedule") -> None:
        self.see(kinds.NODES, objects.node(name, taints=[objects.taint(key, effect)]))

    def subscribe(
        self, index: int = 0, session: str = "s-0", attempt: int = 0, *, takes_snapshots: bool = False
    ) -> Subscriber:
        """A process that connects, as the channel admits it."""
        hello = dataclasses.replace(subscription(index, session, attempt), takes_snapshots=takes_snapshots)
        subscriber = self.core.subscribers.add(hello)
        self.core.notifier.catch_up(subscriber)
        return subscriber

    @property
    def preemptions(self) -> list[JsonObject]:
        return self.api.of(kinds.PREEMPTIONS)

    @property
    def records_and_requests(self) -> list[JsonObject]:
        return [*self.preemptions, *self.api.of(kinds.REQUESTS)]

    def watches_bring(self, *bodies: JsonObject) -> None:
        """Records and requests as they are now."""
        for body in bodies:
            kind = kinds.REQUESTS if body["kind"] == "PreemptionRequest" else kinds.PREEMPTIONS
            self.core.feed(kind, "MODIFIED", body)

    @property
    def reasons(self) -> list[str]:
        """Reasons of the Events on the JobSet, in the order in which they were posted."""
        return self.reasons_on("JobSet")

    def reasons_on(self, kind: str) -> list[str]:
        events = sorted(self.api.of(kinds.EVENTS), key=lambda body: int(body["metadata"]["resourceVersion"]))
        return [body["reason"] for body in events if body["regarding"]["kind"] == kind]

    async def phase(self, phase: str, epoch: int = 0) -> JsonObject:
        """Waits for the recorded phase; returns the object."""

        def reached() -> bool:
            made = self.preemptions
            return len(made) > epoch and made[epoch].get("status", {}).get("phase") == phase

        await until(reached, f"phase {phase}, found {self.preemptions}")
        return self.preemptions[epoch]

    def named(self, name: str) -> JsonObject:
        """The Preemption or request of that name."""
        (found,) = (body for body in self.records_and_requests if body["metadata"]["name"] == name)
        return found

    async def phase_of(self, name: str, phase: str, *, seen: bool = False) -> JsonObject:
        """Waits until the Preemption or request of that name is at ``phase``.

        Args:
            name: Its name.
            phase: The phase.
            seen: True if the watches bring what is written.
        """

        def reached() -> bool:
            found = [body for body in self.records_and_requests if body["metadata"]["name"] == name]
            if seen:
                self.watches_bring(*self.records_and_requests)
            return bool(found) and found[0].get("status", {}).get("phase") == phase

        await until(reached, f"{name} to be {phase}")
        return self.named(name)

    async def report(self, phase: Phase, *, preemption: str | None = None, index: int = 0) -> None:
        """The primary process reports."""
        pod = self.core.cache.objects.pods[f"uid-pod-{index}-0"]
        await self.core.reports.take(pod, report(phase, preemption=preemption))


def subscription(index: int = 0, session: str = "s-0", attempt: int = 0) -> Subscription:
    return Subscription(
        namespace=objects.NAMESPACE,
        pod_name=f"train-workers-0-{index}-{attempt}xyz",
        pod_uid=f"uid-pod-{index}-{attempt}",
        session=session,
        workload_uid=objects.JOBSET_UID,
        restart_attempt=attempt,
        process_index=index,
        process_count=2,
        library_version="0.1.0",
    )


def report(phase: Phase, *, preemption: str | None = None) -> Report:
    stages = {"frozen": StageTiming(p50_s=0.1, max_s=0.2), "agreed": StageTiming(p50_s=0.2, max_s=0.3)}
    return Report(
        pod_uid="uid-pod-0-0",
        session="s-0",
        workload_uid=objects.JOBSET_UID,
        preemption=f"train-{objects.JOBSET_UID[:8]}-1" if preemption is None else preemption,
        phase=phase,
        cause="SpotTermination",
        process_count=2,
        participants=[0, 1],
        ordinal=41,
        step=40,
        steps_lost=0 if phase is Phase.COMMITTED else None,
        bytes=1024,
        seconds_to_spare=9.5 if phase is Phase.COMMITTED else None,
        stages=stages,
        message=f"told by the test: {phase}",
    )


def forecast(spent: Spent | None = None, *, attempt: int = 0) -> Forecast:
    """What the gang's primary process says of its saves, with where its time went."""
    return Forecast(
        pod_uid=f"uid-pod-0-{attempt}",
        session=f"s-{attempt}",
        workload_uid=objects.JOBSET_UID,
        state_bytes=1,
        step_s=0.1,
        drain_s=0.1,
        save_s=0.5,
        margin=1.25,
        spent=spent,
    )


def resumption(step: int | None = 40, *, attempt: int = 1, training: bool = False, age_s: float = 0.0) -> Resumption:
    """What the gang's primary process says of its start."""
    return Resumption(
        pod_uid=f"uid-pod-0-{attempt}",
        session=f"s-{attempt}",
        workload_uid=objects.JOBSET_UID,
        restart_attempt=attempt,
        restored_step=step,
        training=training,
        age_s=age_s,
    )


async def frames(subscriber: Subscriber) -> list[Frame]:
    """What is in a subscriber's queue once the replica is quiet, written as its stream would.

    On a busy machine a time may pass in which the loop has not run: so there is a least number of its turns, too.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _QUIET_S
    turns = 0
    while turns < _QUIET_TURNS or loop.time() < until_s:
        await asyncio.sleep(0.001)
        turns += 1
    written = []
    while not subscriber.is_idle and (outgoing := await subscriber.next()) is not None:
        written.append(outgoing.make())
        outgoing.sent()
        outgoing.written()
    return written


@contextlib.asynccontextmanager
async def running(
    api: MemoryApi, clock: Clock, name: str = "replica-a", first_seen_place: tuple[str, str] | None = None
) -> AsyncIterator[Replica]:
    """A replica that has listed the cluster; stopped afterwards."""
    async with started(Replica(api, clock, name, first_seen_place)) as replica:
        yield replica


@contextlib.asynccontextmanager
async def started(replica: Replica) -> AsyncIterator[Replica]:
    """The replica, once it has listed the cluster; stopped afterwards."""
    task = asyncio.create_task(replica.core.run())
    try:
        await until(lambda: replica.core.ready or task.done(), "the first sweep")
        yield replica
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def progressing(api: MemoryApi) -> tuple[str, str]:
    """Status and message of the policy's condition of that type. Empty if it has none."""
    return of_policy(api, "Progressing")


def of_policy(api: MemoryApi, condition: str) -> tuple[str, str]:
    """Status and message of the policy's condition of a type. Empty if it has none."""
    (body,) = api.of(kinds.POLICIES)
    found = [item for item in body.get("status", {}).get("conditions", []) if item["type"] == condition]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")
