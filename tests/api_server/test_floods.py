"""A real API server evicts by way of a real operator, while another process floods the operator's ports.

The long form, with more kinds of floods and with goals for the times, is ``benchmarks.operator_floods``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.operator_floods import PORTS, Floods, Phase, memory_limit_bytes
from tests import limits
from tests.api_server.gang import Gang

pytestmark = pytest.mark.timeout(240)

_CONNECTIONS = 20_000
_SECONDS = 1.0
_ANSWERS = 5
_ATTACKER = ("127.0.2.1",)
#: What the machine is given if it does much else; the goal is in the benchmark.
_ANSWERED_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("floods")


async def test_evictions_wait_for_the_operators_word_through_floods_of_every_port(gang: Gang, folder: Path) -> None:
    """Its memory has the chart's limit, so a flood that takes more ends the process, and evictions are not answered."""
    if reason := limits.cannot_limit_memory():
        pytest.skip(f"no limit of memory here: {reason}")
    await gang.make()
    with contextlib.ExitStack() as stack:
        floods = Floods(stack, folder, gang.server, [(gang.name, gang.pod(index)) for index in (0, 1)])
        _answered(floods.flood("", "webhooks", 0, _SECONDS, (), answers=_ANSWERS))
        for port, kind in _floods():
            phase = floods.flood(kind, port, _CONNECTIONS, _SECONDS, _ATTACKER, answers=_ANSWERS)
            _answered(phase)
            assert phase.attack["opened"] > 100, phase
        text = floods.scrape()
    assert 'gracepoint_evictions_answered_total{answer="wait"}' in text


def _floods() -> Iterator[tuple[str, str]]:
    for port in PORTS:
        for kind in ("idle", "hello", "handshake", "big-body", "unread"):
            yield port, kind


def _answered(phase: Phase) -> None:
    assert len(phase.took_s) >= _ANSWERS, phase
    assert phase.unasked == [], phase
    assert max(phase.took_s) < _ANSWERED_S, phase
    assert phase.bytes < memory_limit_bytes()
