"""Notifies the pods that are connected: of preemptions, of hints, and of the authorities to trust.

Everything here runs on the controller's event loop. To notify a subscriber means to put a frame into its queue. That
never waits, neither for a pod nor for the API server. The preemption writer's tasks write later. A notifier compares
states: it looks at a preemption, a gang or the authorities, and sends every subscriber what was not sent to it yet. So
a decision of this replica, one of the other replica that the watch brings, and one from before a restart take the same
path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence

from gracepoint.wire.frames import Frame, Hint, Notice, Retraction, Trust, trust_digest
from gracepoint.wire.messages import Confidence, Mode, Phase
from gracepoint_operator import signals
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber, Subscribers, WakeUps
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.decisions.decide import End, Move, Reached, StartPreemption, is_late
from gracepoint_operator.decisions.effective_signals import DEADLINE_TOLERANCE_S
from gracepoint_operator.kube.objects import Pod, format_time
from gracepoint_operator.logs import about, decided
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.recording.preemption_writer import AcknowledgementLog, PreemptionWriter
from gracepoint_operator.signals import Signal

logger = logging.getLogger(__name__)

#: At most this number of retractions is sent to a process that reconnects. It cannot have missed more.
_RETRACTIONS = 8
#: After this number of subscribers the loop does other work: these take about 5 ms of CPU.
_AT_ONCE = 512
#: The record of a new preemption is written after this many seconds for each notified pod: about as long as the
#: channel's thread needs. Requests and the events that they cause would take turns with it for the interpreter, and
#: half of a gang of a thousand would be notified 0.04 s later (``python -m benchmarks.notice``).
_RECORDED_AFTER_S, _MOST_RECORDED_AFTER_S = 0.0003, 0.5


class Notifier:
    """Carries out decisions about preemptions: notifies subscribers at once, and has the rest recorded.

    Args:
        cache: What is known of the cluster. Preemptions are stored in it.
        subscribers: The pods that are connected to this replica.
        acknowledgements: Keeps which pods this replica has notified.
        preemption_writer: Writes preemptions to the API server.
        metrics: Gets latencies.
        clock: Seconds since the epoch.

    Attributes:
        ready: True once the cluster is known. Until then nobody is served.
        joined: UIDs of workloads with new subscribers, which have missed all hints. The controller empties it.
    """

    def __init__(
        self,
        cache: ClusterCache,
        subscribers: Subscribers,
        acknowledgements: AcknowledgementLog,
        preemption_writer: PreemptionWriter,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._subscribers = subscribers
        self._acknowledgements = acknowledgements
        self._preemption_writer = preemption_writer
        self._metrics = metrics
        self._clock = clock
        self.ready = False
        self.joined: set[str] = set()

    def carry_out(self, decision: StartPreemption | Move | End | Reached) -> None:
        """Carries out one decision about a preemption."""
        now = self._clock()
        match decision:
            case StartPreemption():
                preemption = PreemptionRecord(
                    decision.namespace,
                    decision.name,
                    None,
                    decision.spec,
                    preemption_status.noticed(decision.expected, decision.spec),
                )
                self.store_and_notify(preemption)
                logger.info("signal", extra=decided(preemption=preemption.name, signal=preemption.spec.signal))
            case Move():
                self.store_and_notify(dataclasses.replace(decision.preemption, spec=decision.spec))
            case End():
                after = preemption_status.ended(
                    decision.preemption.status, decision.phase, decision.reason, decision.message, now
                )
                self.store_and_notify(dataclasses.replace(decision.preemption, status=after))
            case Reached():
                self._reached(decision.preemption, decision.stage, now)

    def notify(self, preemption: PreemptionRecord, subscribers: Iterable[Subscriber] | None = None) -> None:
        """Sends the subscribers what was not sent to them yet of a preemption.

        Args:
            preemption: The preemption.
            subscribers: Whom to notify. None: every subscriber of its workload.
        """
        if not preemption_status.is_announced(preemption):
            return
        whole = (
            self._subscribers.of_workload(preemption.spec.workload.uid) if subscribers is None else list(subscribers)
        )
        self._notify(preemption, whole, 0)

    def _notify(self, preemption: PreemptionRecord, subscribers: Sequence[Subscriber], begin: int) -> None:
        """Notifies the subscribers from ``begin`` on. Other work of the loop runs between thousands of them."""
        pods, deadline_at = self._cache.objects.pods, preemption.spec.deadline.timestamp()
        retracted = preemption.phase is Phase.RETRACTED
        # Nobody is notified long after the deadline: such a record was restored from a backup.
        is_over = preemption.phase.ended or is_late(preemption, self._clock())
        wake_ups = WakeUps()
        for subscriber in subscribers[begin : begin + _AT_ONCE]:
            pod = pods.get(subscriber.hello.pod_uid)
            if pod is None or pod.namespace != preemption.namespace or not preemption.includes(pod):
                continue
            if retracted and preemption.name not in subscriber.retracted:
                subscriber.retracted.add(preemption.name)
                subscriber.send(Outgoing(functools.partial(_retraction, subscriber, preemption)), wake_ups)
            if is_over:
                continue
            sent_deadline_at = subscriber.sent_deadlines.get(preemption.name)
            if sent_deadline_at is None or abs(deadline_at - sent_deadline_at) > DEADLINE_TOLERANCE_S:
                subscriber.sent_deadlines[preemption.name] = deadline_at
                notice = _OutgoingNotice(subscriber, pod, preemption, self._clock, self._record_notice)
                subscriber.send(Outgoing(notice.make, notice.written, notice.sent), wake_ups)
        wake_ups.post()
        if begin + _AT_ONCE < len(subscribers):
            asyncio.get_running_loop().call_soon(self._notify_rest, preemption.key, subscribers, begin + _AT_ONCE)

    def _notify_rest(self, key: tuple[str, str], subscribers: Sequence[Subscriber], begin: int) -> None:
        """Continues with the preemption as it is known now. A change in between was sent to all, or is about to be."""
        preemption = self._cache.preemptions.records.get(key)
        if preemption is not None:
            self._notify(preemption, subscribers, begin)

    def catch_up(self, subscriber: Subscriber) -> None:
        """Notifies a new subscriber of preemptions in progress, and of retractions.

        An earlier connection, or the other replica, may have notified the process, and it may have missed the rest.
        """
        preemptions = self._cache.preemptions.of_workload(subscriber.hello.workload_uid, subscriber.hello.namespace)
        retracted = [preemption.name for preemption in preemptions if preemption.phase is Phase.RETRACTED]
        subscriber.retracted.update(retracted[:-_RETRACTIONS])
        for preemption in preemptions:
            self.notify(preemption, [subscriber])
        self.joined.add(subscriber.hello.workload_uid)

    def store_and_notify(self, preemption: PreemptionRecord) -> None:
        """Stores a preemption that is new or has changed, notifies its pods, and has it recorded."""
        before = self._cache.preemptions.records.get(preemption.key)
        self._cache.preemptions.put(preemption)
        self.notify(preemption)
        is_end = preemption.phase.ended and before is not None and before.phase is not preemption.phase
        notified_pods = len(self._subscribers.of_workload(preemption.spec.workload.uid)) if before is None else 0
        after_s = min(_MOST_RECORDED_AFTER_S, notified_pods * _RECORDED_AFTER_S)
        self._preemption_writer.touch(preemption, urgent=before is None or is_end, after_s=after_s)

    def _record_notice(self, pod: Pod, preemption: PreemptionRecord, at: float) -> None:
        if self._acknowledgements.notified(preemption.key, pod, at):
            self._metrics.signal_to_notice_s.observe(max(at - preemption.spec.observed_at.timestamp(), 0.0))
        self._preemption_writer.touch(self._cache.preemptions.records.get(preemption.key, preemption))

    def _reached(self, preemption: PreemptionRecord, stage: str, now: float) -> None:
        newest = self._cache.preemptions.records.get(preemption.key, preemption)
        after = preemption_status.with_stage(newest.status, stage, newest.spec.observed_at.timestamp(), now)
        self.store_and_notify(dataclasses.replace(newest, status=after))


class _OutgoingNotice:
    """A notice to one subscriber.

    Args:
        subscriber: Whom to notify.
        pod: Its pod.
        preemption: The preemption.
        clock: Seconds since the epoch.
        on_written: Called after the notice was written, with the time at which that was.
    """

    __slots__ = ("_at", "_clock", "_on_written", "_pod", "_preemption", "_subscriber")

    def __init__(
        self,
        subscriber: Subscriber,
        pod: Pod,
        preemption: PreemptionRecord,
        clock: Callable[[], float],
        on_written: Callable[[Pod, PreemptionRecord, float], None],
    ) -> None:
        self._subscriber = subscriber
        self._pod = pod
        self._preemption = preemption
        self._clock = clock
        self._on_written = on_written
        self._at = 0.0

    def make(self) -> Frame:
        """Creates the frame when it is written: the remaining time is that of this moment."""
        return _notice(self._subscriber, self._preemption, self._clock())

    def sent(self) -> None:
        """Reads the time at which the notice was written. A slow pod's write takes seconds."""
        self._at = self._clock()

    def written(self) -> None:
        """Keeps that the pod was notified."""
        self._on_written(self._pod, self._preemption, self._at)


