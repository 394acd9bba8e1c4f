"""The pods that are connected to this replica.

Each has a bounded queue of frames, which only its own stream's task empties; handing a frame over never
waits. A pod that does not read gets its queue full, is cut off and may connect again; the others never
notice. Lives on the core's event loop: no locks.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import Callable

from gracepoint.wire.messages import Frame, Subscription

_QUEUE_LENGTH = 32
_REMEMBERED_SESSIONS = 64  # stopped sessions that are remembered for each pod


def nothing() -> None:
    """What follows from a frame's having been written, where nothing does."""


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A frame on its way.

    Attributes:
        make: Makes the frame when it is written, so that ``remaining_s`` is of that moment. Called on the stream's
            loop: it reads only what never changes.
        written: Called on the core's loop once the frame is written.
    """

    make: Callable[[], Frame]
    written: Callable[[], None] = nothing


class Subscriber:
    """One connected process.

    Attributes:
        told: Deadline (seconds since the epoch) last handed over, by name of the preemption.
        retracted: Names of preemptions whose retraction was handed over.
        hinted: Marks of which a hint was handed over.
    """

    def __init__(self, hello: Subscription) -> None:
        self.hello = hello
        self.told: dict[str, float] = {}
        self.retracted: set[str] = set()
        self.hinted: set[str] = set()
        self.closed = False
        self._frames: collections.deque[Outgoing] = collections.deque()
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # the stream's, once it takes frames

    def send(self, outgoing: Outgoing) -> None:
        """Hands a frame over; one that finds the queue full cuts the subscriber off."""
        if len(self._frames) >= _QUEUE_LENGTH:
            self.close()
        else:
            self._frames.append(outgoing)
            self._wake()

    def close(self) -> None:
        """Ends the stream; what was not yet written is dropped."""
        self.closed = True
        self._wake()

    @property
    def is_idle(self) -> bool:
        """True if no frame waits."""
        return not self._frames

    async def next(self) -> Outgoing | None:
        """Waits for a frame, for as long as it takes; None once the subscriber is closed."""
        # First the loop, then the look: whoever hands over after the look finds the loop to wake.
        self._loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            if self.closed:
                return None
            if self._frames:
                return self._frames.popleft()
            await self._news.wait()

    def _wake(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the stream with it
                self._loop.call_soon_threadsafe(self._news.set)


class Subscribers:
    """All of them, at most one a pod."""

    def __init__(self) -> None:
        self._by_pod: dict[str, Subscriber] = {}
        self._current: dict[str, str] = {}  # pod UID -> newest session, also while it is not connected
        self._stopped: dict[str, list[str]] = {}  # pod UID -> sessions that a newer one followed

    def __len__(self) -> int:
        return len(self._by_pod)

    def add(self, hello: Subscription) -> Subscriber:
        """Connects a process, and cuts off an older connection of the same pod."""
        subscriber = Subscriber(hello)
        self.connect(subscriber)
        return subscriber

    def connect(self, subscriber: Subscriber) -> None:
        """As ``add``, for a subscriber that its stream has made."""
        hello, pod_uid = subscriber.hello, subscriber.hello.pod_uid
        before = self._by_pod.get(pod_uid)
        if before is not None:
            before.close()
        session = self._current.get(pod_uid)
        if session is not None and session != hello.session:
            self._stopped[pod_uid] = [*self._stopped.get(pod_uid, []), session][-_REMEMBERED_SESSIONS:]
        self._current[pod_uid] = hello.session
        self._by_pod[pod_uid] = subscriber

    def remove(self, subscriber: Subscriber) -> None:
        if self._by_pod.get(subscriber.hello.pod_uid) is subscriber:
            del self._by_pod[subscriber.hello.pod_uid]

    def forget(self, pod_uid: str) -> None:
        """The pod is gone."""
        self._current.pop(pod_uid, None)
        self._stopped.pop(pod_uid, None)
        subscriber = self._by_pod.pop(pod_uid, None)
        if subscriber is not None:
            subscriber.close()

    def close(self) -> None:
        """Ends all streams: the pods go to the twin at once."""
        for subscriber in self._by_pod.values():
            subscriber.close()

    def is_stopped(self, pod_uid: str, session: str) -> bool:
        """True if another session of the pod came after this one."""
        return session in self._stopped.get(pod_uid, ())

    def speaks_for(self, pod_uid: str, session: str) -> bool:
        """True if the session may report for the pod.

        A session that is connected to the other replica is not known here: it may, as its token is the
        pod's. One that is not the newest known here may not.
        """
        return self._current.get(pod_uid, session) == session

    def is_connected(self, pod_uid: str, session: str) -> bool:
        """True if this session of the pod has its stream open here, and thus showed who it is."""
        subscriber = self._by_pod.get(pod_uid)
        return subscriber is not None and subscriber.hello.session == session

    def of_workload(self, workload_uid: str) -> list[Subscriber]:
        return [item for item in self._by_pod.values() if item.hello.workload_uid == workload_uid]
