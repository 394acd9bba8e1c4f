"""What stands in the small files of a step, for Orbax and for a later save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gracepoint.checkpoint import CheckpointManager
from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.records import Manifest, ManifestPart, StoredFile
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointCorrupt
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import engine, in_gang, restore, save, small_state


class Words:
    """A handler that writes the words that it is given."""

    def save(self, directory: Any, args: Any) -> None:
        (Path(directory) / "words").write_text(args)

    def restore(self, directory: Any, args: Any) -> str:
        return (Path(directory) / "words").read_text()


def step_metadata(root: Path, **more: Any) -> dict[str, Any]:
    with CheckpointManager(root, item_handlers={"words": Words()}) as manager:
        manager.save(4, small_state(), **more)
    found: dict[str, Any] = json.loads((root / "4" / layout.STEP_METADATA).read_text())
    return found


def test_custom_metadata_of_a_step_is_where_orbax_looks_for_it(tmp_path: Path) -> None:
    assert step_metadata(tmp_path, custom_metadata={"run": "a", "seeds": [1, 2]})["custom_metadata"] == {
        "run": "a",
        "seeds": [1, 2],
    }


def test_a_step_names_the_handlers_of_further_items_after_its_own(tmp_path: Path) -> None:
    handlers = step_metadata(tmp_path, items={"words": "some"})["item_handlers"]
    assert list(handlers) == ["default", "host_state", "words"]
    assert handlers["words"] == f"{Words.__module__}.Words"


@pytest.mark.parametrize("more", [{}, {"custom_metadata": {}}])
def test_a_step_without_more_says_nothing_of_it(tmp_path: Path, more: dict[str, Any]) -> None:
    found = step_metadata(tmp_path, **more)
    assert (found["custom_metadata"], list(found["item_handlers"])) == ({}, ["default", "host_state"])
    assert not (tmp_path / "4" / layout.MORE_METADATA).exists()


def test_process_0_finds_the_note_that_a_step_was_saved_with(tmp_path: Path) -> None:
    def saved(gang: ProcessGroup) -> None:
        save(engine(tmp_path, gang), 4, small_state(), note=f"by process {gang.process_index}")

    def noted(gang: ProcessGroup) -> str | None:
        restored = restore(tmp_path, small_state(), gang=gang)
        assert restored is not None
        return restored.note

    in_gang(2, saved)
    assert in_gang(2, noted) == ["by process 0", None]


def test_a_step_without_a_note_has_no_file_for_it(tmp_path: Path) -> None:
    save(engine(tmp_path), 4, small_state())
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert restored.note is None
    assert not (tmp_path / "4" / layout.NOTE).exists()


def test_all_files_of_a_manifest_in_parts_are_found(tmp_path: Path) -> None:
    folder, own = storage_path(tmp_path), {layout.CHUNK_WRITERS: StoredFile(1, 1)}
    chunks = {f"default/w/{process}": StoredFile(process, 0) for process in range(150)}
    for process, (path, file) in enumerate(chunks.items()):
        (folder / layout.manifest_part(process)).put(ManifestPart({path: file}, {}).to_bytes())
    manifest = Manifest(1, "default", "job-0", 0, len(chunks), (), own, {}, (), 0)
    assert dict(records.all_files(folder, manifest)) == own | chunks
    (folder / layout.manifest_part(3)).delete()
    with pytest.raises(CheckpointCorrupt, match=r"a part of its manifest is missing: _GRACEPOINT\.process_3$"):
        dict(records.all_files(folder, manifest))
