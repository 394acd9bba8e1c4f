"""Log lines: constant messages with fields."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import time

import pytest

from gracepoint_operator.logs import (
    OFTEN,
    SELDOM_S,
    JsonFormatter,
    PlainFormatter,
    SeldomFilter,
    about,
    decided,
    seldom,
)


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


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_the_times_of_lines_have_a_zone_whatever_the_machines_is(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "ready", (), None)
    record.created = 1_700_000_000.25
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        found = json.loads(JsonFormatter().format(record))["time"]
        plain = PlainFormatter().format(record).split(" ")[0]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == plain == "2023-11-14T22:13:20.250Z"
    assert datetime.datetime.fromisoformat(found).timestamp() == record.created


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
    for name in ("aiohttp.server", "aiohttp.access", "asyncio"):
        assert len(lines(*((i / 10, name, "Error handling request", {}) for i in range(100)))) == 1


def test_lines_of_asyncio_that_name_objects_are_of_one_kind() -> None:
    def fatal(number: int) -> str:
        return f"Fatal error on SSL transport\nprotocol: <SSLProtocol at {hex(number)}>\ntransport: <fd={number}>"

    (first,) = lines(*((i / 1000, "asyncio", fatal(i), {}) for i in range(1000)))
    (second,) = lines(*((i / 1000, "asyncio", f"Exception in callback <Call at {hex(i)}>", {}) for i in range(1000)))
    assert first.startswith("asyncio Fatal error on SSL transport")
    assert second.startswith("asyncio Exception in callback")


def test_lines_of_asyncio_about_different_errors_are_all_written() -> None:
    limited = SeldomFilter(lambda: 0.0)
    for error in (OSError, ValueError):
        for passes in (True, False):
            record = logging.getLogger("asyncio").makeRecord(
                "asyncio", logging.ERROR, "f", 1, "Task exception was never retrieved", (), (error, error(), None)
            )
            assert limited.filter(record) is passes


def test_a_place_in_the_code_writes_only_so_many_lines_a_minute_whatever_they_say() -> None:
    written = lines(
        *((i / 100, "kopf.objects", f"Something of object {i}", {}) for i in range(1000)),
        (SELDOM_S + 0.1, "kopf.objects", "Something of another", {}),
    )
    assert len(written) == OFTEN + 1
    assert written[-1].endswith(f"not_logged={1000 - OFTEN}")


def test_what_the_operator_has_decided_is_written_for_each_gang_of_a_large_failure() -> None:
    written = lines(*((i / 100, "x", "signal", decided(preemption=f"train-{i}-1")) for i in range(500)))
    assert len(written) == 500
    assert written[-1] == 'x signal preemption="train-499-1"'


def test_debug_output_is_written_whole() -> None:
    limited = SeldomFilter(lambda: 0.0)
    record = logging.getLogger("x").makeRecord("x", logging.DEBUG, "f", 1, "detail", (), None)
    assert all(limited.filter(record) for _ in range(2 * OFTEN))


@pytest.mark.parametrize("formatter", [PlainFormatter(), JsonFormatter()])
def test_no_text_controls_a_terminal_or_pretends_to_be_another_record(formatter: logging.Formatter) -> None:
    hostile = "\x1b[2J\x9b\u202e\n2026-01-01 00:00:00,000 INFO all is well"
    try:
        raise ValueError(hostile)
    except ValueError:
        failure = sys.exc_info()
    record = logging.getLogger("x").makeRecord(
        "x", logging.ERROR, "f", 1, "found %s", (hostile,), failure, extra=about(name=hostile)
    )
    written = formatter.format(record)
    assert {c for c in written if not (c.isprintable() or c == "\n")} == set()
    assert "\n2026-01-01" not in written
