"""How the operator logs: constant messages, and what they are about as fields."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from gracepoint.wire.codec import printable

_FIELDS = "gracepoint_fields"
_SELDOM = "gracepoint_seldom"
#: Seconds between two lines of one kind.
SELDOM_S = 60.0
#: Kinds that are remembered; there are some dozens.
_KINDS = 1000
#: Loggers of libraries that write a line for a request or handshake that is broken.
_OF_REQUESTS = frozenset({"aiohttp.server", "aiohttp.web", "aiohttp.internal", "asyncio"})


def about(**fields: object) -> dict[str, Any]:
    """The ``extra=`` of a log call: ``log.info("preemption noticed", extra=about(preemption=name))``."""
    return {_FIELDS: fields}


def seldom(kind: str, **fields: object) -> dict[str, Any]:
    """The ``extra=`` of a log call that strangers can cause as often as they like: one line a minute of each kind.

    Args:
        kind: One of few: what strangers send must be no part of it.
        fields: What the line is about.
    """
    return {**about(**fields, reason=kind), _SELDOM: kind}


class SeldomFilter(logging.Filter):
    """Passes one record a minute of each message and kind that ``seldom`` names; it says how many it did not pass.

    What the libraries say of broken requests and handshakes is limited in the same way. Any thread may log.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], tuple[float, int]] = {}  # when one was passed, and how many were not since

    def filter(self, record: logging.LogRecord) -> bool:
        kind = getattr(record, _SELDOM, "" if record.name in _OF_REQUESTS else None)
        if kind is None:
            return True
        key, now = (str(record.msg), kind), self._clock()
        with self._lock:
            at, not_logged = self._last.get(key, (-math.inf, 0))
            if now - at < SELDOM_S:
                self._last[key] = (at, not_logged + 1)
                return False
            if key not in self._last and len(self._last) >= _KINDS:
                del self._last[next(iter(self._last))]
            self._last[key] = (now, 0)
        if not_logged:
            setattr(record, _FIELDS, {**getattr(record, _FIELDS, {}), "not_logged": not_logged})
        return True


class PlainFormatter(logging.Formatter):
    """Lines of ``time level logger message key=value ...``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        fields = getattr(record, _FIELDS, {})
        pairs = (f"{key}={json.dumps(value, default=str)}" for key, value in fields.items())
        return " ".join((printable(super().formatMessage(record)), *pairs))


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record),
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
        logging.getLogger(name).addFilter(_is_not_said_elsewhere)


def _is_not_said_elsewhere(record: logging.LogRecord) -> bool:
    """False for what kopf says of kinds that a cluster lacks: ``watch_state`` says it of those that it must have, and
    ``discovery`` of documents that stay late."""
    message = record.getMessage()
    return not message.startswith("Unresolved resources") and "although its CRD is established" not in message
