"""Training never begins at step 0 without a word beside what looks like a checkpoint and is no step."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import gracepoint
from gracepoint.checkpoint import CheckpointManager, latest_step
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, CheckpointRefused
from tests.object_stores.servers import Bucket

pytestmark = pytest.mark.integration


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": jnp.full((4, 4), value)}


def saved(root: Path | str, *steps: int) -> None:
    with gracepoint.attach(root, save_every_steps=1) as session:
        for step in steps:
            session.step(step, state(float(step)))


def by_orbax(root: Path, step: int, **options: Any) -> None:
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options)) as manager:
        manager.save(step, args=ocp.args.StandardSave({"w": np.full((4, 4), float(step), np.float32)}))


def started(root: Path | str, **arguments: Any) -> tuple[Any, int]:
    with gracepoint.attach(root) as session:
        restored: tuple[Any, int] = session.restore(like=state(), **arguments)
        return restored


def renamed(name: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        by_orbax(root, 100)
        target = root / name
        target.parent.mkdir(exist_ok=True)
        (root / "100").rename(target)

    return make


def linked(name: str, target: str = "elsewhere/100") -> Callable[[Path], None]:
    def make(root: Path) -> None:
        saved(root.parent / "elsewhere", 100)
        root.mkdir(exist_ok=True)
        (root / name).symlink_to(root.parent / target)

    return make


def file(name: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        root.mkdir(exist_ok=True)
        (root / name).write_bytes(b"msgpack")

    return make


def folder(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).mkdir(parents=True)


LOOK_ALIKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a prefix": (lambda root: by_orbax(root, 100, step_prefix="ckpt"), r"ckpt_100 is not named by a number.*to 100"),
    "a fixed length": (lambda root: by_orbax(root, 100, step_format_fixed_length=8), r"00000100 is not.*to 100"),
    "a prefix and a fixed length": (
        lambda root: by_orbax(root, 100, step_prefix="s", step_format_fixed_length=8),
        r"s_00000100 is a checkpoint: rename it to the number of its step",
    ),
    "Flax's name": (renamed("checkpoint_100"), r"checkpoint_100 is not named by a number alone"),
    "another tool's name": (renamed("epoch=3-step=100"), r"epoch=3-step=100 is not.* rename it to 100"),
    "DeepSpeed's name": (folder("global_step100"), r"global_step100 is not named by a number alone"),
    "capitals": (renamed("CKPT-100"), r"CKPT-100 is not named by a number alone"),
    "a copy": (renamed("100 (copy)"), r"100 \(copy\) is a checkpoint"),
    "a name without a number": (renamed("latest"), r"latest is a checkpoint"),
    "Orbax's unfinished save": (folder("100.orbax-checkpoint-tmp-17"), r"is a save that Orbax has not finished"),
    "Orbax's unfinished save with a prefix": (folder("ckpt_100.orbax-checkpoint-tmp-17"), r"Orbax has not finished"),
    "one level above": (renamed("checkpoints/100"), r"checkpoints holds steps, such as 100: give that directory"),
    "one level above, with a prefix": (renamed("old/ckpt_100"), r"old holds steps, such as ckpt_100"),
    "an empty folder": (folder("ckpt_100"), r"ckpt_100 is not named by a number alone"),
    "a file of Flax": (file("checkpoint_100"), r"checkpoint_100 is a file.*flax.training.checkpoints"),
    "a file with a step's number": (file("100"), r"100 is a file: expected the folder"),
    "a file of another tool": (file("step_100.safetensors"), r"step_100.safetensors is a file"),
    "a link to a step": (linked("100"), r"100 is a symbolic link, and links are not followed: move the folder itself"),
    "a link to nothing": (linked("100", "nowhere"), r"100 is a symbolic link"),
    "a link with a prefix": (linked("ckpt_100"), r"ckpt_100 is a symbolic link"),
    "a link without a number": (linked("latest"), r"latest is a symbolic link"),
}


@pytest.mark.parametrize("which", LOOK_ALIKES)
def test_a_start_at_0_is_refused_where_something_looks_like_a_checkpoint(which: str, tmp_path: Path) -> None:
    make, says = LOOK_ALIKES[which]
    root = tmp_path / "run"
    make(root)
    before = sorted(path.name for path in root.iterdir())
    with pytest.raises(CheckpointRefused, match=says) as error:
        started(root)
    assert f"A step is a folder named by its number alone, as {root / '100'}" in str(error.value)
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) == before


@pytest.mark.parametrize("which", ["a prefix", "a file with a step's number", "a link to a step", "one level above"])
def test_a_first_step_without_restore_is_refused_where_something_looks_like_a_checkpoint(
    which: str, tmp_path: Path
) -> None:
    make, says = LOOK_ALIKES[which]
    make(tmp_path / "run")
    with gracepoint.attach(tmp_path / "run", save_every_steps=1) as session:
        with pytest.raises(CheckpointError, match=says):
            session.step(1, state())
        session.step(101, state())


def test_renamed_as_the_error_says_the_step_is_restored(tmp_path: Path) -> None:
    by_orbax(tmp_path, 100, step_prefix="ckpt")
    with pytest.raises(CheckpointRefused, match="rename it to 100"):
        started(tmp_path)
    (tmp_path / "ckpt_100").rename(tmp_path / "100")
    restored, step = started(tmp_path)
    assert (step, float(restored["w"][0, 0])) == (100, 100.0)


def test_what_looks_like_no_checkpoint_does_not_keep_training_from_beginning(tmp_path: Path) -> None:
    for name in (
        "logs_1",
        "profile",
        "lost+found",
        "events.17",
        "run_2026",
        "100_samples",
        "shards",
        "eval_step_100",
        "footstep_3",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "profile" / "100").mkdir()
    for name in (
        "README",
        "config.json",
        "tokens_32000.model",
        "loss_100.png",
        "shards/00001.npz",
        "metrics_epoch_3.npz",
    ):
        (tmp_path / name).write_text("")
    (tmp_path / "data").symlink_to(tmp_path / "shards")
    assert started(tmp_path)[1] == 0


def test_the_state_that_from_names_may_lie_in_the_directory(tmp_path: Path) -> None:
    saved(tmp_path / "base", 100)
    for base in (tmp_path / "base", tmp_path / "base" / "100"):
        restored, step = started(tmp_path, from_=base)
        assert (step, float(restored["w"][0, 0])) == (0, 100.0)
    by_orbax(tmp_path, 200, step_prefix="ckpt")
    with pytest.raises(CheckpointRefused, match="ckpt_200 is not named"):
        started(tmp_path, from_=tmp_path / "base")


@pytest.mark.parametrize("which", ["a prefix", "a fixed length", "a name without a number", "a link to a step"])
def test_another_runs_step_of_any_name_is_a_base(which: str, tmp_path: Path) -> None:
    LOOK_ALIKES[which][0](tmp_path / "other")
    (name,) = [path.name for path in (tmp_path / "other").iterdir() if not path.name.startswith(".")]
    restored, step = started(tmp_path / "own", from_=tmp_path / "other" / name)
    assert (step, float(restored["w"][0, 0])) == (0, 100.0)


def test_a_base_whose_steps_have_other_names_is_refused_with_these(tmp_path: Path) -> None:
    by_orbax(tmp_path / "other", 100, step_prefix="ckpt")
    with pytest.raises(CheckpointNotFound, match="no complete checkpoint: .*ckpt_100 is not named by a number"):
        started(tmp_path / "own", from_=tmp_path / "other")


@pytest.mark.parametrize("below", ["100", "100/default"])
def test_given_a_step_or_an_item_the_error_names_the_directory_of_the_steps(below: str, tmp_path: Path) -> None:
    saved(tmp_path, 100)
    with pytest.raises(CheckpointRefused, match=f"the folder of one step; give the directory of the steps, {tmp_path}"):
        started(tmp_path / below)


def test_the_name_of_a_newer_step_is_logged_with_the_step_that_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 100)
    by_orbax(tmp_path, 200, step_prefix="ckpt")
    (tmp_path / "300").symlink_to(tmp_path / "100")
    (tmp_path / "checkpoint_50").write_text("")
    assert started(tmp_path)[1] == 100
    assert f"{tmp_path / '300'}, {tmp_path / 'ckpt_200'} are named like newer steps than 100" in caplog.text


@pytest.mark.parametrize("target", ["other/2", "nowhere"])
def test_a_link_in_the_place_of_a_step_that_is_saved_again_goes_and_what_it_leads_to_stays(
    target: str, tmp_path: Path
) -> None:
    saved(tmp_path / "other", 2)
    saved(tmp_path / "run", 1)
    (tmp_path / "run" / "2").symlink_to(tmp_path / target)
    with gracepoint.attach(tmp_path / "run", save_every_steps=1) as session:
        assert session.restore(like=state())[1] == 1
        session.step(2, state(22.0))
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name[0] != ".") == ["1", "2"]
    assert [float(started(tmp_path / run)[0]["w"][0, 0]) for run in ("run", "other")] == [22.0, 2.0]


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rights of a folder do not bind root, so the file system's answer is made here."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "lost+found").mkdir()
    children = PosixPath.children

    def refuse(self: PosixPath) -> Any:
        if Path(self).parent == tmp_path:
            raise PermissionError(13, os.strerror(13), self.key)
        return children(self)

    monkeypatch.setattr(PosixPath, "children", refuse)
    with pytest.raises(CheckpointRefused, match="checkpoints cannot be read .*Permission denied") as error:
        started(tmp_path)
    assert "lost+found" not in str(error.value)


def test_a_step_that_may_not_be_read_does_not_count_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 100)
    read = PosixPath.read

    def refuse(self: PosixPath) -> Any:
        if Path(self).parent == tmp_path / "100":
            raise PermissionError(13, os.strerror(13), self.key)
        return read(self)

    monkeypatch.setattr(PosixPath, "read", refuse)
    with pytest.raises((CheckpointError, OSError), match=re.escape(f"Permission denied: '{tmp_path / '100'}")):
        started(tmp_path)


def test_lists_of_steps_that_are_empty_name_what_looks_like_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_orbax(tmp_path / "a", 100, step_prefix="ckpt")
    assert [latest_step(tmp_path / "a"), latest_step(tmp_path / "a")] == [None, None]
    assert caplog.text.count("ckpt_100 is not named by a number alone") == 1
    by_orbax(tmp_path / "b", 100, step_prefix="ckpt")
    with CheckpointManager(tmp_path / "b") as manager:
        assert manager.latest_step() is None
        assert f"{tmp_path / 'b' / 'ckpt_100'} is not named" in caplog.text
        with pytest.raises(CheckpointRefused, match="ckpt_100 is not named by a number alone"):
            manager.restore(like=state())


@pytest.mark.parametrize("item", ["default", "state"])
def test_steps_with_an_item_of_any_name_are_restored(item: str, tmp_path: Path) -> None:
    by_orbax(tmp_path, 100)
    (tmp_path / "100" / "default").rename(tmp_path / "100" / item)
    assert started(tmp_path)[1] == 100


def test_a_step_of_several_trees_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        tree = ocp.args.StandardSave({"w": np.ones(4, np.float32)})
        manager.save(100, args=ocp.args.Composite(params=tree, moments=tree))
    with pytest.raises(CheckpointCorrupt, match="100 is not a checkpoint.*several other items with a tree"):
        started(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ckpt_100/_CHECKPOINT_METADATA", "ckpt_100 is not named by a number alone: rename it to 100"),
        ("latest/default/_METADATA", "latest is a checkpoint"),
        ("checkpoints/100/_GRACEPOINT", "checkpoints holds steps, such as 100"),
        ("100", "100 is a file"),
        ("checkpoint_100", "checkpoint_100 is a file"),
    ],
)
def test_in_a_bucket_a_start_at_0_is_refused_where_something_looks_like_a_checkpoint(
    name: str, says: str, bucket: Bucket
) -> None:
    root = f"{bucket.uri}/run"
    from gracepoint.checkpoint.storage.locations import storage_path

    (storage_path(root) / name).create(b"{}")
    with pytest.raises(CheckpointRefused, match=f"{root}/{says}"):
        started(root)
