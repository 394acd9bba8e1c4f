"""Sessions that keep compiled programs: what ``attach`` and the settings say, and that JAX is left as it was."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache, compiler

import gracepoint
from gracepoint.errors import CheckpointError, SettingsError
from gracepoint.wire.names import Env

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _jax_is_left_as_it_was() -> Iterator[None]:
    before = compiler.compile_or_get_cached, compiler._cache_write
    yield
    assert compilation_cache._cache is None
    assert (compiler.compile_or_get_cached, compiler._cache_write) == before
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    for thread in threading.enumerate():
        if thread.name in ("gracepoint: keeps programs", "gracepoint: compiled programs"):
            thread.join(60)
            assert not thread.is_alive(), thread.name


@pytest.fixture
def events() -> Iterator[Counter[str]]:
    found = Counter[str]()

    def count(event: str, **_: Any) -> None:
        found[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(count)
    yield found
    jax.monitoring.unregister_event_listener(count)


def train(directory: str | Path, **settings: Any) -> float:
    """Runs a start of a job that ends by itself. Programs that are in this process's memory are forgotten first."""
    with gracepoint.attach(directory, save_every_steps=1, **settings) as session:
        jax.clear_caches()
        double = jax.jit(lambda state: {"w": state["w"] * 2 + jnp.cos(state["w"])})
        state, step = session.restore(like={"w": jnp.arange(4.0)})
        for number in range(step + 1, 3):
            state = double(state)
            session.step(number, state)
        return float(double(state)["w"][1])


def programs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.program"))


def test_the_second_start_compiles_nothing(tmp_path: Path, events: Counter[str]) -> None:
    first = train(tmp_path, compilation_cache="on")
    assert programs(tmp_path / ".compiled-programs")
    assert events["cache_misses"] > 0
    events.clear()
    assert train(tmp_path, compilation_cache="on") == first
    assert events["cache_misses"] == 0
    assert 0 < events["compile_requests_use_cache"] == events["cache_hits"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 1]), "the file is damaged", id="damaged"),
        pytest.param(lambda data: data[: len(data) // 2], "the file is incomplete", id="torn"),
        pytest.param(lambda data: b"something else", "this version of Gracepoint did not write", id="foreign"),
    ],
)
def test_what_is_no_program_is_compiled_and_replaced(
    tmp_path: Path,
    change: Callable[[bytes], bytes],
    says: str,
    events: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = train(tmp_path, compilation_cache="on")
    for path in programs(tmp_path):
        path.write_bytes(change(path.read_bytes()))
    events.clear()
    assert train(tmp_path, compilation_cache="on") == first
    assert 0 < events["compile_requests_use_cache"] == events["cache_misses"]
    assert caplog.text.count(f"is ignored, and compiled anew: {says}") == events["cache_misses"]
    events.clear()
    assert train(tmp_path, compilation_cache="on") == first
    assert events["cache_misses"] == 0


@pytest.mark.parametrize("setting", [None, "off"])
def test_nothing_is_kept_unless_it_is_on(tmp_path: Path, setting: str | None) -> None:
    train(tmp_path, compilation_cache=setting)
    assert not programs(tmp_path)


def test_a_policy_switches_it_on_and_attach_counts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.COMPILATION_CACHE, str(tmp_path / "shared"))
    train(tmp_path / "a")
    assert programs(tmp_path / "shared")
    train(tmp_path / "b", compilation_cache="on")
    assert programs(tmp_path / "b" / ".compiled-programs")
    train(tmp_path / "c", compilation_cache="off")
    assert not programs(tmp_path / "c")


def test_a_bucket_holds_programs_of_checkpoints_elsewhere(bucket: Any, tmp_path: Path, events: Counter[str]) -> None:
    for number in range(3):
        events.clear()
        train(tmp_path / str(number), compilation_cache=f"{bucket.uri}/programs")
    assert events["cache_misses"] == 0
    assert 0 < events["compile_requests_use_cache"] == events["cache_hits"]


def test_jax_s_own_cache_of_the_user_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    try:
        train(tmp_path / "run", compilation_cache="on")
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
    assert "gracepoint keeps no compiled programs: JAX's own cache is set, and counts" in caplog.text
    assert not programs(tmp_path)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        pytest.param("ftp://server/programs", "ftp:// is not known", id="unknown scheme"),
        pytest.param("/dev/null/programs", "Not a directory", id="no folder"),
    ],
)
def test_a_place_that_cannot_be_used_is_a_line_in_the_log(
    tmp_path: Path, where: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gracepoint")
    train(tmp_path, compilation_cache=where)
    lines = [record.getMessage() for record in caplog.records if "compiled program" in record.getMessage()]
    assert [line for line in lines if says in line], lines


@pytest.mark.parametrize("wrong", ["yes", "relative/path"])
def test_a_wrong_setting_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"expected off, on, or an absolute path or a URI"):
        gracepoint.attach(tmp_path, compilation_cache=wrong)


def test_an_attach_that_fails_leaves_jax_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises((CheckpointError, OSError)):
        gracepoint.attach(tmp_path / "file", compilation_cache=str(tmp_path / "programs"))


def test_an_error_in_the_loop_leaves_jax_alone(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), gracepoint.attach(tmp_path, compilation_cache="on"):
        raise ZeroDivisionError
