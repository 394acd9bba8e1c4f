"""The utilities in a single process, and what they need to be imported."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import types

import jax
import pytest

from gracepoint import multihost
from gracepoint.errors import CannotKnow, ClusterError
from gracepoint.multihost import InMemoryStore, StoreProcessGroup, utilities
from gracepoint.multihost.utilities import joined_cluster, set_reached_preemption_hook


@pytest.mark.integration
def test_importing_them_loads_no_jax() -> None:
    code = "import gracepoint.multihost, sys; print([n for n in ('jax', 'jaxlib', 'numpy') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_a_single_process_is_the_first_of_one() -> None:
    assert (multihost.process_index(), multihost.process_count()) == (0, 1)


@pytest.mark.parametrize("process", [0, 1])
def test_primary_host_is_the_one_named_else_every_host(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: process)
    assert [multihost.is_primary_host(host) for host in (0, 1, 2, None)] == [process == 0, process == 1, False, True]


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


def test_a_barrier_without_a_timeout_has_300_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def wait(*, key: str, timeout_ms: int) -> None:
        given.append(timeout_ms)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    multihost.sync_global_processes("a", barrier_sync_fn=wait)
    multihost.sync_global_processes("b", barrier_sync_fn=wait, timeout=None)
    multihost.sync_global_processes("c", barrier_sync_fn=wait, timeout=2.5)
    assert given == [300_000, 300_000, 2500]
    # Those that meet through the store have it from the same place.
    assert inspect.signature(multihost.broadcast_one_to_all).parameters["timeout"].default == 300


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
        joined_cluster()


def test_several_processes_without_a_cluster_are_a_value_error_as_in_orbax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="expected a JAX cluster, found none"):
        multihost.get_barrier_sync_fn()


def test_barrier_function_skips_inactive_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = StoreProcessGroup(InMemoryStore(), 0, 2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(utilities, "joined_cluster", lambda: types.SimpleNamespace(gang=gang))
    with pytest.raises(ValueError, match=r"expected this process, 0, to be among those taking part, found \[1\]"):
        multihost.get_barrier_sync_fn(processes={1})


def test_a_barrier_function_s_timeout_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Gang:
        def check_participants(self, processes: object) -> None:
            pass

        def barrier(self, key: str, *, timeout_s: float, processes: object) -> None:
            asked.append(timeout_s)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(utilities, "joined_cluster", lambda: types.SimpleNamespace(gang=Gang()))
    multihost.get_barrier_sync_fn()(key="a", timeout_ms=1500)
    multihost.sync_global_processes("b", timeout=2)
    assert asked == [1.5, 2.0]


def test_key_of_a_custom_barrier_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    caplog.set_level(logging.INFO, "gracepoint")
    multihost.sync_global_processes("the name", timeout=7, barrier_sync_fn=lambda *, key, timeout_ms: None)
    assert "process 0 is at barrier 'the name', for 7 s at most" in caplog.text


@pytest.mark.integration
@pytest.mark.parametrize("name", ["broadcast_one_to_all", "is_primary_host", "process_index", "reached_preemption"])
def test_arguments_have_the_names_and_places_that_orbax_gives_them(name: str) -> None:
    import orbax.checkpoint as ocp

    ours, theirs = (inspect.signature(getattr(module, name)) for module in (multihost, ocp.multihost))
    assert list(ours.parameters)[: len(theirs.parameters)] == list(theirs.parameters)
    for parameter in theirs.parameters.values():
        assert ours.parameters[parameter.name].kind == parameter.kind


@pytest.mark.integration
@pytest.mark.parametrize("name", ["get_barrier_sync_fn", "sync_global_processes"])
def test_keywords_are_those_of_orbax(name: str) -> None:
    import orbax.checkpoint as ocp

    ours, theirs = (inspect.signature(getattr(module, name)) for module in (multihost, ocp.multihost))
    assert set(theirs.parameters) <= set(ours.parameters)
