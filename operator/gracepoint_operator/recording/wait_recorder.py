"""Records what gangs wait for before all their processes run: in statuses, Events and metrics.

``observe`` is called on the controller's event loop whenever a workload is decided about, and does not wait. It says
when to look again, since time alone turns a moment into a wait. A task of a write queue then asks for the Events on the
one pod or Job that waits, at most once in ``LOOK_S`` for each gang and less often if many wait, and posts an Event on
the workload. ``close`` ends the queue. Both replicas see the same objects, and write the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from gracepoint_operator.decisions import waiting
from gracepoint_operator.decisions.waiting import NAMED_AFTER_S, EventSaid, StartWait, WaitKind
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Pod, format_time, parse_time, text, true_conditions
from gracepoint_operator.kube.write_queue import Key
from gracepoint_operator.logs import about, seldom
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.read_errors import Unreadable, reading
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.preemption_writer import PreemptionWriter
from gracepoint_operator.recording.trouble_recorder import Recorder, RecorderContext
from gracepoint_operator.resources import CheckpointPolicy, WorkloadWaits
from gracepoint_operator.workloads import Workload

logger = logging.getLogger(__name__)

#: What a gang waits for is read again after so many seconds.
LOOK_S = 30.0
#: A wait that lasts has another Event after this time: Events are deleted after an hour.
AGAIN_S = 1800.0
#: A large gang is looked at less often: after this many seconds for each of its pods.
_PER_POD_S = 0.0005
_AT_ONCE_S = 0.01
#: Of many gangs that wait, each is looked at less often: all together about two in a second.
_PER_GANG_S = 0.5
#: Of so many waits of one gang, Events are asked for.
_ASKED = 3
#: So many requests about pods of lost nodes are in progress at once: a slice may lose hundreds, and other parts need
#: the threads of ``KubeClient`` without delay.
_AT_ONCE = 4


#: The taint by which somebody says that a node is shut down, and that nothing runs there any more.
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


class LostPods:
    """Deletes pods by force that cannot end because their node is lost, if their policy says so.

    A pod is deleted only if its node was found lost at two looks, ``LOOK_S`` apart: a node may be registered again.
    Before that it is marked as failed, since no kubelet will, and its Job counts nothing of a pod that has not failed.
    A node that is merely not ready is not lost.

    Args:
        api: The API server. It is asked afresh.
        events: Posts Events.
        metrics: Counts the pods.
        clock: Seconds since the epoch.
        allowed: Whether the operator has the right to delete pods. Without it, nothing is deleted.
    """

    def __init__(
        self, api: KubeClient, events: EventRecorder, metrics: Metrics, clock: Callable[[], float], *, allowed: bool
    ) -> None:
        self._api = api
        self._events = events
        self._metrics = metrics
        self._clock = clock
        self._allowed = allowed
        self._lost_since: dict[tuple[str, str], float] = {}  # workload's UID and pod's UID -> when it was found first
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def look(self, workload: Workload, policy: CheckpointPolicy | None, late: Sequence[Pod]) -> None:
        """Looks at the pods of a gang that should have ended, until they are gone.

        Raises:
            client.KubeError: The API server does not answer, or refuses. The others were looked at all the same.
        """
        pods = {(workload.uid, pod.uid): pod for pod in late}
        before = self._lost_since
        self._lost_since = {key: at for key, at in before.items() if key[0] != workload.uid or key in pods}
        if not (pods and self._allowed and policy is not None and policy.spec.lost_nodes.delete_pods):
            return
        errors: list[BaseException] = []
        reasons, now = await self._why_lost({pod.node for pod in late}, errors), self._clock()
        to_delete: list[Awaitable[None]] = []
        for key, pod in pods.items():
            if pod.node not in reasons:
                continue  # nobody can know
            if not (reason := reasons[pod.node]):
                self._lost_since.pop(key, None)
            elif key not in before:
                self._lost_since[key] = now
            elif now - before[key] >= LOOK_S:
                to_delete.append(self._delete(workload, pod, reason))
        errors += await self._in_turns(to_delete)
        if errors:
            raise errors[0]

    def forget(self, uid: str) -> None:
        """A workload is gone."""
        self._lost_since = {key: at for key, at in self._lost_since.items() if key[0] != uid}

    async def _in_turns(self, requests: Iterable[Awaitable[None]]) -> list[BaseException]:
        """Waits for all requests. Returns the errors of those that failed."""

        async def in_turn(request: Awaitable[None]) -> None:
            async with self._turns:
                await request

        results = await asyncio.gather(*map(in_turn, requests), return_exceptions=True)
        return [error for error in results if error is not None]

    async def _why_lost(self, names: Iterable[str], errors: list[BaseException]) -> dict[str, str]:
        """Why nothing can run on a node any more; empty if something may. Nodes that cannot be read are left out."""
        reasons: dict[str, str] = {}
        claims: dict[str, set[str]] = {}  # node -> UIDs of its NodeClaims, of which nobody knows yet whether they exist

        async def look_at(name: str) -> None:
            try:
                node = await self._api.get(objects.NODES, None, name)
            except client.NotFound:
                reasons[name] = "its node is gone"
                return
            with reading(f"the node {name}"):
                if "Ready" in true_conditions(node.get("status") or {}):
                    reasons[name] = ""
                    return
                if any(taint.get("key") == _OUT_OF_SERVICE for taint in (node.get("spec") or {}).get("taints") or ()):
                    reasons[name] = f"its node has the taint {_OUT_OF_SERVICE}"
                    return
                owners = node["metadata"].get("ownerReferences") or ()
                claims[name] = {str(owner.get("uid")) for owner in owners if _is_node_claim(owner)}

        errors += await self._in_turns(map(look_at, sorted(names)))
        there: set[str] | None = set()
        if any(claims.values()):
            try:
                there = {item["metadata"]["uid"] for item in (await self._api.list(objects.NODE_CLAIMS)).items}
            except client.NotFound:
                there = None  # Karpenter is not there: nobody can know
        for name, uids in claims.items():
            is_gone = bool(uids) and there is not None and not uids & there
            reasons[name] = "the NodeClaim of its node is gone" if is_gone else ""
        return reasons

    async def _delete(self, workload: Workload, lost: Pod, reason: str) -> None:
        try:
            pod = await self._api.get(objects.PODS, lost.namespace, lost.name)
            if pod["metadata"]["uid"] != lost.uid or pod["metadata"].get("deletionTimestamp") is None:
                return  # another pod of this name
            if (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded"):
                pod = await self._api.merge_status(
                    objects.PODS, lost.namespace, lost.name, _failed(pod, reason, self._clock())
                )
            await self._api.delete(objects.PODS, pod, force=True)
        except (client.NotFound, client.Conflict):
            return  # it has ended, or somebody else deletes it
        self._metrics.lost_pods_deleted.inc()
        logger.warning(
            "a pod of a lost node was deleted by force",
            extra=about(pod=lost.name, namespace=lost.namespace, node=lost.node, why=reason),
        )
        await self._events.post_on(workload, waiting.deleted_note(lost.name, lost.node, reason), lost.uid)


def _is_node_claim(owner: JsonObject) -> bool:
    """Whether the owner of a node is Karpenter's: other projects have a kind of that name, too."""
    return owner.get("kind") == "NodeClaim" and str(owner.get("apiVersion")).startswith("karpenter.sh/")


