"""Who writes the saves of a session: what attach says, what the environment says, what the options say."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint.checkpoint import WriteOptions, latest_step
from gracepoint.errors import SettingsError
from gracepoint.session import attach
from gracepoint.settings import Settings
from gracepoint.wire.names import Env
from tests.leftovers import is_alive
from tests.waiting import until


@pytest.mark.integration
def test_a_session_saves_with_a_worker_that_ends_with_it(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, writer="worker", save_every_steps=1) as session:
        for step in (1, 2):
            session.step(step, {"w": jnp.full(8, step)})
        (worker,) = session._checkpointer.executor.worker_process_ids
    assert latest_step(tmp_path) == 2
    until(lambda: not is_alive(worker), "the worker to end")


@pytest.mark.parametrize(
    ("environment", "given", "expected"),
    [
        ({}, None, None),
        ({Env.WRITER: "worker"}, None, "worker"),
        ({Env.WRITER: "/run/keeper.sock"}, WriteOptions(use_zarr3=True), "/run/keeper.sock"),
        ({Env.WRITER: "worker"}, WriteOptions(writer="thread"), "thread"),
    ],
    ids=["nobody says", "environment", "keeper", "options first"],
)
def test_options_count_before_the_environment(
    environment: dict[str, str], given: WriteOptions | None, expected: str | None
) -> None:
    options = attach._options(Settings.from_environment(environment), given)
    assert options.writer == expected
    assert options.use_zarr3 == (given is not None and given.use_zarr3)


def test_a_writer_that_is_not_known_is_refused_with_its_variable() -> None:
    with pytest.raises(SettingsError, match="GRACEPOINT_WRITER: expected thread, worker"):
        Settings.from_environment({Env.WRITER: "process"})
