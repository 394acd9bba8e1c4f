"""Log lines: constant messages with fields."""

from __future__ import annotations

import json
import logging

from gracepoint_operator.observability.logs import SELDOM_S, JsonFormatter, PlainFormatter, SeldomFilter, about, seldom


def test_logs_are_constant_messages_with_fields() -> None:
    record = logging.getLogger("x").makeRecord(
        "x", logging.INFO, "f", 1, "preemption noticed", (), None, extra=about(preemption="train-1", pods=2)
    )
    assert PlainFormatter().format(record).endswith('x preemption noticed preemption="train-1" pods=2')
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["preemption"], line["pods"]) == ("preemption noticed", "train-1", 2)


def test_no_field_of_a_log_line_takes_the_place_of_its_message() -> None:
    record = logging.getLogger("x").makeRecord(
        "x", logging.INFO, "f", 1, "moved on", (), None, extra=about(message="other", level="none")
    )
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["level"]) == ("moved on", "INFO")


def lines(*records: tuple[float, str, str, dict[str, object]]) -> list[str]:
    """What is written of warnings: the time, the logger, the message and ``extra`` of each."""
    now = 0.0
    limited, format_line = SeldomFilter(lambda: now), PlainFormatter().format
    written = []
    for at, name, message, extra in records:
        now = at
        record = logging.getLogger(name).makeRecord(name, logging.WARNING, "f", 1, message, (), None, extra=extra)
        if limited.filter(record):
            written.append(format_line(record).partition(" WARNING ")[2])
    return written


def test_what_strangers_cause_is_one_line_a_minute_that_says_how_many_there_were() -> None:
    flood = [(0.0 + i / 1000, "x", "request refused", seldom("no_token", peer="10.0.0.9")) for i in range(5000)]
    written = lines(*flood, (SELDOM_S + 0.1, "x", "request refused", seldom("no_token", peer="10.0.0.9")))
    fields = 'x request refused peer="10.0.0.9" reason="no_token"'
    assert written == [fields, f"{fields} not_logged=4999"]


def test_a_flood_of_one_kind_hides_no_other_line() -> None:
    written = lines(
        (0.0, "x", "request refused", seldom("no_token")),
        (0.1, "x", "request refused", seldom("no_token")),
        (0.2, "x", "request refused", seldom("bad_message")),
        (0.3, "x", "another message", seldom("no_token")),
        (0.4, "x", "preemption noticed", {}),
        (0.5, "x", "preemption noticed", {}),
    )
    assert [line.split(" ", 1)[1] for line in written] == [
        'request refused reason="no_token"',
        'request refused reason="bad_message"',
        'another message reason="no_token"',
        "preemption noticed",
        "preemption noticed",
    ]


def test_what_libraries_say_of_broken_requests_is_limited_too() -> None:
    assert len(lines(*((i / 10, "aiohttp.server", "Error handling request", {}) for i in range(100)))) == 1
    assert len(lines(*((i / 10, "kopf.objects", "Error handling request", {}) for i in range(100)))) == 100
