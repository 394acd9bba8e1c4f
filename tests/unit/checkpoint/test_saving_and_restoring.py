"""What is saved comes back bit for bit, however it was saved."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint import WriteOptions
from gracepoint.errors import CheckpointError, CheckpointMismatch, HostStateLost, SaveFailed, SettingsError
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    rich_state,
    save,
    sharding,
    small_state,
)
from tests.unit.checkpoint.fakes.transfer_recorder import AtWrites
from tests.waiting import until_no_thread

pytestmark = pytest.mark.integration


def test_an_emergency_save_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = rich_state()
    saved = save(engine(tmp_path), 3, state)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert (saved.step, restored.step) == (3, 3)
    assert_same(restored.state, state)


def test_a_background_save_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = rich_state()
    checkpointer = engine(tmp_path)
    checkpointer.save_in_background(3, state, {})
    checkpointer.close(30)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)


def test_restored_arrays_have_the_placement_of_the_state_they_replace(tmp_path: Path) -> None:
    state = rich_state()
    save(engine(tmp_path), 0, state)
    restored = restore(tmp_path, state)
    assert restored is not None
    for found, like in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        if isinstance(like, jax.Array):
            assert found.sharding == like.sharding
            assert found.committed == like.committed
            assert getattr(found, "weak_type", False) == getattr(like, "weak_type", False)


def test_a_state_is_restored_into_other_shardings(tmp_path: Path) -> None:
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    save(engine(tmp_path), 1, {"w": jax.device_put(values, sharding("x", "y"))})
    for spec in [("y", "x"), (None, ("x", "y")), (("x", "y"),), ()]:
        like = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding(*spec))}
        restored = restore(tmp_path, like)
        assert restored is not None
        assert restored.state["w"].sharding == sharding(*spec)
        np.testing.assert_array_equal(restored.state["w"], values)


def test_typed_keys_are_restored_into_abstract_keys(tmp_path: Path) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(1), 4), sharding("x"))
    save(engine(tmp_path), 1, {"keys": keys})
    restored = restore(tmp_path, {"keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=sharding("y"))})
    assert restored is not None
    assert_same(restored.state, {"keys": keys})


def test_arrays_with_a_transposed_device_layout_are_saved_in_row_order(tmp_path: Path) -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    values = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    form = layout.Format(layout.Layout(major_to_minor=(1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    array = jax.device_put(values, form)
    assert not np.asarray(array).flags.c_contiguous  # otherwise this tests nothing
    save(engine(tmp_path), 1, {"w": array})
    restored = restore(tmp_path, {"w": values})
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], values)


def test_state_may_be_donated_once_the_background_save_began(tmp_path: Path) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    state = {"w": jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), sharding(("x", "y")))}
    checkpointer = engine(tmp_path)
    checkpointer.prepare(state)
    expected = {}
    for number in range(4):
        expected[number] = np.array(state["w"])
        checkpointer.save_in_background(number, state, {})
        old = state
        state = step(state)
        assert old["w"].is_deleted()
    checkpointer.close(30)
    for number in (1, 2, 3):  # keep_last is 3
        assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2", "3"]
        files = sorted((tmp_path / str(number) / "default" / "w").glob("[0-9]*"))
        assert b"".join(f.read_bytes() for f in files) == expected[number].tobytes()


def test_numpy_leaves_may_change_once_the_background_save_began(tmp_path: Path) -> None:
    state = {"w": np.zeros(1 << 20)}
    checkpointer = engine(tmp_path)
    checkpointer.save_in_background(1, state, {})
    state["w"][:] = 1
    checkpointer.close(30)
    restored = restore(tmp_path, state)
    assert restored is not None
    assert not restored.state["w"].any()


def test_host_state_comes_back_as_it_was_when_the_save_began(tmp_path: Path) -> None:
    position = {"epoch": 1, "order": np.arange(3), "rng": (3, (1, 2), None), "raw": b"\x00\xff"}
    checkpointer = engine(tmp_path)
    checkpointer.save_in_background(1, small_state(), {"data": position})
    position["epoch"] = 2
    checkpointer.close(30)
    restored = restore(tmp_path, small_state())
    assert restored is not None
    data = restored.host_state["data"]
    assert (data["epoch"], data["rng"], data["raw"]) == (1, (3, (1, 2), None), b"\x00\xff")
    np.testing.assert_array_equal(data["order"], np.arange(3))


def test_stages_are_reported_in_order(tmp_path: Path) -> None:
    stages: list[str] = []
    save(engine(tmp_path), 1, small_state(), on_stage=stages.append)
    assert stages == ["written", "durable", "committed"]


def test_prepare_returns_the_size_of_the_state_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert engine(tmp_path / "new").prepare(small_state()) == 16 * 4 + 8 * 2 + 8
    assert list((tmp_path / "new").iterdir()) == []


def test_without_background_saves_no_memory_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr("gracepoint.checkpoint.saving.planner.HostSnapshot", lambda *parts, **_: made.append(parts))
    engine(tmp_path).prepare(small_state(), in_background=False)
    assert made == []
    engine(tmp_path).prepare(small_state())
    assert len(made) == 1


def test_process_local_directory_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gracepoint.checkpoint.steps.lease.appears", lambda path, **_: path.exists())
    found = outcomes_in_gang(
        3, lambda gang: engine(tmp_path / f"disk-{gang.process_index // 2}", gang).access.check_shared(timeout_s=30)
    )
    for error in found:
        assert isinstance(error, CheckpointError)
        assert "is not the same storage in all processes: process 2 does not see" in str(error)
    assert list((tmp_path / "disk-0").iterdir()) == []


def test_a_directory_that_all_share_passes_and_is_left_empty(tmp_path: Path) -> None:
    in_gang(2, lambda gang: engine(tmp_path / "shared", gang).access.check_shared(timeout_s=30))
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_directory_that_process_0_cannot_write_to_is_refused_in_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = outcomes_in_gang(2, lambda gang: engine(tmp_path / "file", gang).access.check_shared(timeout_s=30))
    assert all("process 0 cannot write to" in str(error) for error in found)


def test_nothing_is_compiled_in_a_save_once_it_was_prepared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = rich_state()
    # Of shapes that no other test has, so that nothing has been compiled for them.
    state["unseen"] = jax.random.split(jax.random.key(5), 7)
    state["more"] = jax.device_put(jnp.ones((14, 6)), sharding("x", "y"))
    checkpointer = engine(tmp_path)
    checkpointer.prepare(state)
    with jax.log_compiles():
        jax.jit(lambda x: x - 1)(state["more"])
        assert "Compiling" in caplog.text  # else this tests nothing
        caplog.clear()
        save(checkpointer, 1, state)
        checkpointer.save_in_background(2, state, {})
        checkpointer.close(30)
    assert "Compiling" not in caplog.text


def test_the_last_save_is_measured(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path)
    assert checkpointer.executor.last_save is None
    checkpointer.save_in_background(4, small_state(), {})
    checkpointer.executor.wait_until_finished(30)
    last = checkpointer.executor.last_save
    assert last is not None
    assert (last.step, last.bytes) == (4, 16 * 4 + 8 * 2 + 8)
    assert 0 < last.durable_s <= last.committed_s
    assert last.snapshot_s > 0


def test_saving_a_committed_step_again_writes_nothing(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path)
    save(checkpointer, 1, small_state())
    before = (tmp_path / "1").stat()
    stages: list[str] = []
    assert save(checkpointer, 1, small_state(), on_stage=stages.append).step == 1
    assert (tmp_path / "1").stat() == before
    assert stages == ["written", "durable", "committed"]


def test_saving_the_restored_step_again_writes_nothing(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    before = (tmp_path / "1").stat().st_ino
    checkpointer = engine(tmp_path, attempt="job-1-b")
    assert checkpointer.restore(small_state(), timeout_s=30) is not None
    save(checkpointer, 1, small_state())
    assert (tmp_path / "1").stat().st_ino == before


def test_emergency_waits_for_the_background_save_of_its_step(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path)
    checkpointer.save_in_background(5, small_state(), {})
    save(checkpointer, 5, small_state())
    assert checkpointer.executor.last_save is not None
    assert checkpointer.executor.last_save.snapshot_s > 0  # the background save's
    checkpointer.close(30)  # until then, the sweeper may have a file there that shows the time
    assert sorted(p.name for p in tmp_path.iterdir()) == ["5"]


def test_the_leaves_of_a_gang_are_written_by_all_its_processes(tmp_path: Path) -> None:
    state = {f"layer{i}": np.full(1000, i) for i in range(8)}
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 1, state))
    restored = restore(tmp_path, state)
    assert restored is not None
    assert_same(restored.state, state)
    records = [(tmp_path / "1" / f"done.process_{i}.json").read_text() for i in range(2)]
    assert [record.count("/.zarray") for record in records] == [4, 4]


def test_copies_that_differ_between_processes_fail_the_save_in_all(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> Any:
        return save(engine(tmp_path, gang), 1, {"same": 1, "other": gang.process_index})

    outcomes = outcomes_in_gang(2, run)
    for outcome in outcomes:
        assert isinstance(outcome, SaveFailed)
        assert "leaf 'other' is local to each process" in str(outcome)
    assert restore(tmp_path, {"same": 1, "other": 0}) is None


def test_host_state_is_each_process_s_own(tmp_path: Path) -> None:
    in_gang(3, lambda gang: save(engine(tmp_path, gang), 1, small_state(), {"data": gang.process_index * 11}))
    restored = in_gang(3, lambda gang: restore(tmp_path, small_state(), gang=gang))
    assert [r.host_state["data"] for r in restored if r] == [0, 11, 22]


def test_host_state_of_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 1, small_state(), {"data": 1}))
    with pytest.raises(CheckpointMismatch, match=r"host state \(data\) was saved by 2 processes.* into 1"):
        restore(tmp_path, small_state())


def test_a_state_without_host_state_is_restored_by_any_number_of_processes(tmp_path: Path) -> None:
    in_gang(3, lambda gang: save(engine(tmp_path, gang), 1, small_state()))
    restored = in_gang(2, lambda gang: restore(tmp_path, small_state(), gang=gang))
    for one in restored:
        assert one is not None
        assert_same(one.state, small_state())


def test_a_failed_background_save_surfaces_at_the_next_call_in_all_processes(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> list[str]:
        writes = AtWrites(_no_space if gang.process_index == 1 else None)
        checkpointer = engine(tmp_path, gang, options=WriteOptions(callback=writes))
        checkpointer.save_in_background(1, small_state(), {})
        raised = []
        for _ in range(2):
            try:
                checkpointer.executor.wait_until_finished(30)
            except SaveFailed as error:
                raised.append(str(error.__cause__))
        return raised

    others, failed = in_gang(2, run)
    assert len(failed) == 1
    assert "No space left" in failed[0]
    assert len(others) == 1
    assert "process 1 reported" in others[0]
    assert "No space left" in others[0]


def test_an_abandoned_save_does_not_wait_for_peers_that_never_come(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, StoreProcessGroup(InMemoryStore(), 0, 2))
    checkpointer.save_in_background(1, small_state(), {})
    checkpointer.abandon("training broke off", timeout_s=0.1)
    until_no_thread("gracepoint: the save")  # it syncs files first, on a busy disk


def test_an_emergency_continues_after_a_failed_background_save(tmp_path: Path) -> None:
    writes = AtWrites(_no_space)
    checkpointer = engine(tmp_path, options=WriteOptions(callback=writes))
    checkpointer.save_in_background(1, small_state(), {})
    with pytest.raises(SaveFailed):
        checkpointer.executor.wait_until_finished(30)
    writes.act = None
    save(checkpointer, 2, small_state())
    assert restore(tmp_path, small_state()) is not None


def test_a_state_that_one_process_cannot_save_fails_the_save_in_all(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> Any:
        host_state = {"data": object() if gang.process_index == 1 else 1}
        return save(engine(tmp_path, gang), 1, small_state(), host_state)

    other, failed = outcomes_in_gang(2, run)
    assert "host_state['data']: cannot save a value of type object" in str(failed)
    assert isinstance(other, SaveFailed)
    assert "process 1 reported" in str(other)


def test_a_save_that_takes_too_long_says_what_was_missing(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match=r"files were written to .* within 0\.0 s"):
        save(engine(tmp_path), 1, small_state(), timeout_s=0.0)


def test_an_emergency_behind_a_save_that_hangs_ends_with_its_timeout(tmp_path: Path) -> None:
    release = threading.Event()
    checkpointer = engine(tmp_path, options=WriteOptions(callback=AtWrites(lambda: release.wait(30))))
    checkpointer.save_in_background(1, small_state(), {})
    with pytest.raises(SaveFailed, match="the save of step 1 did not end within"):
        save(checkpointer, 2, small_state(), timeout_s=0.05)
    release.set()
    checkpointer.close(30)
    assert [path.name for path in tmp_path.glob("[0-9]")] == ["1"]


def test_a_state_of_another_form_is_planned_again(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path)
    checkpointer.prepare(small_state())
    other = {"w": jnp.ones(5)}
    checkpointer.save_in_background(1, other, {})
    checkpointer.close(30)
    restored = restore(tmp_path, other)
    assert restored is not None
    assert_same(restored.state, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"root": "ftp://host/run"}, r"ftp://", id="unknown scheme"),
        pytest.param({"root": "relative/path"}, "expected an absolute path", id="relative path"),
        pytest.param({"attempt": "../x"}, "attempt '../x'", id="attempt that is a path"),
        pytest.param({"keep_last": 0}, "keep_last is 0; expected at least 1", id="keep nothing"),
    ],
)
def test_wrong_arguments_are_refused_at_once(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:

    options: dict[str, Any] = {"root": tmp_path, **arguments}
    with pytest.raises(SettingsError, match=message):
        engine(**options)


def test_a_file_uri_names_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    checkpointer = engine(f"file://{tmp_path}/with%20space")
    save(checkpointer, 1, small_state())
    assert (folder / "1").is_dir()


def _no_space(*arguments: Any, **options: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("state", [{"a": "text", "b": None}, {"b": {}}, jnp.arange(4.0), 3], ids=str)
@pytest.mark.parametrize("processes", [1, 2])
def test_states_without_arrays_and_of_a_single_leaf_come_back(tmp_path: Path, state: Any, processes: int) -> None:
    in_gang(processes, lambda gang: save(engine(tmp_path, gang), 1, state, {"seed": 1}))
    for restored in in_gang(processes, lambda gang: restore(tmp_path, state, gang=gang)):
        assert restored is not None
        assert_same(restored.state, state)


def test_a_host_state_that_an_emergency_lost_stays_lost_with_another_number_of_processes(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> Any:
        lost = HostStateLost("the loader was closed")
        return save(
            engine(tmp_path, gang), 1, small_state(), {"data": lost if gang.process_index == 1 else 5, "rng": 7}
        )

    in_gang(2, run)
    reshard: dict[str, Any] = {name: lambda values, index, count: sum(values) for name in ("data", "rng")}
    found = engine(tmp_path).restore(small_state(), timeout_s=30, reshard=reshard)
    assert found is not None
    assert (str(found.host_state["data"]), found.host_state["rng"]) == ("the loader was closed", 14)
    with pytest.raises(HostStateLost, match=r"without host_state 'data' of a process: the loader was closed"):
        engine(tmp_path).restore(small_state(), timeout_s=30, reshard=reshard, required=("data", "rng"))
