"""Carries decisions out and takes the gangs' messages in: tells subscribers at once, has the rest recorded.

Everything here runs on the core's event loop. Telling only hands frames over to the subscribers' queues and
never waits, neither for a pod nor for the API; the recorder's tasks write behind its back. Telling is
level-based too: ``tell`` looks at an epoch and gives every subscriber what it lacks, so a decision of this
replica, one of its twin that the watch brings, and one from before a restart all end in the same call.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import tenacity

from gracepoint.wire.messages import (
    Acknowledgement,
    Forecast,
    Frame,
    Mode,
    Notice,
    Phase,
    Report,
    Resumption,
    Retraction,
)
from gracepoint_operator import kinds, kube, signals, status
from gracepoint_operator.decide import (
    DEADLINE_TOLERANCE_S,
    Decision,
    End,
    Move,
    Reached,
    Start,
    epoch_spec,
    is_ordinary_life,
    members,
)
from gracepoint_operator.epochs import Epoch, epoch_name
from gracepoint_operator.kube import Kube
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.objects import Pod, format_time
from gracepoint_operator.receipts import Receipts
from gracepoint_operator.record import Recorder
from gracepoint_operator.refresh import look_afresh
from gracepoint_operator.subscribers import Outgoing, Subscriber, Subscribers
from gracepoint_operator.world import World

log = logging.getLogger(__name__)

_TWIN_S = 2.0
_TWIN_POLL_S = 0.1


class UnknownPreemption(Exception):
    """A message names a preemption that is not there, or not of the pod's JobSet."""


