"""The benchmark of the agreement measures what it says: every notice of ours, and JAX's one, stops real processes."""

from __future__ import annotations

import pytest

from benchmarks.agreement import measure, measure_session

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]


def test_every_notice_is_known_before_all_stop_and_jaxs_own_stops_them() -> None:
    found = measure(2, notices=3)
    assert (len(found.known_ms), len(found.stopped_ms), len(found.jax_stopped_ms)) == (3, 3, 1)
    assert all(0 < known < stopped for known, stopped in zip(found.known_ms, found.stopped_ms, strict=True))
    assert found.jax_stopped_ms[0] > 0
    assert min(found.idle_ns + found.jax_idle_ns) > 0


def test_a_session_is_measured_alone() -> None:
    assert min(measure_session()) > 0
