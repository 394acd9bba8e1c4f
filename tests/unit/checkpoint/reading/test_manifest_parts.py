"""A manifest in parts, as states of many chunks have: nothing is lost, and damage in any part is found by name."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint import Saved
from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.format.records import DoneRecord, Manifest, merge
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.reading.stored_arrays import ManifestParts
from gracepoint.checkpoint.saving import planner
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.verification import verify
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, SaveFailed
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    bits,
    engine,
    flip_bit,
    in_gang,
    outcomes_in_gang,
    restore,
    rich_state,
    save,
    small_state,
)
from tests.unit.checkpoint.fakes.failures import leave_uncommitted
from tests.unit.checkpoint.fakes.formats import each_format


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state has many chunks."""
    monkeypatch.setattr(planner, "MANY_CHUNKS", 1)


def manifest_of(folder: Path) -> Manifest:
    manifest = records.read_manifest(storage_path(folder))
    assert manifest is not None
    return manifest


@pytest.mark.usefixtures("many")
@each_format
def test_a_state_comes_back_from_the_parts_of_three_processes(tmp_path: Path, options: WriteOptions) -> None:
    options = dataclasses.replace(options, min_slice_bytes=1 << 10)
    state = {**rich_state(), "large": np.arange(1 << 12, dtype=np.float32), "text": "ünï/cödé~"}
    in_gang(3, lambda gang: save(engine(tmp_path, gang, options=options), 1, state))
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)
    found = manifest_of(tmp_path / "1")
    assert found.is_in_parts
    assert not [
        path for path in found.files if path.startswith("default/large/") and not path.endswith(("rray", "json"))
    ]
    assert not found.values
    assert verify(tmp_path / "1").ok


@pytest.mark.integration
@pytest.mark.usefixtures("many")
def test_orbax_reads_a_step_whose_manifest_is_in_parts(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    state = rich_state()
    save(engine(tmp_path), 3, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(3, args=ocp.args.StandardRestore(state))
    assert bits(found["params"].w) == bits(state["params"].w)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("options", [WriteOptions(), WriteOptions(compression="zstd")], ids=["plain", "zstd"])
@pytest.mark.parametrize("name", ["_GRACEPOINT.process_1", layout.CHUNK_WRITERS, "default/large/0"])
def test_damage_is_found_by_restore_and_by_verify(tmp_path: Path, name: str, options: WriteOptions) -> None:
    options = dataclasses.replace(options, min_slice_bytes=1 << 10)
    state = {"large": np.arange(1 << 12, dtype=np.float32)}
    for step in (1, 2):

        def run(gang: ProcessGroup, step: int = step) -> Saved:
            return save(engine(tmp_path, gang, attempt=f"job-{step}", options=options), step, state)

        in_gang(2, run)
    flip_bit(tmp_path / "2" / name)
    assert [damage.file for damage in verify(tmp_path / "2").damage] == [name]
    restored = restore(tmp_path, state)
    assert restored is not None
    assert restored.step == 1


@pytest.mark.usefixtures("many")
def test_only_the_parts_of_chunks_that_are_asked_for_are_read(tmp_path: Path) -> None:
    state = {"large": np.arange(1 << 12, dtype=np.float32)}
    options = WriteOptions(min_slice_bytes=1 << 10)
    in_gang(4, lambda gang: save(engine(tmp_path, gang, options=options), 1, state))
    for process in (0, 2, 3):
        (tmp_path / "1" / layout.manifest_part(process)).unlink()
    parts = ManifestParts(storage_path(tmp_path / "1"), manifest_of(tmp_path / "1"))
    assert parts.files["large/1"].bytes == 1 << 12
    with pytest.raises(CheckpointCorrupt, match="_GRACEPOINT.process_2"):
        parts.files["large/2"]
    for unknown in ("large/.zarray", "larger/1"):
        with pytest.raises(KeyError):
            parts.files[unknown]


@pytest.mark.usefixtures("many")
def test_a_durable_save_in_parts_is_committed_by_the_next_start(tmp_path: Path) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1))
    assert listing.list_steps(
        Layout(storage_path(tmp_path)),
        attempt="job-1-b",
        deadline=Deadline.after(30.0, time.monotonic),
        sleep=lambda s: None,
    ).steps == (4,)
    for restored in in_gang(2, lambda gang: restore(tmp_path, small_state(), gang=gang)):
        assert restored is not None
        assert_same(restored.state, small_state(4))


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("more", [600, 0], ids=["many files", "few files"])
@pytest.mark.parametrize("lost", ["default/w/0.0", "_GRACEPOINT.process_1"])
def test_a_save_in_parts_that_lost_a_file_is_not_committed(tmp_path: Path, lost: str, more: int) -> None:
    arrays = {f"more{number}": np.arange(4) + number for number in range(more)}
    left = leave_uncommitted(tmp_path, 4, (0, 1), more=arrays, options=WriteOptions(use_ocdbt=False))
    (left / lost).unlink()
    (remark,) = commit.salvage(Layout(storage_path(tmp_path)))
    assert lost in remark
    assert not (tmp_path / "4").exists()


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("options", [WriteOptions(), WriteOptions(use_ocdbt=True)], ids=["files", "OCDBT"])
def test_copies_in_parts_that_differ_fail_the_save(tmp_path: Path, options: WriteOptions) -> None:
    outcomes = outcomes_in_gang(
        2, lambda gang: save(engine(tmp_path, gang, options=options), 1, {"other": gang.process_index})
    )
    assert all(isinstance(outcome, SaveFailed) for outcome in outcomes), outcomes
    assert "is local to each process, and process 1 has other values" in str(outcomes[0])


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        pytest.param({"chunks": 0}, "its processes wrote .* chunks, expected", id="a chunk too few"),
        pytest.param({"plan": 1}, "plan differs between processes", id="another plan"),
        pytest.param({"chunks": None, "plan": None}, "plan differs between processes", id="no parts"),
        pytest.param({"files": {}}, "files are missing, for example _GRACEPOINT.process_1", id="no part"),
    ],
)
def test_records_that_do_not_fit_together_are_refused(tmp_path: Path, harm: dict[str, Any], message: str) -> None:
    left = leave_uncommitted(tmp_path, 4, (0, 1))
    first, second = (DoneRecord.from_bytes((left / layout.done_record(process)).read_bytes(), "") for process in (0, 1))
    if harm == {"chunks": 0}:
        harm = {"chunks": (second.chunks or 0) - 1}
    with pytest.raises(CheckpointCorrupt, match=message):
        merge([first, dataclasses.replace(second, **harm)])


def test_the_manifest_of_few_chunks_is_one_that_older_versions_read(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, {"w": jnp.ones(3)})
    for name in (layout.MANIFEST, layout.done_record(0)):
        fields = json.loads((tmp_path / "1" / name).read_bytes())
        assert fields["format"].endswith("/1")
        assert not {"chunks", "plan"} & set(fields)
    assert not (tmp_path / "1" / layout.CHUNK_WRITERS).exists()


def test_many_chunks_are_found_in_a_small_manifest(tmp_path: Path) -> None:
    options = WriteOptions(use_ocdbt=False, target_chunk_bytes=16)
    state = {"w": np.arange(4 * planner.MANY_CHUNKS, dtype=np.float32)}
    save(engine(tmp_path, options=options), 1, state)
    found = manifest_of(tmp_path / "1")
    assert found.is_in_parts
    assert len(found.files) < 20
    size_bytes = (tmp_path / "1" / layout.MANIFEST).stat().st_size
    assert size_bytes < 4096 < math.prod(found.arrays[0].shape)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)
