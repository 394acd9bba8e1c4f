"""Orbax's own objects and arguments, given to Gracepoint: the same case through both, or a refusal in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import sharding as sharding_metadata
from orbax.checkpoint._src.serialization import types

from gracepoint import checkpoint
from gracepoint.checkpoint import ArrayHandler, AsyncCheckpointer, CheckpointManager, ParamInfo, WriteOptions
from gracepoint.errors import CheckpointRefused
from tests.unit.checkpoint.fakes.engine import assert_same, sharding

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


def state() -> dict[str, Any]:
    return {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")), "n": np.arange(3), "i": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("theirs") / "saved"
    ocp.PyTreeCheckpointer().save(path, state())
    return path


def theirs(path: Path, like: Any, args: Any) -> Any:
    return ocp.PyTreeCheckpointer().restore(path, args=ocp.args.PyTreeRestore(like, restore_args=args))


RESTORE_ARGS = {
    "sharding": lambda: ocp.ArrayRestoreArgs(sharding=sharding("y")),
    "mesh and axes": lambda: ocp.ArrayRestoreArgs(mesh=sharding().mesh, mesh_axes=jax.sharding.PartitionSpec("y")),
    "Orbax's metadata of a sharding": lambda: ocp.ArrayRestoreArgs(
        sharding=sharding_metadata.from_jax_sharding(sharding("y"))
    ),
    "dtype": lambda: ocp.ArrayRestoreArgs(sharding=sharding("x"), dtype=jnp.bfloat16),
    "another shape": lambda: ocp.ArrayRestoreArgs(sharding=sharding(), global_shape=(4, 8), strict=False),
    "numpy": lambda: ocp.RestoreArgs(restore_type=np.ndarray),
    "numpy in another type": lambda: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float16),
}


@pytest.mark.parametrize("make", RESTORE_ARGS.values(), ids=RESTORE_ARGS)
def test_orbax_s_restore_args_give_what_they_give_there(saved: Path, make: Any) -> None:
    args = {"w": make(), "n": ocp.RestoreArgs(), "i": ocp.RestoreArgs()}
    expected, found = theirs(saved, state(), args), checkpoint.restore(saved, restore_args=args)
    assert_same(found, expected)
    if isinstance(expected["w"], jax.Array):
        assert found["w"].sharding.is_equivalent_to(expected["w"].sharding, 2)


def test_orbax_s_restore_args_for_a_whole_state_are_taken(saved: Path) -> None:
    args = ocp.checkpoint_utils.construct_restore_args(state())
    found = checkpoint.restore(saved, state(), restore_args=args)
    assert_same(found, state())
    assert found["w"].sharding == state()["w"].sharding


@pytest.mark.parametrize("one_for_all", [True, False], ids=["one for all", "a tree"])
def test_orbax_s_save_args_are_taken(tmp_path: Path, one_for_all: bool) -> None:
    args: Any = ocp.SaveArgs(dtype=jnp.dtype(jnp.bfloat16), chunk_byte_size=32)
    values = {"a": jnp.arange(64.0), "b": jnp.ones((8, 8))}
    tree = args if one_for_all else dict.fromkeys(values, args)
    checkpoint.save(tmp_path / "ours", values, save_args=tree)
    ocp.PyTreeCheckpointer().save(
        tmp_path / "theirs", args=ocp.args.PyTreeSave(values, save_args=dict.fromkeys(values, args))
    )
    ours, expected = checkpoint.restore(tmp_path / "ours"), checkpoint.restore(tmp_path / "theirs")
    assert_same(ours, expected)
    with AsyncCheckpointer() as checkpointer:
        assert checkpointer.metadata(tmp_path / "ours").tree["a"].chunk_shape == (16,)


def test_save_args_that_ask_for_orbax_s_aggregate_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("save_args: SaveArgs.aggregate is True, and is not supported")):
        checkpoint.save(tmp_path / "ours", {"a": jnp.ones(2)}, save_args=ocp.SaveArgs(aggregate=True))


class Callback:
    """Answers with one priority."""

    def __init__(self, priority: Any) -> None:
        self.priority = priority
        self.written: list[str] = []

    def key_priority(self, keypath: tuple[Any, ...]) -> Any:
        return self.priority

    def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
        pass

    def on_write_end(self, keypath: tuple[Any, ...]) -> None:
        self.written.append(jax.tree_util.keystr(keypath))


@pytest.mark.parametrize(
    "priority", [priority for priority in types.TransferPriority if priority.name != "UNKNOWN"], ids=lambda p: p.name
)
def test_orbax_s_priorities_are_taken(tmp_path: Path, priority: Any) -> None:
    callback = Callback(priority)
    values = {"a": jnp.arange(4.0)}
    checkpointer = AsyncCheckpointer(options=WriteOptions(device_host_max_bytes=1 << 20, callback=callback))
    with checkpointer:
        checkpointer.save(tmp_path / "ours", values)
    assert callback.written == ["['a']"]
    assert_same(checkpoint.restore(tmp_path / "ours"), values)


@pytest.mark.parametrize("priority", [types.TransferPriority.UNKNOWN, None], ids=["UNKNOWN", "None"])
def test_invalid_priority_is_a_value_error_naming_the_leaf(tmp_path: Path, priority: Any) -> None:
    options = WriteOptions(device_host_max_bytes=1 << 20, callback=Callback(priority))
    with AsyncCheckpointer(options=options) as checkpointer, pytest.raises(ValueError, match=r"leaf 'a': key_priority"):
        checkpointer.save(tmp_path / "ours", {"a": jnp.arange(4.0)})
    with pytest.raises(ValueError, match="leaf 'a': key_priority"):
        ArrayHandler(options).serialize([jnp.ones(2)], [ParamInfo("a", tmp_path)])


@pytest.mark.parametrize(
    ("orbax", "ours"),
    [
        (ocp.SaveArgs, checkpoint.SaveArgs),
        (ocp.RestoreArgs, checkpoint.RestoreArgs),
        (ocp.ArrayRestoreArgs, checkpoint.ArrayRestoreArgs),
        (type_handlers.SingleReplicaArrayRestoreArgs, checkpoint.SingleReplicaArrayRestoreArgs),
    ],
    ids=lambda kind: kind.__name__ if kind.__module__.startswith("orbax") else "",
)
def test_arguments_have_orbax_s_names_in_its_order(orbax: Any, ours: Any) -> None:
    refused = {"aggregate"}  # Orbax's old file of small leaves
    names = [name for name in inspect.signature(orbax).parameters if name not in refused]
    assert names == list(inspect.signature(ours).parameters)


def test_every_argument_of_orbaxs_array_handler_is_known() -> None:
    for name, parameter in inspect.signature(type_handlers.ArrayHandler).parameters.items():
        ArrayHandler(**{name: parameter.default})


def test_what_orbax_refuses_with_a_value_error_is_one_here(tmp_path: Path) -> None:
    assert issubclass(CheckpointRefused, ValueError)
    infos = [ParamInfo("a", tmp_path)]
    cases: list[Callable[[], object]] = [
        lambda: ArrayHandler().serialize([jnp.zeros((0, 2))], infos),
        lambda: ArrayHandler().serialize([np.ones(2)], infos),
        lambda: checkpoint.save(tmp_path / "a", {"a": object()}),
        lambda: checkpoint.save(tmp_path / "b", {}),
    ]
    for case in cases:
        with pytest.raises(CheckpointRefused):
            case()


def names_heard(work: Callable[[], None]) -> set[str]:
    """Returns the names of all that ``jax.monitoring`` is told by ``work``, below those that checkpoints have."""
    heard: set[str] = set()

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event.startswith(("/jax/checkpoint/", "/jax/orbax/")):
            heard.add(event)

    jax.monitoring.register_event_listener(listen)
    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.register_scalar_listener(listen)
    try:
        work()
    finally:
        jax.monitoring.unregister_event_listener(listen)
        jax.monitoring.unregister_event_duration_listener(listen)
        jax.monitoring.unregister_scalar_listener(listen)
    return heard


# Names of Orbax that are not recorded here: of parts of its work that there are none of here, or are too short to
# matter, and of its own deprecations.
NOT_RECORDED = {
    "background_directory_creation_secs": "a save makes one folder at its end",
    "async_directory_creation_secs": "a save makes one folder at its end",
    "blocking_directory_creation_secs": "a save makes one folder at its end",
    "directory_creation_secs": "a save makes one folder at its end",
    "background_item_finalize_secs": "part of background_finalize_secs",
    "background_meta_write_secs": "small files are written beside the chunks",
    "metadata_write_duration_secs": "small files are written beside the chunks",
    "background_ocdbt_merge_secs": "part of background_finalize_secs",
    "ocdbt_merge_duration_secs": "part of background_finalize_secs",
    "merge_ocdbt_per_process_files_secs": "part of background_finalize_secs",
    "finalize_duration_secs": "part of total_duration_secs",
    "blocking_gbytes_per_sec": "follows from gbytes and blocking_duration_secs",
    "blocking_tree_map_duration_secs": "planned once for all saves of a form",
    "blocking_val_duration_secs": "planned once for all saves of a form",
    "checkpoint_start_sync_duration_secs": "the processes meet once, at the commit",
    "sharded_array_gb": "of each array; the sum is gbytes",
    "replicated_array_gb": "of each array; the sum is gbytes",
    "start_time": "a time of day; the log has it",
    "blocking_end_time": "a time of day; the log has it",
    "storage_type": "a label of the durations",
    "raw/gbytes": "of TensorStore; requested/gbytes are the values",
    "raw/throughput/gbytes_per_sec": "of TensorStore; requested/throughput is of the values",
    "io/compression_ratio": "of TensorStore",
    "duration_since_last_checkpoint_secs": "the time between two events write/success",
    "get_old_steps_duration_secs": "steps are deleted in the background",
    "old_steps_examined_count": "steps are deleted in the background",
    "remove_steps_duration_secs": "steps are deleted in the background",
    "load_all_step_metadata_duration_secs": "steps are listed when they are asked for",
    "continuous_checkpointing_enabled": "of Orbax's manager",
    "checkpointer/init": "there is one class, AsyncCheckpointer",
    "init/ocdbt": "of Orbax's handlers",
    "deserialize/shard_shape_changed": "of Orbax's way to restore",
    "deprecation/checkpointer_legacy_args": "of Orbax's own interface",
}


def test_each_metric_of_orbax_is_recorded_or_has_a_reason(tmp_path: Path) -> None:
    def with_orbax() -> None:
        with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / "theirs", state())
            checkpointer.wait_until_finished()
            checkpointer.restore(tmp_path / "theirs")
        ocp.PyTreeCheckpointer().save(tmp_path / "now", state())
        type_handlers.ArrayHandler()
        with ocp.CheckpointManager(tmp_path / "steps of theirs") as manager:
            manager.save(1, args=ocp.args.StandardSave(state()))

    def with_gracepoint() -> None:
        with AsyncCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "ours", state())
            checkpointer.wait_until_finished()
            checkpointer.restore(tmp_path / "ours")
            checkpointer.save_and_wait(tmp_path / "ours now", state())
        ArrayHandler()
        with CheckpointManager(tmp_path / "steps") as manager:
            manager.save(1, state())

    ours, theirs = names_heard(with_gracepoint), names_heard(with_orbax)
    reference = {"/jax/orbax/array_handler/init"}  # of the version that the names were taken from
    own = {"/jax/checkpoint/write/async/bytes"}
    assert ours - theirs - reference == own
    assert [name for name in theirs - ours if not name.endswith(tuple(NOT_RECORDED))] == []
    assert len(ours) > 30


def test_time_of_a_blocked_caller_is_recorded_by_what_it_waited_for(tmp_path: Path) -> None:
    told: dict[str, float] = {}

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        told[event.removeprefix("/jax/orbax/write/")] = duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with AsyncCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "a", state())
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    parts = told["blocking_wait_prev_duration_secs"], told["blocking_d2h_duration_secs"]
    assert min(parts) > 0
    assert sum(parts) <= told["async/blocking_duration_secs"]
    whole = told["background_ts_duration_secs"] + told["background_finalize_secs"]
    assert whole == pytest.approx(told["background_duration_secs"])
