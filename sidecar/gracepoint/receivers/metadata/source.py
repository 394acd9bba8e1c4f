"""The events that a cloud announces on its metadata server, and which of them become notices.

A ``MetadataSource`` is a part of a cloud's server; ``gce``, ``azure`` and ``aws`` implement it with the client and the
parsers here. Its ``Board`` compares each look with the one before, and posts, moves or retracts notices in the mailbox.
There are no threads here: the thread of a watcher owns a source, its board and its client. Another thread may only
call ``MetadataClient.interrupt``.

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

import contextlib
import dataclasses
import datetime
import email.utils
import enum
import http.client
import json
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gracepoint.errors import GracepointError
from gracepoint.receivers.mailbox import Disruption, Mailbox

logger = logging.getLogger(__name__)

HORIZON_S = 3600.0
#: Two start times of an event that differ by at most this count as equal, because servers give whole seconds.
_SAME_S = 1.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """An event that a cloud announces for this machine.

    Attributes:
        name: Identifies the event. It is the same at each look, and different for another event.
        cause: The cause, one of the operator's ``signals.Cause``.
        lead_s: Seconds that are left, from the first look that saw the event, if the cloud gives no time or one that is
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
        names = {event.name for event in look.events}
        for name in [name for name in self._known if name not in names]:
            self._gone(self._known[name])
        self._looked = True

    def _saw(self, event: Event, server_time_s: float) -> None:
        record = self._known.get(event.name)
        left_s = None if event.starts_at_s is None else event.starts_at_s - server_time_s
        if record is None or _moved(record.event, event):
            state = self._judge(event, left_s)
            if record is not None and record.state is _State.POSTED:
                if event.starts_at_s is None:  # it has begun; the time that was announced before is still valid
                    return
                if state is not _State.POSTED:
                    self._retract(record.event, "it was moved")
            self._known[event.name] = _Known(event, state)
            self._tell(event, state, left_s)
        elif record.state is _State.AHEAD and self._judge(event, left_s) is _State.POSTED:
            record.state = _State.POSTED
            self._tell(event, record.state, left_s)

    def _judge(self, event: Event, left_s: float | None) -> _State:
        is_ahead = left_s is not None and left_s > 0
        if event.hint or (not self._looked and not is_ahead):
            return _State.DISMISSED
        return _State.AHEAD if left_s is not None and left_s > HORIZON_S else _State.POSTED

    def _tell(self, event: Event, state: _State, left_s: float | None) -> None:
        signal = self._signal(event)
        if state is _State.POSTED:
            remaining_s = left_s if left_s is not None and left_s > 0 else event.lead_s
            logger.warning("the cloud announces signal=%s cause=%s remaining_s=%.1f", signal, event.cause, remaining_s)
            self._mailbox.post(
                Disruption(preemption="", cause=event.cause, signal=signal, remaining_s=remaining_s),
            )
        elif state is _State.AHEAD:
            logger.info(
                "the cloud announces an event for later signal=%s cause=%s in_s=%.0f", signal, event.cause, left_s
            )
        elif event.hint:
            logger.info(
                "the cloud announces a possible disruption, training continues signal=%s cause=%s", signal, event.cause
            )
        else:
            logger.warning(
                "ignored an event that is older than this process signal=%s cause=%s: an event that does not end "
                "must not stop each new start",
                signal,
                event.cause,
            )

    def _gone(self, record: _Known) -> None:
        if record.state is _State.POSTED:
            if not record.event.cancelable:
                return  # it cannot be taken back, so an answer without it is an error
            self._retract(record.event, "the cloud does not list it any more")
        del self._known[record.event.name]

    def _retract(self, event: Event, reason: str) -> None:
        logger.warning("withdrew a notice signal=%s reason=%s", self._signal(event), reason)
        self._mailbox.retract(self._signal(event), reason)

    def _signal(self, event: Event) -> str:
        return f"{self._cloud} {event.name} on {self._host}"


def _moved(before: Event, now: Event) -> bool:
    if before.starts_at_s is None or now.starts_at_s is None:
        return before.starts_at_s is not now.starts_at_s
    return abs(before.starts_at_s - now.starts_at_s) > _SAME_S


CONNECT_TIMEOUT_S = 2.0
_MOST_BYTES = 1 << 20
_REDIRECTS = frozenset({301, 302, 307, 308})


class MetadataError(GracepointError, ConnectionError):
    """The metadata server could not be reached, or its answer cannot be read."""


@dataclasses.dataclass(frozen=True)
class MetadataResponse:
    """An answer of the server.

    Attributes:
        status: The HTTP status.
        text: The body.
        headers: The headers, by lower-case name.
        server_time_s: The time of the answer, in seconds since the epoch, by the server's own clock (its ``Date``
            header). If it has no such header, by this machine's clock. Times in the answer are compared with it.
    """

    status: int
    text: str
    headers: Mapping[str, str]
    server_time_s: float


