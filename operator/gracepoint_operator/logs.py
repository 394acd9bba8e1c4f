"""How the operator logs: constant messages, and what they are about as fields."""

from __future__ import annotations

import datetime
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from gracepoint.wire.messages import printable

_FIELDS = "gracepoint_fields"
_SELDOM = "gracepoint_seldom"
_DECIDED = "gracepoint_decided"
#: Seconds between two lines of one kind.
SELDOM_S = 60.0
#: So many lines of one place in the code are written in ``SELDOM_S``, whoever causes them.
OFTEN = 60
#: Kinds and places that are remembered; there are some hundreds.
_KINDS = 1000
#: Loggers of libraries that write a line for a request or handshake that is broken.
_OF_REQUESTS = ("aiohttp", "asyncio")
#: What differs from line to line of one kind: addresses in memory, ports, numbers.
_DIFFERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


def about(**fields: object) -> dict[str, Any]:
    """The ``extra=`` of a log call: ``logger.info("preemption noticed", extra=about(preemption=name))``."""
    return {_FIELDS: fields}


def seldom(kind: str, **fields: object) -> dict[str, Any]:
    """The ``extra=`` of a log call that strangers can cause as often as they like: one line a minute of each kind.

    Args:
        kind: One of few: what strangers send must be no part of it.
        fields: What the line is about.
    """
    return {**about(**fields, reason=kind), _SELDOM: kind}


def decided(**fields: object) -> dict[str, Any]:
    """The ``extra=`` of a log call that says what the operator itself has decided, and put on record.

    Every such line is written: in a large failure there are hundreds at once, and it is these that are looked for.
    """
    return {**about(**fields), _DECIDED: True}


class SeldomFilter(logging.Filter):
    """Passes one record a minute of each message and kind that ``seldom`` names; it adds how many it did not pass.

    What the libraries say of broken requests and handshakes is limited in the same way. Of everything else but debug
    output it passes ``OFTEN`` a minute of each place in the code, so that nobody can fill a disk with lines of which
    nobody thought. What is ``decided`` passes always. Any thread may log.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        #: When the first of this minute was passed, how many were, and how many were not.
        self._seen: dict[tuple[object, ...], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO or hasattr(record, _DECIDED):
            return True
        (key, at_most), now = _limit(record), self._clock()
        with self._lock:
            began, passed, not_logged = self._seen.get(key, (-math.inf, 0, 0))
            if now - began < SELDOM_S:
                passes = passed < at_most
                self._seen[key] = (began, passed + passes, not_logged + (not passes))
                return passes
            self._seen.pop(key, None)
            if len(self._seen) >= _KINDS:
                del self._seen[next(iter(self._seen))]
            self._seen[key] = (now, 1, 0)
        if not_logged:
            setattr(record, _FIELDS, {**getattr(record, _FIELDS, {}), "not_logged": not_logged})
        return True


def _limit(record: logging.LogRecord) -> tuple[tuple[object, ...], int]:
    """What a record is one of, and how many of these are written in a minute."""
    kind = getattr(record, _SELDOM, None)
    if kind is not None:
        return (record.name, record.msg, kind), 1
    if record.name.partition(".")[0] not in _OF_REQUESTS:
        return (record.pathname, record.lineno), OFTEN
    # asyncio makes its messages of several lines; the first one says what happened, the others to which objects.
    message = _DIFFERS.sub("#", str(record.msg).partition("\n")[0])
    error = record.exc_info[0] if record.exc_info else None
    return (record.name, message, error), 1


def _utc(at: float) -> str:
    """A time as RFC 3339 in UTC: the lines of pods on machines with different zones are read together."""
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class PlainFormatter(logging.Formatter):
    """Lines of ``time level logger message key=value ...``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  logging's name
        return _utc(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        fields = getattr(record, _FIELDS, {})
        pairs = (f"{key}={json.dumps(value, default=str)}" for key, value in fields.items())
        return " ".join((super().formatMessage(record), *pairs))

    def format(self, record: logging.LogRecord) -> str:
        """All lines but the first are indented, so that no text can pretend to be the next record."""
        return printable(super().format(record)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line = {**getattr(record, _FIELDS, {}), **line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(log_format: str, level: str = "info") -> None:
    """Sends all logs of this level and above to standard error, as ``plain`` or ``json``."""
    handler = logging.StreamHandler()
    handler.addFilter(SeldomFilter())
    handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for each watch event
    # watch_state writes a line when a kind's watch fails, and one when it works again; kopf one for each attempt.
    logging.getLogger("kopf._cogs.clients.watching").setLevel(logging.CRITICAL)
    # kopf warns that it handles no SIGTERM or SIGINT, because it does not run on the main thread.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    # Four lines for each thread that watches say that it has credentials.
    for name in ("kopf._core.engines.activities", "kopf.activities.authentication"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("kopf._core.reactor.observation", "kopf._cogs.clients.api"):
        logging.getLogger(name).addFilter(_is_not_logged_elsewhere)


def _is_not_logged_elsewhere(record: logging.LogRecord) -> bool:
    """False for what kopf says of kinds that a cluster lacks: ``watch_state`` says it of those that it must have, and
    ``watches`` of documents that stay late."""
    message = record.getMessage()
    return not message.startswith("Unresolved resources") and "although its CRD is established" not in message