class Deliverer:
    """Tells and listens.

    Args:
        api: Asked only where a message cannot be placed by what is known.
        world: What is known; epochs are put into it.
        subscribers: Whom this replica can tell.
        receipts: Whom it told.
        recorder: Writes to the API.
        metrics: Latencies.
        clock: Seconds since the epoch.

    Attributes:
        ready: True once the world is known; until then nobody is served.
    """

    def __init__(
        self,
        api: Kube,
        world: World,
        subscribers: Subscribers,
        receipts: Receipts,
        recorder: Recorder,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._world = world
        self._subscribers = subscribers
        self._receipts = receipts
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self.ready = False

    def carry_out(self, decision: Decision) -> None:
        """Does one decision, but for ``Check``, which needs waiting."""
        now = self._clock()
        match decision:
            case Start():
                begun = Epoch(decision.namespace, decision.name, None, decision.spec, status.noticed(decision.expected))
                self._changed(begun)
                log.info("signal", extra=about(preemption=begun.name, signal=begun.spec.signal))
            case Move():
                self._changed(dataclasses.replace(decision.epoch, spec=decision.spec))
            case End():
                after = status.ended(decision.epoch.status, decision.phase, decision.message, now)
                self._changed(dataclasses.replace(decision.epoch, status=after))
            case Reached():
                self._reached(decision.epoch, decision.stage, now)

    def tell(self, epoch: Epoch) -> None:
        """Gives every subscriber of the gang what it lacks of this epoch."""
        for subscriber in self._subscribers.of_jobset(epoch.spec.job_set.uid):
            self._tell_one(subscriber, epoch)

    def catch_up(self, subscriber: Subscriber) -> None:
        """Tells a new subscriber of what is under way."""
        for epoch in self._world.epochs_of(subscriber.hello.jobset_uid, subscriber.hello.namespace):
            self._tell_one(subscriber, epoch)

    async def take(self, pod: Pod, message: Acknowledgement | Report | Forecast | Resumption) -> None:
        """Takes in a message of a live pod.

        Raises:
            UnknownPreemption: It names one that is not there.
        """
        match message:
            case Acknowledgement():
                self._acknowledged(pod, await self._find(pod, message.preemption))
            case Report():
                await self._report(pod, message)
            case Forecast():
                self._recorder.forecast(message)
            case Resumption():
                self._resumed(pod, message)

    def _changed(self, epoch: Epoch) -> None:
        known = self._world.epochs.get(epoch.key)
        self._world.put_epoch(epoch)
        self.tell(epoch)
        self._recorder.touch(epoch, urgent=known is None or epoch.phase.ended > known.phase.ended)

    def _tell_one(self, subscriber: Subscriber, epoch: Epoch) -> None:
        if epoch.spec.mode is not Mode.ENFORCE or epoch.spec.signal == signals.TOLD_BY_GANG:
            return
        pod = self._world.pods.get(subscriber.hello.pod_uid)
        if pod is None or pod.namespace != epoch.namespace or not epoch.includes(pod):
            return
        told = subscriber.told.get(epoch.name)
        if epoch.phase is Phase.RETRACTED and told is not None and epoch.name not in subscriber.retracted:
            subscriber.retracted.add(epoch.name)
            make = functools.partial(_retraction, subscriber, epoch)
            subscriber.send(Outgoing(make, lambda: None))
        if epoch.phase.ended:
            return
        deadline_at = epoch.spec.deadline.timestamp()
        if told is None or deadline_at < told - DEADLINE_TOLERANCE_S:
            subscriber.told[epoch.name] = deadline_at
            subscriber.send(
                Outgoing(
                    make=lambda: _notice(subscriber, epoch, self._clock()),
                    written=lambda: self._told(subscriber, epoch),
                )
            )

    def _told(self, subscriber: Subscriber, epoch: Epoch) -> None:
        now = self._clock()
        hello = subscriber.hello
        if self._receipts.told(epoch.key, hello.pod_uid, hello.pod_name, now):
            self._metrics.signal_to_notice_s.observe(max(now - epoch.spec.observed_at.timestamp(), 0.0))
        self._recorder.touch(self._world.epochs.get(epoch.key, epoch))

    def _acknowledged(self, pod: Pod, epoch: Epoch) -> None:
        now = self._clock()
        told_at = self._receipts.told_at(epoch.key, pod.uid)
        if self._receipts.acknowledged(epoch.key, pod.uid, pod.name, now) and told_at is not None:
            self._metrics.notice_to_ack_s.observe(max(now - told_at, 0.0))
        self._recorder.touch(epoch)

    async def _report(self, pod: Pod, report: Report) -> None:
        if report.preemption:
            epoch = await self._find(pod, report.preemption)
        else:
            placed = await self._place(pod, report)
            if placed is None:
                return
            epoch = placed
        now = self._clock()
        told_at = self._receipts.told_at(epoch.key, pod.uid)
        if told_at is not None:
            notice_s = told_at - epoch.spec.observed_at.timestamp()
        else:  # the twin told the pod, or nobody did
            notice_s = epoch.timing("noticeSent") or 0.0
        after = status.reported(epoch, report, notice_s, now)
        if epoch.phase.ended and report.phase is not epoch.phase:
            log.warning(
                "report of a preemption that has ended",
                extra=about(preemption=epoch.name, phase=epoch.phase, reported=report.phase),
            )
        self._changed(dataclasses.replace(epoch, status=after))

    def _resumed(self, pod: Pod, message: Resumption) -> None:
        epochs = self._world.epochs_of(message.jobset_uid, pod.namespace)
        if not epochs or epochs[-1].includes(pod) or epochs[-1].spec.mode is not Mode.ENFORCE:
            return
        after = status.resumed(epochs[-1], message, self._clock())
        self._changed(dataclasses.replace(epochs[-1], status=after))

    def _reached(self, epoch: Epoch, stage: str, now: float) -> None:
        known = self._world.epochs.get(epoch.key, epoch)
        after = status.with_stage(known.status, stage, known.spec.observed_at.timestamp(), now)
        self._changed(dataclasses.replace(known, status=after))

    async def _find(self, pod: Pod, name: str) -> Epoch:
        """The epoch that a message names.

        The twin may have told the pod a moment ago and be about to make the object: it is waited for shortly.
        """
        key = (pod.namespace, name)
        soon = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(kube.NotFound),
            wait=tenacity.wait_fixed(_TWIN_POLL_S),
            stop=tenacity.stop_after_delay(_TWIN_S),
            reraise=True,
        )
        try:
            epoch: Epoch = await soon(self._fetch, key)
        except (kube.NotFound, kube.Refused) as error:
            raise UnknownPreemption(f"preemption: found {name!r}, which is not there") from error
        if epoch.spec.job_set.uid != pod.jobset_uid:
            raise UnknownPreemption(f"preemption: found {name!r}, expected one of the pod's JobSet")
        return epoch

    async def _fetch(self, key: tuple[str, str]) -> Epoch:
        if key not in self._world.epochs:
            self._world.put(kinds.PREEMPTIONS, await self._api.get(kinds.PREEMPTIONS, *key), listed=True)
        if key not in self._world.epochs:
            raise kube.NotFound(f"{key}: it was deleted in between")
        return self._world.epochs[key]

    async def _place(self, pod: Pod, report: Report) -> Epoch | None:
        """The epoch of a report that names none; None where the SIGTERM was ordinary life."""
        if (known := self._known(pod)) is not None:
            return known
        jobset = self._world.jobsets.get(pod.jobset_uid)
        if jobset is None:
            return None
        await look_afresh(self._api, self._world, jobset, [pod.job_name])
        if (known := self._known(pod)) is not None:  # made meanwhile: by another report, or for a signal
            return known
        gang = self._world.gang(pod.jobset_uid)
        if gang.jobset is None or gang.policy is None or is_ordinary_life(gang, pod):
            log.info("a gang ends in ordinary life", extra=about(pod=pod.name, phase=report.phase))
            return None
        signal = signals.told_by_gang(pod, report.cause)
        spec = epoch_spec(gang.jobset, gang.policy, gang.epochs, [(signal, self._clock())])
        name = epoch_name(gang.jobset.name, gang.jobset.uid, spec.epoch)
        epoch = Epoch(pod.namespace, name, None, spec, status.noticed(len(members(gang))))
        self._world.put_epoch(epoch)
        return epoch

    def _known(self, pod: Pod) -> Epoch | None:
        """The epoch that a report without a name is about, if there is one."""
        latest = next(reversed(self._world.epochs_of(pod.jobset_uid, pod.namespace)), None)
        about_it = latest is not None and latest.includes(pod) and not _left_the_gang_training(latest)
        return latest if about_it else None


def _left_the_gang_training(epoch: Epoch) -> bool:
    """True if the epoch ended and its gang went on: what the gang reports by itself later is another disruption.

    One that only the gang knew of may have expired before the gang's last word, which is still about it.
    """
    return epoch.phase is Phase.RETRACTED or (
        epoch.phase is Phase.EXPIRED and epoch.spec.signal != signals.TOLD_BY_GANG
    )


def _notice(subscriber: Subscriber, epoch: Epoch, now: float) -> Frame:
    spec = epoch.spec
    deadline_at = spec.deadline.timestamp()
    return Notice(
        preemption=epoch.name,
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        jobset_uid=spec.job_set.uid,
        cause=spec.cause,
        signal=spec.signal,
        confidence=spec.confidence,
        nodes=list(spec.nodes),
        remaining_s=round(deadline_at - now, 4),
        deadline=format_time(deadline_at),
        mode=spec.mode,
    )


def _retraction(subscriber: Subscriber, epoch: Epoch) -> Frame:
    return Retraction(
        preemption=epoch.name,
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        reason=epoch.status.message or "",
    )
