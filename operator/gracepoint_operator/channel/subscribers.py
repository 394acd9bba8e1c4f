"""The pods that are connected to this replica.

Each has a bounded queue of frames. Only the task of its stream empties it, and adding a frame never waits. If a pod
does not read, its queue fills up, the pod is disconnected, and it may connect again. The other pods do not notice. The
controller's event loop owns the subscribers; there are no locks. Each stream has a ``Heartbeat`` on the stream's loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable

from gracepoint.wire.frames import Frame, Ping, SnapshotPlacement
from gracepoint.wire.messages import Subscription
from gracepoint_operator.event_loop import LoopCalls

#: Seconds between two beats of a stream's heartbeat.
HEARTBEAT_S = 5.0
#: A write that has not ended at the third beat has had at least ten seconds.
_BEATS_OF_A_WRITE = 3
_QUEUE_LENGTH = 32
_REMEMBERED_SESSIONS = 64  # for each pod


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
