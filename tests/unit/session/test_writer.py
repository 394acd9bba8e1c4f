"""Who writes the saves of a session: what attach says, what the environment says, what the options say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint.checkpoint import WriteOptions, latest_step
from gracepoint.errors import SettingsError
from gracepoint.settings import Settings
from gracepoint.wire.names import Env
from tests.leftovers import processes_with
from tests.waiting import until

KEEPER = "/dev/null/keeper.sock"  # where none can be


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Returns the processes that this one has started and that run."""
    monkeypatch.setenv("STARTED_BY_TEST", str(tmp_path))
    return lambda: processes_with("STARTED_BY_TEST", str(tmp_path))


@pytest.mark.integration
def test_a_session_saves_with_a_worker_that_ends_with_it(tmp_path: Path, workers: Callable[[], list[int]]) -> None:
    with gracepoint.attach(tmp_path, writer="worker", save_every_steps=1) as session:
        for step in (1, 2):
            session.step(step, {"w": jnp.full(8, step)})
        assert len(workers()) == 1
    assert latest_step(tmp_path) == 2
    until(lambda: not workers(), "the worker to end")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("environment", "options", "expected"),
    [
        ({}, None, "thread"),
        ({Env.WRITER: "worker"}, None, "worker"),
        ({Env.WRITER: KEEPER}, WriteOptions(use_zarr3=True), "keeper"),
        ({Env.WRITER: "worker"}, WriteOptions(writer="thread"), "thread"),
    ],
    ids=["nobody says", "environment", "keeper", "options first"],
)
def test_options_count_before_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    workers: Callable[[], list[int]],
    environment: dict[str, str],
    options: WriteOptions | None,
    expected: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with gracepoint.attach(tmp_path, write_options=options, save_every_steps=1) as session:
        session.step(1, {"w": jnp.ones(8)})
        assert bool(workers()) == (expected != "thread")
    assert (f"no keeper answers at {KEEPER}" in caplog.text) == (expected == "keeper")
    assert (tmp_path / "1/default/w/zarr.json").exists() == (options is not None and options.use_zarr3)


def test_a_writer_that_is_not_known_is_refused_with_its_variable() -> None:
    with pytest.raises(SettingsError, match="GRACEPOINT_WRITER: expected thread, worker"):
        Settings.from_environment({Env.WRITER: "process"})