def _failed(pod: JsonObject, reason: str, now: float) -> JsonObject:
    """The status of a pod that no kubelet will end: as the control plane writes it for nodes that are gone."""
    disrupted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "NodeLost",
        "message": reason,
        "lastTransitionTime": format_time(now)[:19] + "Z",
    }
    others = [item for item in (pod["status"].get("conditions") or ()) if item.get("type") != "DisruptionTarget"]
    version = {"resourceVersion": pod["metadata"]["resourceVersion"]}
    return {"metadata": version, "status": {"phase": "Failed", "conditions": [*others, disrupted]}}


class OldestFirst:
    """Since when each of many waits, and the oldest of these times. Any change costs little, however many there are.

    Attributes:
        oldest: The oldest time. None: there is none. Any thread may read it.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # only entries that are in _since count
        self.oldest: float | None = None

    def __len__(self) -> int:
        return len(self._since)

    def put(self, name: str, since: float) -> None:
        if self._since.get(name) != since:
            self._since[name] = since
            heapq.heappush(self._heap, (since, name))
            self._settle()

    def remove(self, name: str) -> None:
        """Removes it. It need not be there."""
        if self._since.pop(name, None) is not None:
            self._settle()

    def _settle(self) -> None:
        if len(self._heap) > 2 * len(self._since) + 8:
            self._heap = [(since, name) for name, since in self._since.items()]
            heapq.heapify(self._heap)
        while self._heap and self._since.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        self.oldest = self._heap[0][0] if self._heap else None


@dataclasses.dataclass
class _WaitingGang:
    """What is known of one gang that waits.

    Attributes:
        workload: The workload.
        first_at: When this replica first saw a wait whose objects do not say since when it lasts.
        named: The waits that have lasted long enough, as the objects show them.
        said: What Events say of a wait, by its kind in ``named``.
        asked_at: When these were asked for.
        shown: What is shown now: ``named`` with what Events say.
        posted: Which Event was posted last. Empty: none, or what it said is over.
        rests_until: Until when the pods are not looked at again, in seconds since the epoch.
    """

    workload: Workload
    first_at: dict[WaitKind, float] = dataclasses.field(default_factory=dict)
    named: tuple[StartWait, ...] = ()
    said: dict[WaitKind, tuple[EventSaid, ...]] = dataclasses.field(default_factory=dict)
    asked_at: float = 0.0
    shown: tuple[StartWait, ...] = ()
    posted: str = ""
    rests_until: float = 0.0


class WaitRecorder(Recorder):
    """Records what gangs wait for before all their processes run.

    Args:
        context: What all recorders share.
        api: The API server, which is asked for Events.
        preemption_writer: Writes the Preemptions.
        lost_pods: Deletes pods whose nodes are lost.
    """

    def __init__(
        self, context: RecorderContext, api: KubeClient, preemption_writer: PreemptionWriter, lost_pods: LostPods
    ) -> None:
        super().__init__(context, "wait")
        self._api = api
        self._preemption_writer = preemption_writer
        self._lost_pods = lost_pods
        self._known: dict[str, _WaitingGang] = {}  # by the workload's UID
        self._ended: dict[str, tuple[Workload, str]] = {}  # of what an Event has to say that it is over
        # The gangs with waits that are shown, by policy, and of each kind since when each of them waits. Thousands may
        # wait at once, so a change of one costs no look at the others.
        self._of_policy: dict[Key, dict[str, _WaitingGang]] = {}
        self._since: dict[WaitKind, OldestFirst] = {kind: OldestFirst() for kind in WaitKind}
        for kind in WaitKind:
            self._metrics.waiting.labels(kind)
            self._metrics.waiting_s.labels(kind).set_function(functools.partial(self._longest_s, kind))

    def observe(self, gang: GangSnapshot) -> float | None:
        """Looks at a gang. Returns when to look again even if nothing changes. None: there is no need."""
        workload, now = gang.workload, self._clock()
        waiting_gang = self._known.get(gang.workload_uid)
        if waiting_gang is not None and now < waiting_gang.rests_until:
            return waiting_gang.rests_until
        waits = waiting.waits(gang, now)
        if workload is None or not waits:
            self._end(gang, waiting_gang)
            return None if workload is None else waiting.late_at(gang, now)
        if waiting_gang is None:
            waiting_gang = self._known[workload.uid] = _WaitingGang(workload)
        if (before := waiting_gang.workload).policy == workload.policy:
            waiting_gang.workload = workload
        else:
            self._pass_on(before)
            waiting_gang.workload = workload
            self._pass_on(workload, waiting_gang)
        pause_s = len(gang.pods) * _PER_POD_S
        waiting_gang.rests_until = now + pause_s if pause_s > _AT_ONCE_S else 0.0
        for kind in waiting_gang.first_at.keys() - {wait.kind for wait in waits}:
            del waiting_gang.first_at[kind]
        dated = [wait if wait.since is not None else self._dated(wait, waiting_gang, now) for wait in waits]
        waiting_gang.named = waiting.lasting(dated, now)
        if waiting_gang.asked_at or not any(wait.ask or wait.kind is WaitKind.SUSPENDED for wait in waiting_gang.named):
            self._show(waiting_gang)  # else once Events have been asked for
        named = waiting_gang.named
        times = [wait.since + NAMED_AFTER_S for wait in dated if wait.since is not None and wait not in named]
        if named:
            self._write_queue.touch((workload.namespace, workload.uid))
            times.append(now + self._look_s(waiting_gang))
        if (late_at := waiting.late_at(gang, now)) is not None:
            times.append(late_at)
        return min(times)

    def forget(self, uid: str) -> None:
        """A workload is gone."""
        self._ended.pop(uid, None)
        self._lost_pods.forget(uid)
        if (waiting_gang := self._known.pop(uid, None)) is not None and waiting_gang.shown:
            self._pass_on(waiting_gang.workload)

    def _look_s(self, waiting_gang: _WaitingGang) -> float:
        """For how long a gang is not looked at again. Pods of lost nodes hold up a restart, so these do not take turns.

        A queue, or a quota that is used up, may hold up thousands of gangs.
        """
        if any(wait.kind is WaitKind.DELETION for wait in waiting_gang.named):
            return LOOK_S
        return max(LOOK_S, len(self._known) * _PER_GANG_S)

    def _dated(self, wait: StartWait, waiting_gang: _WaitingGang, now: float) -> StartWait:
        return dataclasses.replace(wait, since=waiting_gang.first_at.setdefault(wait.kind, now))

    def _end(self, gang: GangSnapshot, waiting_gang: _WaitingGang | None) -> None:
        """The gang waits for nothing. What another replica wrote, which is gone by now, may say otherwise."""
        workload, uid = gang.workload, gang.workload_uid
        if waiting_gang is not None:
            if workload is None or workload.deleted or workload.finished:
                waiting_gang.posted = ""  # nothing has come: it is over
            waiting_gang.named = ()
            self._show(waiting_gang)
            self._known.pop(uid, None)
        elif workload is not None:
            if any(item.uid == uid for item in (gang.policy and gang.policy.status.waits) or ()):
                self._pass_on(workload)
                self._policy_writer.goodput.unblocked(uid, self._clock())
            self._put_on_preemption(workload, ())

    def _show(self, waiting_gang: _WaitingGang) -> None:
        """Shows the waits that are named, and no others."""
        for kind in waiting_gang.said.keys() - {wait.kind for wait in waiting_gang.named}:
            del waiting_gang.said[kind]
        shown = tuple(waiting.explained(wait, waiting_gang.said.get(wait.kind, ())) for wait in waiting_gang.named)
        if shown == waiting_gang.shown:
            return
        self._account(
            waiting_gang.workload.uid, waiting.blocked_since(waiting_gang.shown), waiting.blocked_since(shown)
        )
        waiting_gang.shown = shown
        if not shown and waiting_gang.posted:
            self._ended[waiting_gang.workload.uid] = (waiting_gang.workload, waiting_gang.posted)
            waiting_gang.posted = ""
            self._write_queue.touch((waiting_gang.workload.namespace, waiting_gang.workload.uid))
        self._pass_on(waiting_gang.workload, waiting_gang)
        self._put_on_preemption(waiting_gang.workload, shown)

    def _account(self, uid: str, before: float | None, now: float | None) -> None:
        """Tells the account since when the gang is blocked, or that it is blocked no more."""
        goodput = self._policy_writer.goodput
        if before is not None and now is None:
            goodput.blocked(uid, before, self._clock())
        elif now is not None and now != before:
            goodput.blocked(uid, now, None)

    def _pass_on(self, workload: Workload, waiting_gang: _WaitingGang | None = None) -> None:
        """Passes the waits of a gang to the policy's writer and to the metrics. None: it waits no more."""
        uid, key = workload.uid, (workload.namespace, workload.policy)
        of_policy = self._of_policy.setdefault(key, {})
        of_policy.pop(uid, None)
        first = waiting_gang.shown[0] if waiting_gang is not None and waiting_gang.shown else None
        if waiting_gang is not None and first is not None:
            of_policy[uid] = waiting_gang
        if not of_policy:
            del self._of_policy[key]
        self._policy_writer.waits(key, functools.partial(self._entries, key))
        for kind, since in self._since.items():
            if first is not None and kind is first.kind:
                since.put(uid, self._clock() if first.since is None else first.since)
            else:
                since.remove(uid)
            self._metrics.waiting.labels(kind).set(len(since))

    def _entries(self, policy: Key, most: int) -> list[WorkloadWaits]:
        """What the policy's status says of those of its gangs that wait: the first ones by their names."""
        gangs = heapq.nsmallest(
            most, self._of_policy.get(policy, {}).values(), key=lambda waiting_gang: waiting_gang.workload.name
        )
        return [waiting.in_status(each.workload, each.shown, self._clock()) for each in gangs]

    def _longest_s(self, kind: WaitKind) -> float:
        """Called by whichever thread reads the metrics."""
        oldest = self._since[kind].oldest
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest)

    def _put_on_preemption(self, workload: Workload, shown: Sequence[StartWait]) -> None:
        preemption = waiting.restarting(self._cache.preemptions.of_workload(workload.uid, workload.namespace))
        if preemption is None:
            return
        status = waiting.of_preemption(preemption, shown, self._clock())
        if status != preemption.status:
            preemption = dataclasses.replace(preemption, status=status)
            self._cache.preemptions.put(preemption)
            self._preemption_writer.touch(preemption)

    async def _write(self, key: Key) -> None:
        """Asks what Events say of the waits, and posts one on the workload."""
        namespace, uid = key
        if (ended_wait := self._ended.pop(uid, None)) is not None:
            await self._events.post_on(ended_wait[0], waiting.ended_note(), ended_wait[1])
        waiting_gang = self._known.get(uid)
        if waiting_gang is None or not waiting_gang.named:
            return
        if self._clock() - waiting_gang.asked_at >= self._look_s(waiting_gang):
            waiting_gang.asked_at = self._clock()
            for wait in waiting_gang.named[:_ASKED]:
                waiting_gang.said[wait.kind] = await self._asked(namespace, uid, wait)
            self._show(waiting_gang)
            policy = self._cache.policies.get((namespace, waiting_gang.workload.policy))
            try:
                late = waiting.late(self._cache.gang(uid).pods, self._clock() - NAMED_AFTER_S)
                await self._lost_pods.look(waiting_gang.workload, policy, late)
            except (client.KubeError, Unreadable) as error:
                logger.warning(
                    "could not look at lost pods", extra=seldom("lost pods", workload_uid=uid, error=str(error))
                )
        if not waiting_gang.shown:  # it has ended meanwhile
            return
        first, now = waiting_gang.shown[0], self._clock()
        since = now if first.since is None else first.since
        episode = f"{waiting_gang.workload.restarts} {first.kind} {since:.0f} {(now - since) // AGAIN_S:.0f}"
        if waiting_gang.posted != episode:
            waiting_gang.posted = episode
            logger.info(
                "a gang waits to start",
                extra=about(workload=waiting_gang.workload.name, namespace=namespace, why=first.in_words(now)),
            )
            note = waiting.note(waiting_gang.workload, waiting_gang.shown, now)
            await self._events.post_on(waiting_gang.workload, note, episode)

    async def _asked(self, namespace: str, uid: str, wait: StartWait) -> tuple[EventSaid, ...]:
        """What Events say of a wait, or Kueue of a suspension. Empty: nothing, or they cannot be read."""
        try:
            if wait.kind is WaitKind.SUSPENDED:
                return await self._queued(uid)
            events = [event for object_uid in wait.ask for event in await self._api.events_about(namespace, object_uid)]
            with reading("an Event"):
                return tuple(map(_said, events))
        except (client.KubeError, Unreadable) as error:
            logger.warning(
                "could not read why a gang waits", extra=seldom(wait.kind, workload_uid=uid, error=str(error))
            )
            return ()

    async def _queued(self, uid: str) -> tuple[EventSaid, ...]:
        """Why Kueue does not admit a workload."""
        for namespace, name in self._cache.suspensions.queue_entries(uid):
            body = await self._api.get(await self._api.preferred(objects.KUEUE_WORKLOADS), namespace, name)
            with reading("a Workload of Kueue"):
                for item in (body.get("status") or {}).get("conditions") or ():
                    if item.get("type") == waiting.QUOTA_RESERVED and item.get("status") == "False":
                        return (EventSaid(waiting.QUOTA_RESERVED, text(item.get("message") or ""), 0.0),)
        return ()


def _said(event: JsonObject) -> EventSaid:
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    at = max((parse_time(time) or 0.0 for time in times if time), default=0.0)
    return EventSaid(text(event.get("reason") or ""), text(event.get("note") or ""), at)