class MetadataClient:
    """Sends requests to one metadata server.

    Args:
        base_url: The server, ``http://host[:port]``.
    """

    def __init__(self, base_url: str) -> None:
        parts = urllib.parse.urlsplit(base_url)
        assert parts.scheme == "http", base_url
        assert parts.hostname is not None, base_url
        self._host, self._port = parts.hostname, parts.port or 80
        self._socket: socket.socket | None = None
        self._interrupted = threading.Event()

    def request(
        self, path: str, headers: Mapping[str, str], *, timeout_s: float, method: str = "GET"
    ) -> MetadataResponse:
        """Sends a request. Follows one redirect on the same server (to a directory that was named without its slash).

        Args:
            path: The path with its query.
            headers: The headers that the server requires.
            timeout_s: How many seconds the server may send nothing.
            method: The HTTP method.

        Raises:
            MetadataError: There is no answer.
        """
        answer = self._request(path, headers, timeout_s, method)
        if answer.status in _REDIRECTS and "location" in answer.headers:
            target = urllib.parse.urlsplit(answer.headers["location"])
            answer = self._request(target._replace(scheme="", netloc="").geturl(), headers, timeout_s, method)
        return answer

    def interrupt(self) -> None:
        """Ends the request in which another thread is blocked. All later requests fail."""
        self._interrupted.set()
        held = self._socket
        if held is not None:
            with contextlib.suppress(OSError):  # not connected any more, so no thread is blocked
                held.shutdown(socket.SHUT_RDWR)

    def _request(self, path: str, headers: Mapping[str, str], timeout_s: float, method: str) -> MetadataResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._interrupted.is_set():  # checked after interrupt() can see the socket
                raise MetadataError(f"{method} {path}: interrupted")
            connection.sock.settimeout(timeout_s)
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(_MOST_BYTES).decode(errors="replace")
            named = {name.lower(): value for name, value in response.getheaders()}
            return MetadataResponse(response.status, text, named, self._server_time_s(named))
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise MetadataError(f"{method} {path} at {self._host}:{self._port}: {reason}") from error
        finally:
            self._socket = None
            connection.close()

    def _server_time_s(self, headers: Mapping[str, str]) -> float:
        try:
            return email.utils.parsedate_to_datetime(headers["date"]).timestamp()
        except (KeyError, ValueError):
            return time.time()


#: Timeout, in seconds, of a request that the server answers at once.
READY_TIMEOUT_S = 10.0

# Causes, as in the operator's ``gracepoint_operator.signals.Cause``.
SPOT_TERMINATION = "SpotTermination"
MAINTENANCE = "Maintenance"
SCALE_DOWN = "ScaleDown"
REBALANCE = "Rebalance"


class MetadataSource(Protocol):
    """A part of a metadata server that is read repeatedly."""

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next look."""

    def look(self) -> Look:
        """Returns all events that exist now.

        Raises:
            MetadataError: The server could not be reached, or its answer cannot be read.
        """


@dataclasses.dataclass(frozen=True)
class WatchGroup:
    """The sources that one thread looks at in turn.

    Attributes:
        name: Name of the group, for the thread and the log.
        client: The client that the sources share.
        sources: The sources.
    """

    name: str
    client: MetadataClient
    sources: Sequence[MetadataSource]


def expected_ok(source: str, answer: MetadataResponse) -> str:
    """Returns the body of an answer.

    Raises:
        MetadataError: The status is not 200.
    """
    if answer.status != 200:
        raise MetadataError(f"{source}: expected HTTP 200, found {answer.status} {answer.text[:120]!r}")
    return answer.text


def parsed(source: str, text: str) -> Any:
    """Returns the JSON value of a body.

    Raises:
        MetadataError: The body is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise MetadataError(f"{source}: expected JSON, found {text[:120]!r} ({error})") from error


def rfc3339_s(field: str, value: Any) -> float:
    """Returns the seconds since the epoch of a time such as ``2026-01-01T00:00:00Z``.

    Raises:
        MetadataError: The value is not such a time.
    """
    try:
        moment = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise MetadataError(f"{field}: expected a time as 2026-01-01T00:00:00Z, found {value!r}") from error
    return _utc_s(moment)


def rfc2822_s(field: str, value: Any) -> float:
    """Returns the seconds since the epoch of a time such as ``Mon, 19 Sep 2016 18:29:47 GMT``.

    The name of the day may be missing.

    Raises:
        MetadataError: The value is not such a time.
    """
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise MetadataError(f"{field}: expected a time as 19 Sep 2016 18:29:47 GMT, found {value!r}") from error
    return _utc_s(moment)


def _utc_s(moment: datetime.datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
