"""Decides which events of a cloud become notices in the mailbox. No thread and no network: a watcher's thread calls it.

Three kinds of events are not posted:

* **Events far ahead.** Maintenance windows are announced days before. An event that begins later than ``HORIZON_S``
  from now is logged, and posted when it is that near. Until then it may be moved or cancelled without any effect on
  training.
* **Events that existed before this process.** If the first look finds an event whose start is not in the future, the
  event is only logged until it changes. The process may have been started on a machine whose event is not over (Azure
  lists a reboot for minutes after it; GPU machines of Google show their notice for an hour). Otherwise the process
  would save, leave and be started again on that machine for as long as the event lasts.
* **Hints.** A hint is only logged, once.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Sequence

from gracepoint.receivers.mailbox import Disruption, Mailbox

log = logging.getLogger(__name__)

HORIZON_S = 3600.0
#: Two start times of an event that differ by at most this count as equal, because servers tell whole seconds.
_SAME_S = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """An event that a cloud announces for this machine.

    Attributes:
        name: Identifies the event. It is the same at each look, and different for another event.
        cause: The cause, one of the operator's ``signals.Cause``.
        lead_s: Seconds that are left, from the first look that saw the event, if the cloud tells no time or one that is
            past.
        starts_at_s: When the event begins, in seconds since the epoch, by the server's clock. None if the cloud does
            not tell.
        cancelable: Whether the event may be taken back. Then the notice is retracted when the event disappears.
        hint: Whether the cloud only says that something may happen.
    """

    name: str
    cause: str
    lead_s: float
    starts_at_s: float | None = None
    cancelable: bool = False
    hint: bool = False


@dataclasses.dataclass(frozen=True)
class Look:
    """All events that a source saw at ``server_time_s``, in seconds since the epoch, by the server's clock."""

    events: Sequence[Event]
    server_time_s: float


class _State(enum.Enum):
    DISMISSED = "dismissed"  # a hint, or an event that existed before this process
    AHEAD = "ahead"
    POSTED = "posted"


@dataclasses.dataclass
class _Known:
    event: Event
    state: _State


class Board:
    """The known events of one source.

    Args:
        cloud: The name of the cloud, for messages.
        host: The name of this machine, for messages. It makes the same event on two machines two notices.
        mailbox: Gets the notices.
    """

    def __init__(self, cloud: str, host: str, mailbox: Mailbox) -> None:
        self._cloud = cloud
        self._host = host
        self._mailbox = mailbox
        self._known: dict[str, _Known] = {}
        self._looked = False

    def update(self, look: Look) -> None:
        """Compares the events that the source sees now with the known ones, and posts or retracts notices."""
        for event in look.events:
            self._saw(event, look.server_time_s)
        seen = {event.name for event in look.events}
        for name in [name for name in self._known if name not in seen]:
            self._gone(self._known[name])
        self._looked = True

    def _saw(self, event: Event, server_time_s: float) -> None:
        known = self._known.get(event.name)
        left_s = None if event.starts_at_s is None else event.starts_at_s - server_time_s
        if known is None or _moved(known.event, event):
            state = self._judge(event, left_s)
            if known is not None and known.state is _State.POSTED:
                if event.starts_at_s is None:  # it has begun; the time that was told before is still valid
                    return
                if state is not _State.POSTED:
                    self._retract(known.event, "it was moved")
            self._known[event.name] = _Known(event, state)
            self._tell(event, state, left_s)
        elif known.state is _State.AHEAD and self._judge(event, left_s) is _State.POSTED:
            known.state = _State.POSTED
            self._tell(event, known.state, left_s)

    def _judge(self, event: Event, left_s: float | None) -> _State:
        is_ahead = left_s is not None and left_s > 0
        if event.hint or (not self._looked and not is_ahead):
            return _State.DISMISSED
        return _State.AHEAD if left_s is not None and left_s > HORIZON_S else _State.POSTED

    def _tell(self, event: Event, state: _State, left_s: float | None) -> None:
        signal = self._signal(event)
        if state is _State.POSTED:
            remaining_s = left_s if left_s is not None and left_s > 0 else event.lead_s
            log.warning("the cloud announces signal=%s cause=%s remaining_s=%.1f", signal, event.cause, remaining_s)
            self._mailbox.post(
                Disruption(preemption="", cause=event.cause, signal=signal, remaining_s=remaining_s),
            )
        elif state is _State.AHEAD:
            log.info("the cloud announces for later signal=%s cause=%s in_s=%.0f", signal, event.cause, left_s)
        elif event.hint:
            log.info("the cloud hints, training goes on signal=%s cause=%s", signal, event.cause)
        else:
            log.warning(
                "not acted on, as it was there before this process signal=%s cause=%s: an event that does not end "
                "must not stop each new start",
                signal,
                event.cause,
            )

    def _gone(self, known: _Known) -> None:
        if known.state is _State.POSTED:
            if not known.event.cancelable:
                return  # it cannot be taken back, so an answer without it is an error
            self._retract(known.event, "the cloud does not list it any more")
        del self._known[known.event.name]

    def _retract(self, event: Event, why: str) -> None:
        log.warning("taken back signal=%s reason=%s", self._signal(event), why)
        self._mailbox.retract(self._signal(event), why)

    def _signal(self, event: Event) -> str:
        return f"{self._cloud} {event.name} on {self._host}"


def _moved(before: Event, now: Event) -> bool:
    if before.starts_at_s is None or now.starts_at_s is None:
        return before.starts_at_s is not now.starts_at_s
    return abs(before.starts_at_s - now.starts_at_s) > _SAME_S
