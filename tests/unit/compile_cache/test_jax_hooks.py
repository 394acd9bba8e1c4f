"""How the cache gets into JAX, and when it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache, compiler

from gracepoint.compile_cache.jax_hooks import CannotInstall, JaxHooks

pytestmark = pytest.mark.integration

HOOKED = ["_cache", "_cache_initialized"]


class Kept:
    """Keeps programs in a dict.

    Args:
        keeps: Whether this process is to keep any.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.programs: dict[tuple[Set[int], str], bytes] = {}
        self.asked: list[tuple[Set[int], str]] = []
        self._keeps = keeps

    def get(self, key: str, processes: Set[int]) -> bytes | None:
        self.asked.append((processes, key))
        return self.programs.get((processes, key))

    def keeps(self, processes: Set[int]) -> bool:
        return self._keeps

    def put(self, key: str, processes: Set[int], program: bytes) -> None:
        self.programs[processes, key] = program


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = _state()
    yield
    assert _state() == before, "a test left JAX changed"


def _state() -> list[Any]:
    return [
        *(getattr(compilation_cache, name) for name in HOOKED),
        compiler.compile_or_get_cached,
        compiler._cache_write,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    ]


def compile_anew(kept: Kept) -> float:
    """Compiles a program that was never compiled in this process, with the hooks; returns what it computes."""
    hooks = JaxHooks(kept)
    hooks.install()
    try:
        jax.clear_caches()
        return float(jax.jit(lambda x: jnp.sin(x) * 41.5)(jnp.float32(2.0)))
    finally:
        hooks.uninstall()


def test_what_was_compiled_once_is_not_compiled_again() -> None:
    kept = Kept()
    events = Counter[str]()

    def count(event: str, **_: Any) -> None:
        events[event.rpartition("/")[2]] += 1

    first = compile_anew(kept)
    asked = len(kept.asked)
    assert asked
    assert {processes for processes, _ in kept.programs} == {frozenset({0})}
    jax.monitoring.register_event_listener(count)
    try:
        assert compile_anew(kept) == first
    finally:
        jax.monitoring.unregister_event_listener(count)
    assert events["cache_hits"] == events["compile_requests_use_cache"] == asked
    assert events["cache_misses"] == 0


def test_a_program_that_jax_cannot_load_is_compiled_and_replaced() -> None:
    kept = Kept()
    first = compile_anew(kept)
    good = dict(kept.programs)
    kept.programs = dict.fromkeys(good, b"not a program")
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert compile_anew(kept) == first
    assert kept.programs.keys() == good.keys()
    assert b"not a program" not in kept.programs.values()


def test_a_process_that_is_not_to_keep_a_program_does_not() -> None:
    kept = Kept(keeps=False)
    compile_anew(kept)
    assert kept.asked
    assert not kept.programs


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("jax_compilation_cache_dir", "/somewhere", r"JAX's own cache is set, and counts: .* is '/somewhere'"),
        ("jax_enable_compilation_cache", False, "JAX's cache is switched off"),
    ],
)
def test_the_user_s_own_setting_counts(setting: str, value: Any, says: str) -> None:
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        with pytest.raises(CannotInstall, match=says):
            JaxHooks(Kept()).install()
    finally:
        jax.config.update(setting, before)


def test_a_threshold_of_the_user_s_stays() -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1000.0)
    try:
        kept = Kept()
        compile_anew(kept)
        assert not kept.programs
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 1000.0
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def test_a_cache_that_is_in_use_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(compilation_cache, "_cache", object())
        with pytest.raises(CannotInstall, match="in use already"):
            JaxHooks(Kept()).install()


def _without_arguments() -> None: ...


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        pytest.param(compilation_cache, "_cache_initialized", None, id="cache gone"),
        pytest.param(compiler, "_cache_write", None, id="write gone"),
        pytest.param(compiler, "_cache_write", _without_arguments, id="write with other arguments"),
        pytest.param(compiler, "compile_or_get_cached", _without_arguments, id="compile with other arguments"),
    ],
)
def test_another_jax_is_left_as_it_is(module: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        if value is None:
            patched.delattr(module, name)
        else:
            patched.setattr(module, name, value)
        with pytest.raises(CannotInstall, match=rf"jax {jax.__version__} is not known: {name} differ"):
            JaxHooks(Kept()).install()


def test_what_others_change_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = JaxHooks(Kept())
    hooks.install()
    with monkeypatch.context() as patched:
        theirs = object()
        patched.setattr(compilation_cache, "_cache", theirs)
        hooks.uninstall()
        assert compilation_cache._cache is theirs
    compilation_cache._cache = None
