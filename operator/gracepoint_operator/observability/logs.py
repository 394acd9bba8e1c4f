"""How the operator logs: constant messages, and what they are about as fields."""

from __future__ import annotations

import json
import logging
from typing import Any

_FIELDS = "gracepoint_fields"


def about(**fields: object) -> dict[str, Any]:
    """The ``extra=`` of a log call: ``log.info("preemption noticed", extra=about(preemption=name))``."""
    return {_FIELDS: fields}


class PlainFormatter(logging.Formatter):
    """Lines of ``time level logger message key=value ...``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        fields = getattr(record, _FIELDS, {})
        pairs = (f"{key}={json.dumps(value, default=str)}" for key, value in fields.items())
        return " ".join((super().formatMessage(record), *pairs))


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


def configure(log_format: str) -> None:
    """Sends all logs to standard error, as ``plain`` or ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else PlainFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for each watch event
    # watch_state writes a line when a kind's watch fails, and one when it works again; kopf one for each attempt.
    logging.getLogger("kopf._cogs.clients.watching").setLevel(logging.CRITICAL)
    # kopf warns that it handles no SIGTERM or SIGINT, because it does not run on the main thread.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