def _notice(subscriber: Subscriber, preemption: PreemptionRecord, now: float) -> Frame:
    spec = preemption.spec
    deadline_at = spec.deadline.timestamp()
    return Notice(
        preemption=preemption.name,
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        workload_uid=spec.workload.uid,
        cause=spec.cause,
        signal=spec.signal,
        confidence=spec.confidence,
        nodes=list(spec.nodes),
        remaining_s=round(deadline_at - now, 4),
        deadline=format_time(deadline_at),
        mode=spec.mode if spec.exits else Mode.DRILL,  # to the library this means: save, and continue to train
        revision=round(deadline_at * 1000),  # all replicas read it from the record, or observed the same
    )


def _retraction(subscriber: Subscriber, preemption: PreemptionRecord) -> Frame:
    return Retraction(
        preemption=preemption.name,
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        reason=preemption.status.message or "",
    )


#: At most this number of hints is in one frame. More hints of the same moment would add no information.
_MOST = 64


def hints_for(gang: GangSnapshot) -> list[Signal]:
    """The hints for a gang: of kinds that its policy names, and first seen after its pods were bound."""
    if gang.policy is None or gang.policy.spec.mode is Mode.OBSERVE:
        return []
    hints = []
    for pod in gang.suspects if gang.marks else ():
        bound_at = gang.bound_at.get(pod.uid)
        for signal in signals.of_pod(pod, gang.marks.get(pod.uid, ())):
            if signal.confidence is not Confidence.HINT or not gang.policy.spec.counts(signal.kind):
                continue
            if bound_at is not None and gang.since[signal.mark] >= bound_at:
                hints.append(signal)
    return hints


