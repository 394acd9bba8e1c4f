"""Log lines: constant messages with fields."""

from __future__ import annotations

import json
import logging

from gracepoint_operator.observability.logs import JsonFormatter, PlainFormatter, about


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
