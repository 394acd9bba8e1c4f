"""When a gang is protected from voluntary disruptions."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint_operator.goodput.life import Life
from gracepoint_operator.goodput.pods_seen import Exposure, exposure

YOUNG_MS = 600_000


def life(
    restored_ms: int | None = None, saved_ms: int | None = None, gone_ms: int | None = None, session: str = "s-0"
) -> Life:
    known = Life(began_ms=0, attempt=0, created_ms=0, session=session)
    return dataclasses.replace(known, restored_ms=restored_ms, saved_ms=saved_ms, gone_ms=gone_ms)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        pytest.param(None, Exposure(False), id="there is no account of it"),
        pytest.param(life(session=""), Exposure(False), id="no process tells of its times"),
        pytest.param(life(), Exposure(True), id="it has not restored"),
        pytest.param(life(restored_ms=500_000), Exposure(False, 1_100_000), id="just restored"),
        pytest.param(life(restored_ms=400_000), Exposure(True), id="restored too long ago"),
        pytest.param(life(restored_ms=100_000, saved_ms=900_000), Exposure(False, 1_500_000), id="just saved"),
        pytest.param(life(restored_ms=900_000, saved_ms=100_000), Exposure(False, 1_500_000), id="saved before that"),
        pytest.param(life(saved_ms=100_000, gone_ms=950_000), Exposure(False), id="its processes have ended"),
    ],
)
def test_gang_is_open_while_its_newest_checkpoint_is_young(known: Life | None, expected: Exposure) -> None:
    assert exposure(known, YOUNG_MS, now_ms=1_000_000) == expected
