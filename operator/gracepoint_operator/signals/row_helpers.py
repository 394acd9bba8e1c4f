"""Short forms for the built-in rows. Pure."""

from __future__ import annotations

from typing import Any

from gracepoint.wire.messages import Confidence
from gracepoint_operator.signals.rows import ConditionMatch, DeadlineRule, FieldMatch, Match, On, TaintMatch

SURE, LIKELY, HINT = Confidence.SURE, Confidence.LIKELY, Confidence.HINT


def taint(key: str, effect: str | None = None) -> Match:
    return Match(taint=TaintMatch.model_validate({"key": key, "effect": effect}))


def condition(on: On, type: str, *, status: str = "True", reasons: tuple[str, ...] = (), message: str = "") -> Match:
    wanted = {"type": type, "status": status, "reasons": list(reasons), "message": message}
    return Match(kind=on, condition=ConditionMatch.model_validate(wanted))


def field(on: On, path: str, *values: str, **also: Any) -> Match:
    return Match(kind=on, field=FieldMatch(path=path, values=list(values)), **also)


def after(seconds: float, *, tolerated: bool = False) -> DeadlineRule:
    return DeadlineRule(after_seconds=seconds, tolerated=tolerated)
