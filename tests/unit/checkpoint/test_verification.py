"""Whether a checkpoint is as it was saved can be found out without restoring it, file by file."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import gracepoint
from gracepoint.__main__ import main
from gracepoint.checkpoint import all_steps
from gracepoint.checkpoint.format import records
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.storage import checks
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StaleGeneration, StoragePath
from gracepoint.checkpoint.verification import verify
from gracepoint.errors import CannotKnow, CheckpointCorrupt, CheckpointNotFound, CheckpointRefused
from tests.unit.checkpoint.fakes.engine import engine, flip_bit, restore, save, small_state

# Of which a restore of ours reads nothing.
FOR_ORBAX_ALONE = {"array_metadatas/process_0", "commit_success.txt", "ocdbt.process_0/manifest.ocdbt"}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The folder of a saved step."""
    save(engine(tmp_path), 4, small_state(), {"data": 1})
    return tmp_path / "4"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_a_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "2"
    file.write_text("not ours")
    with pytest.raises(CheckpointRefused, match=f"{file} is a file: expected the folder of a checkpoint"):
        verify(file)
    with pytest.raises(CheckpointNotFound, match="is no committed checkpoint"):
        verify(file / "default")
    with pytest.raises(CheckpointRefused, match=f"{file} is a file: expected the directory of the steps"):
        all_steps(file)


def test_a_checkpoint_that_is_as_it_was_saved_is_good(step: Path) -> None:
    report = verify(step)
    assert report.ok
    assert report.step == 4
    manifest = records.read_manifest(storage_path(step))
    assert manifest is not None
    assert report.files == len(manifest.files) > 10
    assert str(report) == f"{step}: good: {report.files} files, {report.bytes} bytes"


def test_a_flipped_bit_is_found_in_every_file(step: Path) -> None:
    manifest = records.read_manifest(storage_path(step))
    assert manifest is not None
    for file in manifest.files:
        flip_bit(step / file)
        damage = verify(step).damage
        assert [each.file for each in damage] == [file]
        assert "do not fit" in damage[0].problem
        flip_bit(step / file)
    assert verify(step).ok


@pytest.mark.parametrize(
    ("harm", "problem"),
    [(cut, "has 15 bytes, expected 16"), (Path.unlink, "is missing"), (flip_bit, "do not fit its checksum")],
)
def test_a_damaged_chunk_is_named_with_the_path_of_its_array(
    step: Path, harm: Callable[[Path], None], problem: str
) -> None:
    harm(step / "default" / "w" / "0.1")
    report = verify(step)
    assert [(each.file, each.array) for each in report.damage] == [("default/w/0.1", "w")]
    assert f"array 'w': {step / 'default/w/0.1'}" in str(report)
    assert problem in str(report)


def test_a_chunk_that_goes_away_after_a_look_is_missing(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = checks.check_size

    def look_and_delete(path: StoragePath, size_bytes: int) -> None:
        look(path, size_bytes)
        if path.below(storage_path(step)) == "default/w/0.1":
            path.delete()

    monkeypatch.setattr(checks, "check_size", look_and_delete)
    (damage,) = verify(step).damage
    assert (damage.array, damage.problem) == ("w", f"{step / 'default/w/0.1'} is missing")


def test_a_chunk_that_is_replaced_while_it_is_read_is_damaged(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checks.crc32_of

    def read_from_a_store_without_renames(path: StoragePath) -> int:
        if path.below(storage_path(step)) == "default/w/0.1":
            raise StaleGeneration(errno.ESTALE, "replaced")
        return read(path)

    monkeypatch.setattr(checks, "crc32_of", read_from_a_store_without_renames)
    (damage,) = verify(step).damage
    assert (damage.array, damage.problem.endswith("was replaced or deleted while it was read")) == ("w", True)


def test_ocdbt_flipped_bit_is_found_in_every_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = engine(tmp_path, options=WriteOptions(use_ocdbt=True))
    for number in (1, 2):
        save(checkpointer, number, {"w": np.arange(4096.0) + number, "v": np.ones(4096)})
    item = tmp_path / "2" / "default"
    for path in [path for path in item.rglob("*") if path.is_file()]:
        name = str(path.relative_to(item))
        flip_bit(path)
        assert not verify(tmp_path / "2").ok, name
        restored = restore(tmp_path, {"w": np.zeros(4096), "v": np.zeros(4096)})
        assert restored is not None
        is_node = "process_0/d/" in name and path.stat().st_size < 4096  # of the tree that was merged into another
        assert restored.step == (2 if name in FOR_ORBAX_ALONE or is_node else 1), name
        flip_bit(path)
    assert verify(tmp_path / "2").ok
    # Both arrays are in one file, in the order in which threads have written them.
    assert re.search(r"leaf '(v|w)': chunk \1/0 has values that do not fit its checksum", caplog.text)


def test_the_marks_that_orbax_needs_are_missed(step: Path) -> None:
    (step / "commit_success.txt").unlink()
    assert [each.file for each in verify(step).damage] == ["commit_success.txt"]


def test_without_its_manifest_nothing_is_said_of_a_checkpoint(step: Path) -> None:
    flip_bit(step / "_GRACEPOINT")
    with pytest.raises(CheckpointCorrupt, match="_GRACEPOINT"):
        verify(step)


def test_what_orbax_wrote_has_no_checksums_and_so_no_verdict(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"w": small_state()["w"]})
    with pytest.raises(CannotKnow, match="written by Orbax, which records no checksums"):
        verify(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["4/default", "nowhere", "."])
def test_what_is_no_checkpoint_is_refused(step: Path, name: str) -> None:
    with pytest.raises(CheckpointNotFound) if name != "4/default" else pytest.raises(CannotKnow):
        verify(step.parent / name)


@pytest.mark.parametrize("read", [verify, gracepoint.checkpoint.restore])
def test_the_folder_of_a_run_is_refused_with_a_step_to_give(step: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(CheckpointNotFound, match=rf"has the steps of a run: give one of them, as {step}$"):
        read(step.parent)


def test_the_command_line_judges_all_steps_of_a_folder(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = step.parent
    save(engine(root, attempt="job-1-b"), 5, small_state())
    assert main(["verify", str(root)]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [str(root / "5"), str(step)]
    flip_bit(step / "default" / "b" / "0")
    assert main(["verify", str(root), str(root / "nowhere")]) == 1
    assert "array 'b'" in capsys.readouterr().out
    assert main(["verify", str(root / "5"), str(root / "nowhere")]) == 2
    assert "nowhere is no committed checkpoint" in capsys.readouterr().err


@pytest.mark.integration
def test_the_command_line_is_there_as_a_module(step: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gracepoint", "verify", str(step)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{step}: good")
