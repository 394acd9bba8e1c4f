from __future__ import annotations

from benchmarks.cancel import figures


def test_the_slowest_turn_counts() -> None:
    ended, closed = figures("disk, express writer", [(0.01, 0.02), (0.2, 0.3), (0.05, 1.0)])
    assert (ended.value, ended.met) == (0.2, False)
    assert (closed.value, closed.met) == (1.0, None)
