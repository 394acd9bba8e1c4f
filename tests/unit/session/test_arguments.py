"""Mistakes in a training loop's calls: each is an error that names the argument, before anything is written."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint.errors import CheckpointError, SettingsError
from gracepoint.preemption.exit import ProcessExit
from gracepoint.settings import Settings
from gracepoint.wire.names import Env


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ProcessExit, "start", lambda self: None)
    (tmp_path / "here").mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def init_state() -> dict[str, Any]:
    return {"w": jnp.zeros(4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"directory": ""}, "attach(directory=...): expected a path or a URI, found ''", id="empty"),
        pytest.param({"directory": 5}, "attach(directory=...): expected a path or a URI, found 5", id="number"),
        pytest.param({"directory": b"/x"}, "attach(directory=...): expected a path or a URI, found b'/x'", id="bytes"),
        pytest.param({"directory": "runs/{jobset}"}, "only a CheckpointPolicy's directory has {jobset}", id="jobset"),
        pytest.param({"directory": "gs://b/{namespace}"}, "directory has {namespace}", id="namespace"),
        pytest.param({"write_options": {"ocdbt": True}}, "attach(write_options=...): expected", id="options"),
        pytest.param({"receiver": object()}, "attach(receiver=...): expected an object with start", id="receiver"),
    ],
)
def test_wrong_arguments_of_attach_are_named(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        gracepoint.attach(**({"directory": tmp_path / "steps"} | arguments))
    assert message in str(caught.value)
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["here", "home"]


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "steps").touch()
    with pytest.raises(CheckpointError, match="steps: expected a folder, found a file"):
        gracepoint.attach(tmp_path / "steps")


@pytest.mark.parametrize("way", ["argument", "path", "environment"])
def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "environment":
        monkeypatch.setenv(Env.DIRECTORY, "~/steps")
        monkeypatch.setenv(Env.TRACE, "~/traces")
        gracepoint.attach().close()
    else:
        gracepoint.attach("~/steps" if way == "argument" else Path("~/steps"), trace="~/traces").close()
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["steps", "traces"]
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"directory": "$HOME/steps"},
        {"directory": "/data/${USER}/steps"},
        {"directory": "gs://bucket/$(RUN)"},
        {"directory": "~nobody-here/steps"},
        {"trace": "$HOME/traces"},
        {"directory": {"steps": 1}},
        {"keep_last": {"steps": 1}},
    ],
)
def test_what_nobody_replaces_in_a_path_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="is not replaced|no such user|expected a ") as caught:
        gracepoint.attach(**({"directory": tmp_path / "steps"} | arguments))
    assert str(caught.value).startswith("attach(")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["here", "home"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda session: session.restore(init_state), "restore(like=...): expected a state or its form", id="like"
        ),
        pytest.param(
            lambda session: session.restore(init=init_state()), "restore(init=...): expected a function", id="init"
        ),
        pytest.param(
            lambda session: session.restore(init=init_state, data=iter([1])),
            "restore(data=...): expected an iterator with get_state and set_state, found a list_iterator",
            id="data",
        ),
        pytest.param(
            lambda session: session.host_state("data", 5, print), "host_state('data'): expected functions", id="get"
        ),
        pytest.param(
            lambda session: session.host_state("data", dict, {}), "host_state('data'): expected functions", id="set"
        ),
    ],
)
def test_wrong_arguments_of_a_session_are_named(
    call: Callable[[gracepoint.Session], Any], message: str, tmp_path: Path
) -> None:
    with gracepoint.attach(tmp_path / "steps") as session, pytest.raises(SettingsError) as caught:
        call(session)
    assert message in str(caught.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class CallableModel:
    """A state that can be called, as modules of Equinox and Flax NNX can."""

    w: jax.Array

    def __call__(self) -> None:
        """Computes nothing."""


def test_a_state_that_can_be_called_is_a_state(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path) as session:
        state, step = session.restore(CallableModel(jnp.zeros(4)))
    assert isinstance(state, CallableModel)
    assert step == 0


def test_a_folder_of_one_step_is_not_taken_as_the_directory(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.step(1, init_state())
    with gracepoint.attach(tmp_path / "1") as session, pytest.raises(CheckpointError) as caught:
        session.restore(like=init_state())
    assert f"{tmp_path / '1'} is the folder of one step; give the directory of the steps, {tmp_path}" in str(
        caught.value
    )


#: How the docstring writes a default that is no plain number or word.
WRITTEN = {
    "metadata": "none",
    "writer": "``thread``",
}


def test_the_docstring_of_attach_names_the_defaults() -> None:
    text = " ".join((inspect.getdoc(gracepoint.attach) or "").partition("Args:")[2].partition("Raises:")[0].split())
    arguments = list(inspect.signature(gracepoint.attach).parameters)
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    for name, following in zip(arguments, [*arguments[1:], None], strict=True):
        about = text.partition(f"{name}: ")[2].partition(f" {following}: ")[0]
        default = defaults.get(name)
        if name in defaults and (default is not None or name in WRITTEN):
            shown = f"{default:g}" if isinstance(default, int | float) else f"``{default}``"
            written = WRITTEN.get(name, shown)
            assert f"Default: {written}." in about or f"{written}, the default" in about, name


@pytest.mark.parametrize(
    ("restored", "passed", "warned"),
    [
        pytest.param(0, [1, 2, 3], 0, id="counted"),
        pytest.param(0, [10, 20], 0, id="every tenth"),
        pytest.param(0, [0, 1, 2], 1, id="numbered from 0"),
        pytest.param(2, [2, 3], 1, id="numbered from 0, restored"),
        pytest.param(2, [3, 4], 0, id="restored"),
        pytest.param(0, [1, 1, 1, 1], 1, id="not counted"),
        pytest.param(0, [5, 4, 3], 1, id="backwards"),
    ],
)
def test_steps_that_do_not_grow_are_warned_of_once(
    restored: int, passed: list[int], warned: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if restored:
        with gracepoint.attach(tmp_path, save_every_steps=1) as session:
            session.step(restored, init_state())
    with gracepoint.attach(tmp_path) as session:
        session.restore(like=init_state())
        for step in passed:
            session.step(step, init_state())
            session.poll(init_state())
    found = [r for r in caplog.messages if "expected the number of finished steps" in r]
    assert len(found) == warned
