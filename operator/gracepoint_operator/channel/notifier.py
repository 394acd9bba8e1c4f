"""Carries decisions out: tells subscribers at once, has the rest recorded.

Everything here runs on the core's event loop. Telling only hands frames over to the subscribers' queues and
never waits, neither for a pod nor for the API; the recorder's tasks write behind its back. Telling is
level-based too: ``tell`` looks at an epoch and gives every subscriber what it lacks, so a decision of this
replica, one of its twin that the watch brings, and one from before a restart all end in the same call.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable

from gracepoint.wire.messages import Frame, Mode, Notice, Phase, Retraction
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber, Subscribers
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.decisions.decide import End, Move, Reached, StartPreemption
from gracepoint_operator.decisions.preemption_spec import DEADLINE_TOLERANCE_S
from gracepoint_operator.kube.fields import format_time
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.recording.acknowledgements import Acknowledgements
from gracepoint_operator.recording.preemption_writer import PreemptionWriter

log = logging.getLogger(__name__)

#: A process that was cut off hears on its return of so many retractions at most: more than it can have missed.
_RETRACTIONS = 8


class Notifier:
    """Tells.

    Args:
        world: What is known; epochs are put into it.
        subscribers: Whom this replica can tell.
        receipts: Whom it told.
        recorder: Writes to the API.
        metrics: Latencies.
        clock: Seconds since the epoch.

    Attributes:
        ready: True once the world is known; until then nobody is served.
        joined: UIDs of workloads with new subscribers, until somebody takes them out: these have missed all hints.
    """

    def __init__(
        self,
        cache: ClusterCache,
        subscribers: Subscribers,
        acknowledgements: Acknowledgements,
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
        """Does one decision about an epoch."""
        now = self._clock()
        match decision:
            case StartPreemption():
                begun = PreemptionRecord(
                    decision.namespace,
                    decision.name,
                    None,
                    decision.spec,
                    preemption_status.noticed(decision.expected, decision.spec),
                )
                self.changed(begun)
                log.info("signal", extra=about(preemption=begun.name, signal=begun.spec.signal))
            case Move():
                self.changed(dataclasses.replace(decision.epoch, spec=decision.spec))
            case End():
                after = preemption_status.ended(
                    decision.epoch.status, decision.phase, decision.reason, decision.message, now
                )
                self.changed(dataclasses.replace(decision.epoch, status=after))
            case Reached():
                self._reached(decision.epoch, decision.stage, now)

    def tell(self, epoch: PreemptionRecord, subscribers: Iterable[Subscriber] | None = None) -> None:
        """Sends what the subscribers were not told yet of a preemption.

        Args:
            epoch: The preemption.
            subscribers: Whom to tell. None: every subscriber of its workload.
        """
        if not preemption_status.is_told(epoch):
            return
        if subscribers is None:
            subscribers = self._subscribers.of_workload(epoch.spec.workload.uid)
        for subscriber in subscribers:
            pod = self._cache.pods.get(subscriber.hello.pod_uid)
            if pod is None or pod.namespace != epoch.namespace or not epoch.includes(pod):
                continue
            if epoch.phase is Phase.RETRACTED and epoch.name not in subscriber.retracted:
                subscriber.retracted.add(epoch.name)
                subscriber.send(Outgoing(functools.partial(_retraction, subscriber, epoch)))
            if epoch.phase.ended:
                continue
            told = subscriber.told.get(epoch.name)
            deadline_at = epoch.spec.deadline.timestamp()
            if told is None or abs(deadline_at - told) > DEADLINE_TOLERANCE_S:
                subscriber.told[epoch.name] = deadline_at
                subscriber.send(
                    Outgoing(
                        # The remaining time is that of the moment at which the frame is written.
                        make=functools.partial(_notice, subscriber, epoch, self._clock),
                        written=functools.partial(self._told, pod, epoch),
                    )
                )

    def catch_up(self, subscriber: Subscriber) -> None:
        """Tells a new subscriber of what is under way, and of what was taken back.

        The process may have been told by its connection before, or by the twin, and have missed the rest.
        """
        epochs = self._cache.preemptions.epochs_of(subscriber.hello.workload_uid, subscriber.hello.namespace)
        retracted = [epoch.name for epoch in epochs if epoch.phase is Phase.RETRACTED]
        subscriber.retracted.update(retracted[:-_RETRACTIONS])
        for epoch in epochs:
            self.tell(epoch, [subscriber])
        self.joined.add(subscriber.hello.workload_uid)

    def changed(self, epoch: PreemptionRecord) -> None:
        """The epoch is new, or something about it: it is kept, told and recorded."""
        known = self._cache.preemptions.epochs.get(epoch.key)
        self._cache.preemptions.put(epoch)
        self.tell(epoch)
        ended = epoch.phase.ended and known is not None and known.phase is not epoch.phase
        self._preemption_writer.touch(epoch, urgent=known is None or ended)

    def _told(self, pod: Pod, epoch: PreemptionRecord) -> None:
        now = self._clock()
        if self._acknowledgements.told(epoch.key, pod, now):
            self._metrics.signal_to_notice_s.observe(max(now - epoch.spec.observed_at.timestamp(), 0.0))
        self._preemption_writer.touch(self._cache.preemptions.epochs.get(epoch.key, epoch))

    def _reached(self, epoch: PreemptionRecord, stage: str, now: float) -> None:
        known = self._cache.preemptions.epochs.get(epoch.key, epoch)
        after = preemption_status.with_stage(known.status, stage, known.spec.observed_at.timestamp(), now)
        self.changed(dataclasses.replace(known, status=after))


def _notice(subscriber: Subscriber, epoch: PreemptionRecord, clock: Callable[[], float]) -> Frame:
    spec = epoch.spec
    deadline_at = spec.deadline.timestamp()
    return Notice(
        preemption=epoch.name,
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        workload_uid=spec.workload.uid,
        cause=spec.cause,
        signal=spec.signal,
        confidence=spec.confidence,
        nodes=list(spec.nodes),
        remaining_s=round(deadline_at - clock(), 4),
        deadline=format_time(deadline_at),
        mode=spec.mode if spec.exits else Mode.DRILL,  # which to the library means: save, and train on
        revision=round(deadline_at * 1000),  # all replicas have it from the record, or have observed the same
    )


def _retraction(subscriber: Subscriber, epoch: PreemptionRecord) -> Frame:
    return Retraction(
        preemption=epoch.name,
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        reason=epoch.status.message or "",
    )
