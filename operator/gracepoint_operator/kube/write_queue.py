"""Writes to the API in the background: coalesced, limited in rate, and retried. The callers do not wait.

There is one task for each key that has something to be written. ``touch`` only marks the key. Its task calls ``write``,
which reads what is to be written at that moment, so many touches become one write. The task pauses between writes; an
urgent touch ends the pause. If the API server is unavailable, or another client wrote in between, the task tries again
until it succeeds. It ends when there is nothing more to write. A write that the API server refuses is tried again less
and less often, because a quota, a policy or a role may be corrected. ``close`` gives marked keys a bounded time to be
written, then cancels the tasks.

All tasks run on the controller's event loop; there are no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from enum import Enum

from gracepoint_operator.kube import client
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.read_errors import Unreadable

logger = logging.getLogger(__name__)

Key = tuple[str, str]

_REFUSED_AGAIN_AT_MOST_S = 60.0
#: Between tries while the API server is unavailable, or somebody else writes in between.
_BACKOFF = client.RetryPauses(0.05, 5.0)


class _Undecided(Enum):
    """It is not known whether the API server accepts the object."""

    UNDECIDED = "undecided"


class WriteQueue:
    """A queue of writes by key.

    Args:
        subject: What is written, for the log.
        write: Writes the current state of one key.
        metrics: Counts failed writes.
        interval_s: Pause between two writes of one key, in seconds. It doubles each time the API server refuses a
            write.
        refused: Called with the key and the reason if the API server refuses the object, and with None once it is
            written. Not called if the API server could not be asked.
        say_after_s: After this many seconds without success the failure is logged and counted. Then the write is tried
            again, so that the newest state is not lost.
    """

    def __init__(
        self,
        subject: str,
        write: Callable[[Key], Awaitable[None]],
        metrics: Metrics,
        interval_s: float,
        refused: Callable[[Key, str | None], None] = lambda key, why: None,
        say_after_s: float = 120.0,
    ) -> None:
        self._subject = subject
        self._refused = refused
        self._say_after_s = say_after_s
        self._closing = False
        self._write = write
        self._metrics = metrics
        self._interval_s = interval_s
        self._marked: set[Key] = set()
        self._urgent: dict[Key, asyncio.Event] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._awaited: dict[Key, list[asyncio.Event]] = {}  # set after an attempt to write what was marked before

    def touch(self, key: Key, *, urgent: bool = False, after_s: float = 0.0) -> None:
        """Marks a key as having something to write.

        Args:
            key: The key.
            urgent: True if a pause of the key ends at once.
            after_s: If the key is not paused now, the write waits this number of seconds first.
        """
        self._marked.add(key)
        if key not in self._tasks:
            self._urgent[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._run(key, after_s), name=f"write {self._subject} {key}")
        elif urgent:
            self._urgent[key].set()

    def is_marked(self, key: Key) -> bool:
        """True if the key is to be written anyway, in its newest state."""
        return key in self._marked

    async def settled(self, key: Key, timeout_s: float) -> None:
        """Waits for an attempt to write what is marked now, for at most ``timeout_s`` seconds."""
        if key in self._marked:
            written = asyncio.Event()
            self._awaited.setdefault(key, []).append(written)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await written.wait()

    async def close(self, timeout_s: float) -> None:
        """Writes what is marked, for at most ``timeout_s`` seconds. Then it cancels the tasks."""
        self._closing = True
        tasks = list(self._tasks.values())
        for event in self._urgent.values():
            event.set()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: Key, after_s: float) -> None:
        refusal = ""  # the last refusal
        backoff = client.RetryPauses(2 * self._interval_s, _REFUSED_AGAIN_AT_MOST_S)
        try:
            if after_s:
                await self._pause(key, after_s)
            while key in self._marked:
                # Before the attempt: a touch during it marks the key again, and so causes another write.
                self._marked.discard(key)
                self._urgent[key].clear()
                awaited = self._awaited.pop(key, [])
                outcome = await self._attempt(key, refusal)
                if not isinstance(outcome, _Undecided):
                    self._refused(key, outcome)
                for written in awaited:
                    written.set()
                wait_s = self._interval_s
                if isinstance(outcome, str):
                    if self._closing:
                        break
                    refusal = outcome
                    self._marked.add(key)
                    wait_s = backoff.next_s()
                elif outcome is None:
                    refusal = ""
                    backoff.reset()
                await self._pause(key, wait_s)
        finally:
            # There is no await between the last check of _marked and here. So a later touch starts a new task. After an
            # unknown error the key may still be marked, though nobody writes it.
            self._marked.discard(key)
            del self._tasks[key], self._urgent[key]

    async def _pause(self, key: Key, wait_s: float) -> None:
        """Waits for a while, or until there is something urgent."""
        # Not wait_for: before Python 3.12 it ignores a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._urgent[key].wait()

    async def _attempt(self, key: Key, last_refusal: str) -> str | _Undecided | None:
        """Writes a key, and retries while that may succeed.

        Returns:
            None if it is written, the reason if the API server refuses it, ``_Undecided`` if the API server could not
            be asked.

        Args:
            key: The key.
            last_refusal: The refusal before. It is not logged again if it is the same.
        """
        passing = (client.Unavailable, client.Conflict)
        try:
            await _BACKOFF.retried(self._write, key, on=passing, within_s=self._say_after_s)
        except client.Refused as error:
            self._metrics.write_failures.inc()
            if str(error) != last_refusal:
                logger.error(
                    "the API server refuses what is to be written, it is tried again",
                    extra=about(what=self._subject, key=key, error=str(error)),
                )
            return str(error)
        except (client.KubeError, Unreadable) as error:
            self._metrics.write_failures.inc()
            logger.error("could not write to the API", extra=about(what=self._subject, key=key, error=str(error)))
            if isinstance(error, passing):
                self._marked.add(key)
            return _Undecided.UNDECIDED
        return None
