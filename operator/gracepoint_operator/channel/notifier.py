"""Notifies the pods that are connected to this replica: of preemptions, hints, and the authorities to trust.

Everything here runs on the controller's event loop; there are no locks. To notify a subscriber means to put a frame
into its queue. That never waits, neither for a pod nor for the API server. The preemption writer's tasks write later. A
notifier compares states: it looks at a preemption, a gang or the authorities, and sends every subscriber what was not
sent to it yet. So a decision of this replica, one of the other replica that the watch brings, and one from before a
restart take the same path.

Each queue is bounded, and only the task of the pod's stream empties it (``channel.service``). If a pod does not read,
its queue fills up, the pod is disconnected, and it may connect again. The other pods do not notice. Each stream has a
``Heartbeat`` on the stream's loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence

from gracepoint.wire.frames import Frame, Hint, Notice, Ping, Retraction, SnapshotPlacement, Trust, trust_digest
from gracepoint.wire.messages import Confidence, Mode, Phase, Subscription
from gracepoint_operator import signals
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.decisions.decide import End, Move, Reached, StartPreemption, is_late
from gracepoint_operator.decisions.effective_signals import DEADLINE_TOLERANCE_S
from gracepoint_operator.event_loop import LoopCalls
from gracepoint_operator.kube.objects import Pod, format_time
from gracepoint_operator.logs import about, decided
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.recording.preemption_writer import AcknowledgementLog, PreemptionWriter
from gracepoint_operator.signals import Signal

logger = logging.getLogger(__name__)

#: Seconds between two beats of a stream's heartbeat.
HEARTBEAT_S = 5.0
#: A write that has not ended at the third beat has had at least ten seconds.
_BEATS_OF_A_WRITE = 3
_QUEUE_LENGTH = 32
_REMEMBERED_SESSIONS = 64  # for each pod
#: At most this number of retractions is sent to a process that reconnects. It cannot have missed more.
_RETRACTIONS = 8
#: After this number of subscribers the loop does other work: these take about 5 ms of CPU.
AT_ONCE = 512
#: The record of a new preemption is written after this many seconds for each notified pod: about as long as the
#: channel's thread needs. Requests and the events that they cause would take turns with it for the interpreter, and
#: half of a gang of a thousand would be notified 0.04 s later (``python -m benchmarks.notice``).
_RECORDED_AFTER_S, _MOST_RECORDED_AFTER_S = 0.0003, 0.5


def nothing() -> None:
    """The default of the calls in ``Outgoing``: does nothing."""


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A frame to be written.

    Attributes:
        make: Creates the frame when it is written, so that ``remaining_s`` is that of this moment. It is called on
            the stream's loop, so it must read only what never changes.
        sent: Called on the stream's loop at once after the frame was written.
        written: Called on the controller's loop some time after ``sent``.
    """

    make: Callable[[], Frame]
    written: Callable[[], None] = nothing
    sent: Callable[[], None] = nothing


class Subscriber:
    """One connected process.

    Args:
        hello: As in the attributes.
        calls: Calls on the loop of the stream, which all streams share. None: it has its own once it takes frames.

    Attributes:
        hello: The message with which the process subscribed.
        sent_deadlines: The deadline that was sent last, in seconds since the epoch, by name of the preemption.
        sent_causes: The cause that was sent last, by name of the preemption.
        retracted: Names of preemptions whose retraction was sent.
        hinted: Marks of which a hint was sent.
        placement: The placement of snapshots that was sent last, and when, in seconds since the epoch. None: none was.
        trusts: ``trust_digest`` of the authorities that it has, or was sent. None: it cannot be sent others.
        is_pod: False for the replica's own subscriber (``Canary``).
        closed: True once the stream must end.
        request_ended: True once its request has ended. It is not connected after that. Only ``Subscribers`` sets it.
    """

    def __init__(self, hello: Subscription, calls: LoopCalls | None = None) -> None:
        self.hello = hello
        self.sent_deadlines: dict[str, float] = {}
        self.sent_causes: dict[str, str] = {}
        self.retracted: set[str] = set()
        self.hinted: set[str] = set()
        self.trusts = hello.trust
        self.placement: tuple[SnapshotPlacement, float] | None = None
        self.is_pod = True
        self.closed = False
        self.request_ended = False
        self._frames: collections.deque[Outgoing] = collections.deque()
        self._news = asyncio.Event()
        self._calls = calls

    def send(self, outgoing: Outgoing, wake_ups: WakeUps | None = None) -> None:
        """Adds a frame to the queue. If the queue is full, disconnects the subscriber.

        Args:
            outgoing: The frame.
            wake_ups: Wakes the stream's loop later. None: it is woken at once.
        """
        if len(self._frames) >= _QUEUE_LENGTH:
            self.closed = True
        else:
            self._frames.append(outgoing)
        self._wake(wake_ups)

    def close(self) -> None:
        """Ends the stream. Frames that were not written are dropped."""
        self.closed = True
        self._wake()

    @property
    def is_idle(self) -> bool:
        """True if no frame waits."""
        return not self._frames

    async def next(self) -> Outgoing | None:
        """Waits for a frame without a timeout. Returns None once the subscriber is closed."""
        # ``_calls`` is set before the queue is read, so that a frame which is added after the read wakes the loop.
        self._calls = self._calls or LoopCalls(asyncio.get_running_loop())
        while True:
            self._news.clear()
            if self.closed:
                return None
            if self._frames:
                return self._frames.popleft()
            await self._news.wait()

    def _wake(self, wake_ups: WakeUps | None = None) -> None:
        if self._calls is None:
            return
        if wake_ups is None:
            self._calls.post(self._news.set)
        else:
            wake_ups.add(self._calls, self._news)