class HintNotifier:
    """Notifies gangs of hints: signs that a disruption may be near. Hints are not recorded.

    Whenever a gang is decided about, each of its subscribers is sent the hints that are new to it, in one frame. It
    does not matter which replica sends a hint, or how often a stream was lost in between: the library recognizes a hint
    by its name, which is the same in all replicas.

    Args:
        subscribers: The pods that are connected to this replica.
    """

    def __init__(self, subscribers: Subscribers) -> None:
        self._subscribers = subscribers
        self._hinted: set[str] = set()  # UIDs of the workloads that had hints at the last look

    def notify(self, gang: GangSnapshot) -> None:
        """Sends every subscriber of the gang the hints that were not sent to it yet."""
        hints = hints_for(gang)
        if not hints and gang.workload_uid not in self._hinted:
            return  # as for nearly all gangs
        if hints:
            self._hinted.add(gang.workload_uid)
        else:
            self._hinted.discard(gang.workload_uid)
        marks = {signal.mark for signal in hints}
        uids = {pod.uid for pod in gang.members}
        for subscriber in self._subscribers.of_workload(gang.workload_uid):
            subscriber.hinted &= marks  # a sign that goes away and comes again is sent again
            new_hints = [signal for signal in hints if signal.mark not in subscriber.hinted]
            if new_hints and subscriber.hello.takes_hints and subscriber.hello.pod_uid in uids:
                subscriber.hinted |= {signal.mark for signal in new_hints}
                subscriber.send(Outgoing(functools.partial(_frame, subscriber, new_hints[:_MOST])))
                logger.info(
                    "hint", extra=about(pod=subscriber.hello.pod_name, signal=new_hints[0].text, hints=len(new_hints))
                )


def _frame(subscriber: Subscriber, new: Sequence[Signal]) -> Hint:
    return Hint(
        hints=sorted({hashlib.sha256(signal.mark.encode()).hexdigest()[:16] for signal in new}),
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        workload_uid=subscriber.hello.workload_uid,
        cause=new[0].cause,
        signal=new[0].text,
        nodes=sorted({signal.node for signal in new if signal.node}),
    )


class TrustNotifier:
    """Notifies pods of the authorities to trust.

    Every subscriber whose authorities differ from the operator's is sent these, when they change and when it connects.

    Args:
        subscribers: The pods that are connected to this replica.
    """

    def __init__(self, subscribers: Subscribers) -> None:
        self._subscribers = subscribers
        self._authorities = ""
        self._digest = ""

    def set_authorities(self, authorities: str) -> None:
        """Notifies all subscribers, if these authorities are new.

        Args:
            authorities: PEM certificates.
        """
        digest = trust_digest(authorities)
        if not authorities or digest == self._digest:
            return
        self._authorities, self._digest = authorities, digest
        self.notify(self._subscribers.all())

    def notify(self, subscribers: Iterable[Subscriber]) -> None:
        """Notifies those of the subscribers that have other authorities."""
        pods = 0
        for subscriber in subscribers:
            if self._digest and subscriber.trusts not in (None, self._digest):
                subscriber.trusts = self._digest
                subscriber.send(Outgoing(functools.partial(Trust, authorities=self._authorities)))
                pods += 1
        if pods:
            logger.info("pods notified of the authorities to trust", extra=about(pods=pods, digest=self._digest))
