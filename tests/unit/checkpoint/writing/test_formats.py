"""Every way to write a checkpoint comes back bit for bit, and is found out when it is damaged."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.format import ocdbt
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.format.records import done_records
from gracepoint.checkpoint.options import SaveArgs, WriteOptions
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointCorrupt, SaveFailed
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    flip_bit,
    in_gang,
    outcomes_in_gang,
    restore,
    rich_state,
    save,
    small_state,
)
from tests.unit.checkpoint.fakes.formats import each_format

pytestmark = pytest.mark.integration


@each_format
def test_a_save_comes_back_bit_for_bit(tmp_path: Path, options: WriteOptions) -> None:
    state = {**rich_state(), "text": "ünï/cödé~", "large": jnp.arange(1 << 16, dtype=jnp.float32)}
    options = dataclasses.replace(options, target_chunk_bytes=1 << 16)
    checkpointer = engine(tmp_path, options=options)
    checkpointer.save_in_background(1, state, {"a": 1})
    save(checkpointer, 2, state)
    for expected in (2, 1):
        restored = restore(tmp_path, state)
        assert restored is not None
        assert restored.step == expected
        assert_same(restored.state, state)
        (tmp_path / str(expected)).rename(tmp_path / f"seen {expected}")


@each_format
def test_the_parts_of_a_gang_come_back_as_one(tmp_path: Path, options: WriteOptions) -> None:
    options = dataclasses.replace(options, min_slice_bytes=1 << 10)
    state = {"large": np.arange(1 << 12, dtype=np.float32), **small_state()}
    in_gang(3, lambda gang: save(engine(tmp_path, gang, options=options), 1, state))
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


@each_format
def test_flipped_bit_in_a_data_file_falls_back_to_the_previous_step(tmp_path: Path, options: WriteOptions) -> None:
    state = {"w": jnp.arange(1 << 15, dtype=jnp.float32)}  # of 128 KiB, so that OCDBT has a file of it
    for step in (1, 2):
        save(engine(tmp_path, options=options, attempt=f"job-{step}"), step, {"w": state["w"] * step})
    largest = max((p for p in (tmp_path / "2" / "default").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    flip_bit(largest)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert restored.step == 1


@each_format
def test_copies_that_differ_between_processes_fail_the_save(tmp_path: Path, options: WriteOptions) -> None:
    states: dict[str, Callable[[int], Any]] = {
        "a leaf of type str": lambda process: {"same": 1, "other": f"text {process}"},
        "leaf 'other'": lambda process: {"same": 1, "other": process},
        "leaf 'in/other.x'": lambda process: {"in/other": {"x": np.full(3, process)}},
        "the only leaf": lambda process: np.full(3, process),
    }
    for number, (leaf, state) in enumerate(states.items()):

        def run(gang: Any, number: int = number, state: Callable[[int], Any] = state) -> Any:
            return save(engine(tmp_path, gang, attempt=f"job-{number}", options=options), 1, state(gang.process_index))

        outcomes = outcomes_in_gang(2, run)
        assert all(isinstance(outcome, SaveFailed) for outcome in outcomes), outcomes
        assert f"{leaf} is local to each process, and process 1 has other values" in str(outcomes[0])


def test_uncommitted_ocdbt_save_is_merged_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state()
    with monkeypatch.context() as patch:
        patch.setattr(ocdbt, "merge", _broken)
        outcomes = outcomes_in_gang(
            2, lambda gang: save(engine(tmp_path, gang, options=WriteOptions(use_ocdbt=True)), 1, state)
        )
    assert all(isinstance(outcome, SaveFailed) for outcome in outcomes)
    (left,) = tmp_path.glob("1.gracepoint-tmp.*")
    (left / "default" / "d").mkdir()  # as a merge that was stopped leaves
    (left / "default" / "d" / "0123456789abcdef0123456789abcdef").write_bytes(b"half")
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


def test_any_number_of_processes_may_merge_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state()
    with monkeypatch.context() as patch:
        patch.setattr(ocdbt, "merge", _broken)
        outcomes_in_gang(2, lambda gang: save(engine(tmp_path, gang, options=WriteOptions(use_ocdbt=True)), 1, state))
    (left,) = tmp_path.glob("1.gracepoint-tmp.*")
    errors: list[BaseException] = []

    def merge() -> None:
        try:
            ocdbt.merge(storage_path(left / "default"), 2)
        except BaseException as error:  # noqa: BLE001 - raised by the test
            errors.append(error)

    threads = [threading.Thread(target=merge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


def test_any_number_of_processes_may_salvage_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state()
    with monkeypatch.context() as patch:
        patch.setattr(ocdbt, "merge", _broken)
        outcomes_in_gang(2, lambda gang: save(engine(tmp_path, gang, options=WriteOptions(use_ocdbt=True)), 1, state))
    remarks = in_gang(4, lambda gang: commit.salvage(Layout(storage_path(tmp_path))))
    assert not any("not salvaged" in remark for found in remarks for remark in found), remarks
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


def test_a_tree_that_cannot_be_merged_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ocdbt, "merge", _broken)
        with pytest.raises(SaveFailed):
            save(engine(tmp_path, options=WriteOptions(use_ocdbt=True)), 1, small_state())
    (left,) = tmp_path.glob("1.gracepoint-tmp.*")
    flip_bit(left / "default" / "ocdbt.process_0" / "manifest.ocdbt")
    with pytest.raises(CheckpointCorrupt, match="cannot be merged"):
        ocdbt.merge(storage_path(left / "default"), 1)


def test_slices_of_a_replicated_leaf_are_written_by_all_processes(tmp_path: Path) -> None:
    state = {"w": np.arange(1 << 20, dtype=np.float32)}  # 4 MiB
    in_gang(4, lambda gang: save(engine(tmp_path, gang), 1, state))
    records = done_records(storage_path(tmp_path / "1"))
    assert records is not None
    written = [
        [path for path in record.files if path.startswith("default/w/") and "." not in path] for record in records
    ]
    assert [len(paths) for paths in written] == [1] * 4
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


def test_leaves_are_stored_in_the_requested_type_and_chunks(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 64, dtype=np.float32).reshape(8, 8)
    state = {"cast": jnp.asarray(values), "cut": jnp.asarray(values), "plain": jnp.asarray(values)}
    args = {"cast": SaveArgs(dtype=jnp.bfloat16), "cut": SaveArgs(chunk_byte_size=64, shard_axes=(1,))}
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "here", state, save_args=args)
        found = checkpointer.restore(tmp_path / "here")
        metadata = checkpointer.metadata(tmp_path / "here").tree
    expected = jnp.asarray(values).astype(jnp.bfloat16)
    assert_same(found, {**state, "cast": expected})
    assert metadata["cast"].dtype == jnp.bfloat16
    assert metadata["cut"].chunk_shape == (8, 2)
    assert metadata["cut"].write_shape == (8, 8)
    assert len(list((tmp_path / "here" / "cut").glob("[0-9]*"))) == 4


def test_shardings_are_not_stored_where_that_is_not_wanted(tmp_path: Path) -> None:
    save(engine(tmp_path, options=WriteOptions(store_sharding=False)), 1, small_state())
    assert not (tmp_path / "1" / "default" / "_sharding").exists()
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert_same(restored.state, small_state())


def test_write_rate_is_reported_to_the_log_and_to_jax(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, float] = {}
    monkeypatch.setattr(jax.monitoring, "record_scalar", lambda event, value, **_: told.update({event: value}))
    with caplog.at_level(logging.INFO):
        save(engine(tmp_path), 1, {"w": np.zeros(1 << 17)})
    assert told["/jax/orbax/write/gbytes"] == 2**-10
    assert told["/jax/orbax/write/gbytes_per_sec"] > 0
    assert "wrote 1048576 bytes in" in caplog.text


@pytest.mark.long
def test_ten_thousand_leaves_come_back_from_a_handful_of_files(tmp_path: Path) -> None:
    state = {f"l{i}": np.asarray(i) for i in range(10_000)}
    save(engine(tmp_path), 1, state, timeout_s=120.0)
    assert sum(1 for path in (tmp_path / "1").rglob("*") if path.is_file()) < 40
    restored = restore(tmp_path, state)
    assert restored is not None
    assert all(int(restored.state[f"l{i}"]) == i for i in range(10_000))


@pytest.mark.long
def test_one_very_large_leaf_is_written_in_parts(tmp_path: Path) -> None:
    state = {"w": jnp.arange(1 << 25, dtype=jnp.float32)}  # 128 MiB
    checkpointer = engine(tmp_path)
    checkpointer.save_in_background(1, state, {})
    checkpointer.close(60)
    assert len(list((tmp_path / "1" / "default" / "w").glob("[0-9]*"))) == 2
    restored = restore(tmp_path, {"w": jax.ShapeDtypeStruct((1 << 25,), jnp.float32)})
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], state["w"])


def _broken(*_: Any) -> None:
    raise OSError(5, "Input/output error")
