"""Shared memory of calls on their way to a worker process."""

from __future__ import annotations

import functools
import itertools
import os

import pytest

from gracepoint.async_calls import handover
from gracepoint.async_calls.handover import Block
from tests.interrupts import interrupt_at


def test_wherever_it_is_interrupted_a_descriptor_is_closed_once_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    close = os.close

    def note(fd: int) -> None:
        closed.append(fd)
        close(fd)

    monkeypatch.setattr(os, "close", note)
    for number in itertools.count():
        made: list[Block] = []
        reached = interrupt_at(functools.partial(_make, made), number, [handover])
        made.clear()
        assert len(closed) <= 1, f"bytecode {number}"
        closed.clear()
        if not reached:
            break
    assert number > 20


def _make(made: list[Block]) -> None:
    made.append(Block(4096))
