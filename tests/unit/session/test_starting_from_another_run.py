"""A job begins with the state of another run, in whose directory nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import gracepoint
from gracepoint.session.starting_point import RestoredFrom
from tests import loop_mount

pytestmark = pytest.mark.integration


def state_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 4), float(step)), "step": jnp.int32(step)}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory with the steps 2 and 4."""
    with gracepoint.attach(tmp_path / "base", save_every_steps=2) as session:
        session.host_state("data", lambda: {"position": 4}, lambda _: None)
        for step in range(1, 5):
            session.step(step, state_of(step))
    return tmp_path / "base"


def listed(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_first_start_has_the_other_runs_newest_state_at_step_0(base: Path, tmp_path: Path) -> None:
    before = listed(base)
    with gracepoint.attach(tmp_path / "own", save_every_steps=1) as session:
        state, step = session.restore(like=state_of(0), from_=base)
        assert (step, float(state["w"][0, 0])) == (0, 4.0)
        assert session.restored == RestoredFrom(str(base), 4, own=False)
        session.step(1, state)
    assert listed(base) == before


@pytest.mark.mounts
def test_a_base_that_is_mounted_read_only_is_restored(base: Path, tmp_path: Path) -> None:
    with loop_mount.read_only(base, tmp_path / "mount") as mounted:
        with pytest.raises(OSError, match="Read-only file system"):
            (mounted / "file").touch()
        with gracepoint.attach(tmp_path / "own") as session:
            state, step = session.restore(like=state_of(0), from_=mounted)
            assert (step, float(state["w"][0, 0])) == (0, 4.0)
            assert session.restored == RestoredFrom(str(mounted), 4, own=False)


def test_a_later_start_has_its_own_checkpoint(base: Path, tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path / "own", save_every_steps=1) as session:
        session.restore(like=state_of(0), from_=base)
        session.step(1, state_of(1))
    with gracepoint.attach(tmp_path / "own") as session:
        state, step = session.restore(like=state_of(0), from_=base)
        assert (step, float(state["w"][0, 0])) == (1, 1.0)
        assert session.restored == RestoredFrom(str(tmp_path / "own"), 1, own=True)


def test_the_folder_of_a_step_names_that_step(base: Path, tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path / "own") as session:
        state, step = session.restore(like=state_of(0), from_=base / "2")
        assert (step, float(state["w"][0, 0])) == (0, 2.0)


def test_without_any_checkpoint_nothing_was_restored(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path / "own") as session:
        assert session.restore(like=state_of(0))[1] == 0
        assert session.restored is None


def test_a_checkpoint_that_orbax_wrote_is_a_base_as_well(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path / "base") as manager:
        manager.save(7, args=ocp.args.StandardSave(state_of(7)))
    with gracepoint.attach(tmp_path / "own") as session:
        state, step = session.restore(like=state_of(0), from_=tmp_path / "base")
        assert (step, float(state["w"][0, 0])) == (0, 7.0)


def test_a_damaged_step_of_the_base_is_passed_over_and_not_marked(base: Path, tmp_path: Path) -> None:
    (base / "4" / "default" / "w" / "0.0").unlink()
    before = listed(base)
    with gracepoint.attach(tmp_path / "own") as session:
        state, _ = session.restore(like=state_of(0), from_=base)
        assert float(state["w"][0, 0]) == 2.0
    assert listed(base) == before


def test_uncommitted_save_in_the_base_stays_as_it_is(base: Path, tmp_path: Path) -> None:
    (base / "4").rename(base / "4.gracepoint-tmp.other.1")
    before = listed(base)
    with gracepoint.attach(tmp_path / "own") as session:
        state, _ = session.restore(like=state_of(0), from_=base)
        assert float(state["w"][0, 0]) == 2.0
    assert listed(base) == before


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "there is no folder"),
        ("empty", "found no complete checkpoint"),
        ("empty/3", "found no complete checkpoint"),
    ],
)
def test_base_without_a_checkpoint_is_an_error_and_no_fresh_start(folder: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with gracepoint.attach(tmp_path / "own") as session, pytest.raises(gracepoint.CheckpointNotFound, match=message):
        session.restore(like=state_of(0), from_=tmp_path / folder)


def test_a_state_of_another_shape_is_refused_by_its_name(base: Path, tmp_path: Path) -> None:
    like = {"w": np.zeros((2, 2)), "step": jnp.int32(0)}
    with gracepoint.attach(tmp_path / "own") as session, pytest.raises(gracepoint.CheckpointMismatch, match=r"\bw\b"):
        session.restore(like=like, from_=base)
