"""Sessions that keep compiled programs in JAX's cache: what ``attach`` and the settings change of JAX's settings."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler, distributed
from jax.experimental.compilation_cache import compilation_cache

import gracepoint
from gracepoint.errors import SettingsError
from gracepoint.jax_isolation import setting
from gracepoint.session.compilation import keep_programs
from gracepoint.wire.names import ENV_JAX_CACHE_DIR, ENV_JAX_MIN_COMPILE_S, PROGRAMS_FOLDER, Env

pytestmark = pytest.mark.integration

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
)


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _jax_as_it_was() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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
    return sorted(folder.rglob("*-cache"))


def test_the_second_start_compiles_nothing(tmp_path: Path, events: Counter[str]) -> None:
    first = train(tmp_path, compilation_cache="on")
    assert programs(tmp_path / PROGRAMS_FOLDER)
    assert events["cache_misses"] > 0
    events.clear()
    assert train(tmp_path, compilation_cache="on") == first
    assert events["cache_misses"] == 0
    assert 0 < events["compile_requests_use_cache"] == events["cache_hits"]


SCRIPT = """
import logging, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
import jax, jax.numpy as jnp
import gracepoint
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
with gracepoint.attach(sys.argv[1], save_every_steps=2) as session:
    train_step = session.compile(lambda w: w * 2 + jnp.cos(w), jax.ShapeDtypeStruct((8,), "float32"))
    state, step = session.restore(init=lambda: jnp.arange(8.0))
    for number in range(step + 1, step + 5):
        state = train_step(state)
        session.step(number, state)
"""


def start(directory: Path, programs: str, missing: str = "") -> str:
    """Runs the script with the variables that the operator's webhook sets. Returns what it printed.

    Args:
        directory: The directory of the checkpoints.
        programs: Where JAX keeps its programs.
        missing: A module that the image does not have.
    """
    variables = {ENV_JAX_CACHE_DIR: programs, ENV_JAX_MIN_COMPILE_S: "0"}
    environment = {**os.environ, **variables, "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-c", SCRIPT, str(directory), *missing.split()]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


def counts(printed: str) -> tuple[int, int]:
    """Returns how many programs were compiled, and how many were found, until the first step."""
    found = re.search(r"programs until the first step compiled=(\d+) found=(\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


def test_the_variables_of_jax_are_enough(tmp_path: Path) -> None:
    place = str(tmp_path / "programs")
    printed = start(tmp_path / "checkpoints", place)
    assert f"JAX keeps compiled programs directory={place}" in printed
    compiled, found = counts(printed)
    assert compiled > 0
    assert found == 0
    compiled, found = counts(start(tmp_path / "checkpoints", place))
    assert compiled == 0
    assert found > 0


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        pytest.param("etils", "Please install the `etils[epath]` package", id="no etils"),
        pytest.param("gcsfs", "gcsfs", id="no gcsfs"),
    ],
)
def test_a_bucket_without_its_package_is_a_warning_of_jax(tmp_path: Path, missing: str, says: str) -> None:
    printed = start(tmp_path, "gs://bucket/programs", missing)
    assert "Error reading persistent compilation cache entry" in printed
    assert says in printed
    assert counts(printed)[1] == 0


def test_a_damaged_program_is_compiled(tmp_path: Path, events: Counter[str]) -> None:
    first = train(tmp_path, compilation_cache="on")
    for path in programs(tmp_path):
        path.write_bytes(path.read_bytes()[:10])
    events.clear()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert train(tmp_path, compilation_cache="on") == first
    assert events["cache_hits"] == 0


@pytest.mark.parametrize("setting", [None, "off"])
def test_nothing_is_kept_unless_it_is_on(tmp_path: Path, setting: str | None) -> None:
    train(tmp_path, compilation_cache=setting)
    assert not programs(tmp_path)


def test_the_variable_names_a_directory_and_the_argument_counts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.COMPILATION_CACHE, f"file://{tmp_path}/shared")
    train(tmp_path / "a", compilation_cache="off")
    assert not programs(tmp_path)
    train(tmp_path / "b")
    assert programs(tmp_path / "shared")


def test_variables_of_older_operators_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.COMPILATION_CACHE, "on")
    monkeypatch.setenv(Env.COMPILATION_CACHE_BYTES, "1048576")
    monkeypatch.setenv(Env.COMPILATION_CACHE_DAYS, "7")
    train(tmp_path)
    assert programs(tmp_path / PROGRAMS_FOLDER)


def test_a_directory_that_jax_was_given_counts(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    train(tmp_path / "run", compilation_cache="on")
    assert programs(tmp_path / "own")
    assert not programs(tmp_path / "run")


def test_off_is_off_whatever_jax_was_given(tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    train(tmp_path / "run", compilation_cache="off")
    assert not programs(tmp_path)


def test_a_second_session_of_a_process_keeps_its_own_programs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name, compilation_cache="on")
        assert programs(tmp_path / name / PROGRAMS_FOLDER)
    train(tmp_path / "c", compilation_cache="off")
    assert setting("jax_compilation_cache_dir") is None
    assert len(programs(tmp_path / "b")) == len(programs(tmp_path / "a"))


def test_a_threshold_of_the_user_is_kept(tmp_path: Path) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600.0)
    train(tmp_path, compilation_cache="on")
    assert not programs(tmp_path)


def test_a_bucket_holds_programs_of_checkpoints_elsewhere(gs_bucket: Any, tmp_path: Path, events: Counter[str]) -> None:
    for number in range(2):
        events.clear()
        train(tmp_path / str(number), compilation_cache=f"{gs_bucket.uri}/programs")
    assert events["cache_misses"] == 0
    assert 0 < events["compile_requests_use_cache"] == events["cache_hits"]
    assert setting("jax_persistent_cache_enable_xla_caches") == "none"


def test_programs_of_checkpoints_in_a_bucket_need_a_directory(
    bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(f"{bucket.uri}/run", compilation_cache="on")
    assert "compiled programs are not kept: the checkpoints are in a bucket" in caplog.text
    assert setting("jax_compilation_cache_dir") is None


def test_a_place_that_cannot_be_used_is_a_warning_of_jax(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        train(tmp_path, compilation_cache="/dev/null/programs")


@pytest.fixture
def second_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Makes this process the second one of two. Returns what is passed to JAX's own function that writes programs."""
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.setattr(compiler, "_cache_write", lambda *arguments: written.append(arguments))
    keep_programs("on", str(tmp_path))
    return written


