"""The utilities in a single process, and what they need to be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gracepoint import multihost
from gracepoint.errors import CannotKnow, ClusterError
from gracepoint.multihost.current import set_reached_preemption_hook
from gracepoint.multihost.everybody import everybody


def test_importing_them_loads_no_jax() -> None:
    code = "import gracepoint.multihost, sys; print([n for n in ('jax', 'jaxlib', 'numpy') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_a_single_process_is_the_first_of_one() -> None:
    assert (multihost.process_index(), multihost.process_count()) == (0, 1)


def test_the_primary_host_is_the_one_named_and_without_a_name_every_host() -> None:
    assert multihost.is_primary_host(0)
    assert multihost.is_primary_host(None)
    assert not multihost.is_primary_host(1)


def test_a_single_process_passes_every_barrier_also_of_a_name_used_before() -> None:
    wait = multihost.get_barrier_sync_fn()
    for _ in range(2):
        multihost.sync_global_processes("same")
        multihost.sync_global_processes("same", processes={0})
        wait(key="same", timeout_ms=1)
        with multihost.failing_together("same"):
            pass
    with pytest.raises(OSError, match="disk full"), multihost.failing_together("same"):
        raise OSError("disk full")


def test_a_single_process_never_asks_the_barrier_function() -> None:
    def never(*, key: str, timeout_ms: int) -> None:
        raise AssertionError("asked")

    multihost.sync_global_processes("name", barrier_sync_fn=never)


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_barrier_needs_time(timeout: int) -> None:
    with pytest.raises(ValueError, match=r"timeout: expected seconds above 0, or None for 300"):
        multihost.sync_global_processes("name", timeout=timeout)


def test_what_cannot_be_known_is_not_answered_with_false() -> None:
    with pytest.raises(CannotKnow, match="expected an open session .* or JAX's preemption service"):
        multihost.reached_preemption(1)
    assert multihost.reached_preemption(1, if_unknown=False) is False


def test_an_open_session_answers_before_jax_does() -> None:
    asked: list[int] = []

    def answer(step: int) -> bool:
        asked.append(step)
        return step == 7

    set_reached_preemption_hook(answer)
    try:
        assert [multihost.reached_preemption(step) for step in (6, 7)] == [False, True]
    finally:
        set_reached_preemption_hook(None)
    assert asked == [6, 7]


def test_several_processes_need_a_cluster() -> None:
    with pytest.raises(ClusterError, match="expected a JAX cluster, found none"):
        everybody()
