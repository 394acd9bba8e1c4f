"""Generates the catalogue's list in the docs from the rows. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gracepoint_operator.resources.crds import put_between
from gracepoint_operator.signals.catalogue import BUILT_IN
from gracepoint_operator.signals.rows import DeadlineRule, Match, On, Row, TimeFormat

START, END = "<!-- rows: generated from the catalogue -->\n", "<!-- end of rows -->\n"

_TIMES = {
    TimeFormat.EPOCH_SECONDS: "the value, in epoch seconds",
    TimeFormat.RFC3339: "the value",
    TimeFormat.HTTP_DATE: "the date in the message",
    TimeFormat.JSON: "in the JSON: {fields}",
    TimeFormat.SECONDS: "the value in seconds after {since}",
    TimeFormat.DURATION: "the value after {since}",
}


def listing(rows: Iterable[Row] = BUILT_IN) -> str:
    """Returns a Markdown list of the rows."""
    lines = []
    for row in rows:
        taken_back = "can be taken back" if row.cancelable else "cannot be taken back"
        lines += [
            f"- **`{row.name}`** ({row.provider}): {_seen(row.match)}{_also(row.match)}{_unless(row)}. {row.about}",
            f"  *{row.cause}, {row.confidence}, {taken_back}; deadline: {_by_when(row)}; kind {row.kind}.*",
        ]
    return "\n".join(lines) + "\n"


def put_into(page: str) -> str:
    """Returns ``page`` with a new list between its two marks."""
    return put_between(page, START, END, listing())


def _seen(match: Match) -> str:
    if (taint := match.taint) is not None:
        value, effect = f"={taint.value}" if taint.value else "", f":{taint.effect}" if taint.effect else ""
        if match.kind is On.DEVICE:
            return f"{'taint' if taint.key else 'any taint'} `{taint.key or ''}{value}{effect}` of a device"
        return f"taint `{taint.key}{value}{effect}`" if taint.key else f"any other taint `{value}{effect}`"
    on = f"{match.kind}: "
    for name, wanted in (("label", match.label), ("annotation", match.annotation)):
        if wanted is not None:
            but = f', without "{wanted.without}"' if wanted.without else ""
            return f"{on}{name} `{wanted.key}{_values(wanted.values)}`{but}"
    if (condition := match.condition) is not None:
        said = [f"reason {' or '.join(condition.reasons)}"] if condition.reasons else []
        said += [f'message with "{condition.message}"'] if condition.message else []
        return f"{on}condition `{condition.type}={condition.status}`{', ' if said else ''}{', '.join(said)}"
    assert match.field is not None
    return f"{on}`{match.field.path}{_values(match.field.values)}`"


def _also(match: Match) -> str:
    label, condition = match.with_label, match.unless_condition
    with_it = "" if label is None else f", with label `{label.key}{_values(label.values)}`"
    return with_it + ("" if condition is None else f", unless condition `{condition.type}={condition.status}`")


def _values(values: list[str]) -> str:
    return f"={'/'.join(values)}" if values else ""


def _unless(row: Row) -> str:
    if not row.tolerable:
        return ""
    who = "pod's ResourceClaim" if row.match.kind is On.DEVICE else "pod"
    return f", unless the {who} tolerates it for good"


def _by_when(row: Row) -> str:
    rule = row.deadline
    plain = "no signal" if row.limit else _assumed(rule)
    if rule.row:
        return f"the time of `{rule.row}`, else {plain}"
    if rule.time is None:
        return plain
    fields = " or ".join(f"`{field}`" for field in rule.time.json_fields)
    told = _TIMES[rule.time.format].format(fields=fields, since=f"`{rule.time.since}`")
    if rule.time.minus:
        told += f", less {' or '.join(f'`{field}`' for field in rule.time.minus)}"
    return f"{told}; else {plain}"


def _assumed(rule: DeadlineRule) -> str:
    """Returns, in words, the deadline if the object tells no time."""
    if rule.after_seconds is None:
        plain = (
            "the grace period"
            if rule.grace_cap_seconds is None
            else f"the grace period, {rule.grace_cap_seconds:g} s at most"
        )
    else:
        plain = f"{rule.after_seconds:g} s" if rule.after_seconds else "at once"
    if rule.tolerated:
        plain = "tolerationSeconds" if rule.after_seconds == 0 else f"tolerationSeconds and {plain}"
    return plain