class Heartbeat:
    """The heartbeat of one stream: a ping when there is nothing else to send, and the end of a stuck write.

    It must be created on the stream's event loop, on which it runs. Each stream has one timer, which repeats until
    ``stop``. The frames do not touch it: a timer for each write, and one for each wait for a frame, took a third of the
    time that it takes to notify a gang.

    Args:
        subscriber: Gets a ping at each beat at which no frame waits and none is written.
        give_up: Called once, if a write is stuck.

    Attributes:
        writing: True while the stream's task writes a frame. The task sets it.
    """

    def __init__(self, subscriber: Subscriber, give_up: Callable[[], None]) -> None:
        self.writing = False
        self._subscriber = subscriber
        self._give_up = give_up
        self._held_up = 0  # how many beats in a row found a write in progress
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._next_beat)

    def beat(self) -> None:
        """Handles one beat."""
        self._held_up = self._held_up + 1 if self.writing else 0
        if self._held_up == _BEATS_OF_A_WRITE:
            self._give_up()
        elif self._subscriber.is_idle and not self.writing:
            self._subscriber.send(Outgoing(Ping))

    def stop(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _next_beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._next_beat)
        self.beat()


class WakeUps:
    """Wake-ups of many streams, which their loop gets as one.

    If it woke for the first of many frames, its thread and that of the controller would take turns for the interpreter.
    """

    def __init__(self) -> None:
        self._events: dict[LoopCalls, list[asyncio.Event]] = {}

    def add(self, calls: LoopCalls, event: asyncio.Event) -> None:
        """Has ``event`` set by ``calls``, once ``post`` is called."""
        self._events.setdefault(calls, []).append(event)

    def post(self) -> None:
        """Wakes the loops."""
        for calls, events in self._events.items():
            calls.post(functools.partial(_set_all, events))


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Subscribers:
    """All subscribers, at most one for each pod."""

    def __init__(self) -> None:
        self._by_pod: dict[str, Subscriber] = {}
        self._by_workload: dict[str, dict[str, Subscriber]] = {}  # and by pod UID
        self._current: dict[str, str] = {}  # pod UID -> newest session, also after it disconnected
        self._stopped: dict[str, list[str]] = {}  # pod UID -> sessions that were followed by a newer one

    def __len__(self) -> int:
        return len(self._by_pod)

    def add(self, hello: Subscription) -> Subscriber:
        """Connects a process, and disconnects an older connection of the same pod."""
        subscriber = Subscriber(hello)
        self.connect(subscriber)
        return subscriber

    def connect(self, subscriber: Subscriber) -> None:
        """Like ``add``, for a subscriber that already exists. Does nothing if it was removed before.

        A request that is cancelled while it is admitted can remove its subscriber first.
        """
        if subscriber.request_ended:
            return
        hello, pod_uid = subscriber.hello, subscriber.hello.pod_uid
        before = self._by_pod.get(pod_uid)
        if before is not None:
            before.close()
        session = self._current.get(pod_uid)
        if session is not None and session != hello.session:
            self._stopped[pod_uid] = [*self._stopped.get(pod_uid, []), session][-_REMEMBERED_SESSIONS:]
        self._current[pod_uid] = hello.session
        self._disconnect(pod_uid)
        self._by_pod[pod_uid] = subscriber
        self._by_workload.setdefault(hello.workload_uid, {})[pod_uid] = subscriber

    def remove(self, subscriber: Subscriber) -> None:
        """Forgets a subscriber whose request has ended."""
        subscriber.request_ended = True
        if self._by_pod.get(subscriber.hello.pod_uid) is subscriber:
            self._disconnect(subscriber.hello.pod_uid)

    def forget(self, pod_uid: str) -> None:
        """Forgets a pod that was deleted."""
        self._current.pop(pod_uid, None)
        self._stopped.pop(pod_uid, None)
        subscriber = self._disconnect(pod_uid)
        if subscriber is not None:
            subscriber.close()

    def close(self) -> None:
        """Ends all streams, so that the pods connect to the other replica at once."""
        for subscriber in self._by_pod.values():
            subscriber.close()

    def is_stopped(self, pod_uid: str, session: str) -> bool:
        """True if the pod has started a newer session."""
        return session in self._stopped.get(pod_uid, ())

    def speaks_for(self, pod_uid: str, session: str) -> bool:
        """True if the session may report for the pod.

        A session that is connected to the other replica is not known here. It may report, because its token is that of
        the pod, unless another session of the pod is connected here: then two processes of the pod run. One that was
        connected here and left does not count. Its containers may have been started again in their pod.

        Unlike a subscription, a report stops no other session, because it may be late and of an earlier session.
        """
        alone = pod_uid not in self._by_pod or self.is_connected(pod_uid, session)
        return alone and not self.is_stopped(pod_uid, session)

    def is_connected(self, pod_uid: str, session: str) -> bool:
        """True if this session of the pod has an open stream here, and so was authenticated."""
        subscriber = self._by_pod.get(pod_uid)
        return subscriber is not None and subscriber.hello.session == session

    def pod_uids(self) -> Collection[str]:
        """The UIDs of the pods that are connected now."""
        return self._by_pod.keys()

    def all(self) -> list[Subscriber]:
        return list(self._by_pod.values())

    def of_workload(self, workload_uid: str) -> list[Subscriber]:
        return list(self._by_workload.get(workload_uid, {}).values())

    def _disconnect(self, pod_uid: str) -> Subscriber | None:
        """Removes the subscriber of the pod, if there is one, and returns it."""
        subscriber = self._by_pod.pop(pod_uid, None)
        if subscriber is not None:
            workload_uid = subscriber.hello.workload_uid
            of_workload = self._by_workload[workload_uid]
            del of_workload[pod_uid]
            if not of_workload:
                del self._by_workload[workload_uid]
        return subscriber


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
        hints: Sends hints.
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
        self.hints = HintNotifier(subscribers)

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
                before, spec = decision.preemption, decision.spec
                corrected = before.corrected or spec.cause != before.spec.cause
                after = dataclasses.replace(before, spec=spec, corrected=corrected)
                if spec.deadline != before.spec.deadline and (before.seen or not spec.cancelable):
                    # A deadline of this replica's own is put off by it as soon as its signal is.
                    after = dataclasses.replace(after, learned_at=None)
                self.store_and_notify(after)
            case End():
                status = preemption_status.ended(
                    decision.preemption.status, decision.phase, decision.reason, decision.message, now
                )
                self.store_and_notify(dataclasses.replace(decision.preemption, status=status))
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
        may_correct = preemption.phase.rank < Phase.FROZEN.rank
        wake_ups = WakeUps()
        for subscriber in subscribers[begin : begin + AT_ONCE]:
            pod = pods.get(subscriber.hello.pod_uid)
            if pod is None or pod.namespace != preemption.namespace or not preemption.includes(pod):
                continue
            if retracted and preemption.name not in subscriber.retracted:
                subscriber.retracted.add(preemption.name)
                subscriber.send(Outgoing(functools.partial(_retraction, subscriber, preemption)), wake_ups)
            if is_over:
                continue
            sent_deadline_at = subscriber.sent_deadlines.get(preemption.name)
            moved = sent_deadline_at is None or abs(deadline_at - sent_deadline_at) > DEADLINE_TOLERANCE_S
            if moved or (may_correct and subscriber.sent_causes.get(preemption.name) != preemption.spec.cause):
                subscriber.sent_deadlines[preemption.name] = deadline_at
                subscriber.sent_causes[preemption.name] = preemption.spec.cause
                notice = _OutgoingNotice(subscriber, pod, preemption, self._clock, self._record_notice)
                subscriber.send(Outgoing(notice.make, notice.written, notice.sent), wake_ups)
        wake_ups.post()
        if begin + AT_ONCE < len(subscribers):
            asyncio.get_running_loop().call_soon(self._notify_rest, preemption.key, subscribers, begin + AT_ONCE)

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
        self._preemption_writer.touch_entry(self._cache.preemptions.records.get(preemption.key, preemption))

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

    @property
    def authorities(self) -> str:
        """The authorities to trust, as PEM. Empty: they are not known yet."""
        return self._authorities

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