def test_on_accelerators_jax_decides_which_process_writes(second_process: list[tuple[Any, ...]]) -> None:
    program: tuple[Any, ...] = ("key", 1.0, "jit_f", SimpleNamespace(platform="gpu"), object(), [])
    compiler._cache_write(*program)
    assert second_process == [program]


def test_on_cpus_other_processes_write_too_unless_the_program_calls_back(
    second_process: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    jax.clear_caches()
    assert int(jax.jit(lambda x: x + 1)(1)) == 2
    kept = programs(tmp_path)
    assert kept
    jax.jit(lambda x: jax.debug.callback(print, x))(1)
    assert programs(tmp_path) == kept
    assert not second_process


def test_a_jax_with_other_private_names_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.delattr(compiler, "_cache_write")
    caplog.set_level(logging.INFO, "gracepoint")
    keep_programs("on", str(tmp_path))
    assert "on CPUs only process 0 keeps compiled programs" in caplog.text
    assert not hasattr(compiler, "_cache_write")


def test_programs_that_an_earlier_version_kept_stay_and_do_no_harm(tmp_path: Path) -> None:
    old = tmp_path / PROGRAMS_FOLDER / "jax-0.10.2-jaxlib-0.10.2-cpu-1x2-0123456789abcdef/process-0/jit_f-0.program"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of an earlier version")
    first = train(tmp_path, compilation_cache="on", keep_last=1)
    assert train(tmp_path, compilation_cache="on", keep_last=1) == first
    assert old.read_bytes() == b"of an earlier version"
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["2"]


@pytest.mark.parametrize("wrong", ["yes", "relative/path", "ftp://server/programs", "file://relative"])
def test_a_wrong_setting_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"expected off, on, or an absolute path or a URI"):
        gracepoint.attach(tmp_path, compilation_cache=wrong)
