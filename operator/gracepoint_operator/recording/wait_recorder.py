"""Records what gangs wait for before all their processes run: in statuses, Events and metrics.

``observe`` is called on the controller's event loop whenever a workload is decided about, and does not wait. It says
when to look again, since time alone turns a moment into a wait. A task of a write queue then asks for the Events on the
one pod or Job that waits, at most once in ``LOOK_S`` for each gang and less often if many wait, and posts an Event on
the workload. ``close`` ends the queue. Both replicas see the same objects, and write the same.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence

from gracepoint_operator.decisions import waiting
from gracepoint_operator.decisions.waiting import NAMED_AFTER_S, EventSaid, StartWait, WaitKind
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import format_time, parse_time, text, true_conditions
from gracepoint_operator.kube.write_queue import Key, WriteQueue
from gracepoint_operator.logs import about, seldom
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.read_errors import Unreadable, reading
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.preemption_writer import PreemptionWriter
from gracepoint_operator.recording.trouble_recorder import RecorderContext
from gracepoint_operator.resources import CheckpointPolicy
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
        self._lost_since: dict[tuple[str, str], float] = {}  # workload's UID and pod's name -> when it was found first

    async def look(self, workload: Workload, policy: CheckpointPolicy | None, waits: Sequence[StartWait]) -> None:
        """Looks at the pods that a gang waits for until they are gone.

        Raises:
            client.KubeError: The API server does not answer, or refuses.
        """
        ending = {(workload.uid, wait.pod): wait for wait in waits if wait.kind is WaitKind.DELETION}
        before = self._lost_since
        self._lost_since = {key: at for key, at in before.items() if key[0] != workload.uid or key in ending}
        if not self._allowed or policy is None or not policy.spec.lost_nodes.delete_pods:
            return
        for key, wait in ending.items():
            reason = await self._why_lost(wait.node)
            if reason is None:
                self._lost_since.pop(key, None)
            elif key not in before:
                self._lost_since[key] = self._clock()
            elif self._clock() - before[key] >= LOOK_S:
                await self._delete(workload, wait, reason)

    def forget(self, uid: str) -> None:
        """A workload is gone."""
        self._lost_since = {key: at for key, at in self._lost_since.items() if key[0] != uid}

    async def _why_lost(self, name: str) -> str | None:
        """Why nothing can run on a node any more. None: something may."""
        try:
            node = await self._api.get(objects.NODES, None, name)
        except client.NotFound:
            return "its node is gone"
        with reading(f"the node {name}"):
            if "Ready" in true_conditions(node.get("status") or {}):
                return None
            if any(taint.get("key") == _OUT_OF_SERVICE for taint in (node.get("spec") or {}).get("taints") or ()):
                return f"its node has the taint {_OUT_OF_SERVICE}"
            owners = node["metadata"].get("ownerReferences") or ()
            claims = {owner.get("uid") for owner in owners if _is_node_claim(owner)}
        if not claims:
            return None
        try:
            there = {item["metadata"]["uid"] for item in (await self._api.list(objects.NODE_CLAIMS)).items}
        except client.NotFound:
            return None  # Karpenter is not there: nobody can know
        return None if claims & there else "the NodeClaim of its node is gone"

    async def _delete(self, workload: Workload, wait: StartWait, reason: str) -> None:
        try:
            pod = await self._api.get(objects.PODS, workload.namespace, wait.pod)
            if pod["metadata"].get("deletionTimestamp") is None or pod["spec"].get("nodeName") != wait.node:
                return  # another pod of this name
            if (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded"):
                pod = await self._api.merge_status(
                    objects.PODS, workload.namespace, wait.pod, _failed(pod, reason, self._clock())
                )
            await self._api.delete(objects.PODS, pod, force=True)
        except (client.NotFound, client.Conflict):
            return  # it has ended, or somebody else deletes it
        self._metrics.lost_pods_deleted.inc()
        logger.warning(
            "a pod of a lost node was deleted by force",
            extra=about(pod=wait.pod, namespace=workload.namespace, node=wait.node, why=reason),
        )
        note = waiting.deleted_note(wait.pod, wait.node, reason)
        await self._events.post_on(workload, note, str(pod["metadata"]["uid"]))


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


class WaitRecorder:
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
        self._api = api
        self._cache = context.cache
        self._policy_writer = context.policy_writer
        self._preemption_writer = preemption_writer
        self._events = context.events
        self._lost_pods = lost_pods
        self._metrics = metrics = context.metrics
        self._clock = context.clock
        self._known: dict[str, _WaitingGang] = {}  # by the workload's UID
        self._ended: dict[str, tuple[Workload, str]] = {}  # of what an Event has to say that it is over
        self._oldest: dict[WaitKind, float] = {}  # since when the gang waits that waits longest
        for kind in WaitKind:
            metrics.waiting.labels(kind)
            metrics.waiting_s.labels(kind).set_function(functools.partial(self._longest_s, kind))
        self._write_queue = WriteQueue("wait", self._write, metrics, context.interval_s)

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
        waiting_gang.workload = workload
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

    async def close(self, timeout_s: float) -> None:
        await self._write_queue.close(timeout_s)

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
        self._pass_on(waiting_gang.workload)
        self._put_on_preemption(waiting_gang.workload, shown)

    def _account(self, uid: str, before: float | None, now: float | None) -> None:
        """Tells the account since when the gang is blocked, or that it is blocked no more."""
        goodput = self._policy_writer.goodput
        if before is not None and now is None:
            goodput.blocked(uid, before, self._clock())
        elif now is not None and now != before:
            goodput.blocked(uid, now, None)

    def _pass_on(self, workload: Workload) -> None:
        """Passes the waits to the policy's writer and to the metrics."""
        key, now = (workload.namespace, workload.policy), self._clock()
        shown_gangs = [waiting_gang for waiting_gang in self._known.values() if waiting_gang.shown]
        of_policy = [
            waiting_gang
            for waiting_gang in shown_gangs
            if (waiting_gang.workload.namespace, waiting_gang.workload.policy) == key
        ]
        self._policy_writer.waits(
            key, [waiting.in_status(waiting_gang.workload, waiting_gang.shown, now) for waiting_gang in of_policy]
        )
        numbers, oldest = dict.fromkeys(WaitKind, 0), dict[WaitKind, float]()
        for waiting_gang in shown_gangs:
            first = waiting_gang.shown[0]
            since = now if first.since is None else first.since
            numbers[first.kind] += 1
            oldest[first.kind] = min(since, oldest.get(first.kind, since))
        self._oldest = oldest
        for kind, number in numbers.items():
            self._metrics.waiting.labels(kind).set(number)

    def _longest_s(self, kind: WaitKind) -> float:
        """Called by whichever thread reads the metrics."""
        since = self._oldest.get(kind)
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def _put_on_preemption(self, workload: Workload, shown: Sequence[StartWait]) -> None:
        preemption = waiting.restarting(self._cache.preemptions.of_workload(workload.uid, workload.namespace))
        if preemption is None:
            return
        status = waiting.of_preemption(preemption.status, shown, self._clock())
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
                await self._lost_pods.look(waiting_gang.workload, policy, waiting_gang.named)
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
            said = waiting.note(waiting_gang.workload, waiting_gang.shown, now)
            await self._events.post_on(waiting_gang.workload, said, episode)

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
