"""Every class of arguments that docs/from-orbax.md names, Orbax's own, given to every entry that takes arguments."""

from __future__ import annotations

import types
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

import gracepoint
from gracepoint import checkpoint
from gracepoint.checkpoint import (
    ArrayHandler,
    AsyncCheckpointer,
    CheckpointManager,
    HandlerRegistry,
    NumpyHandler,
    ParamInfo,
    RestoreOptions,
    ScalarHandler,
    SingleReplicaArrayHandler,
    StringHandler,
)
from gracepoint.checkpoint.restoring import readers
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointMismatch, CheckpointRefused
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from tests.unit.checkpoint.fakes.engine import assert_same, sharding

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

SEVERAL = jax.device_count() > 1
VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)
ORBAX = types.SimpleNamespace(
    SaveArgs=ocp.SaveArgs,
    RestoreArgs=ocp.RestoreArgs,
    ArrayRestoreArgs=ocp.ArrayRestoreArgs,
    SingleReplicaArrayRestoreArgs=type_handlers.SingleReplicaArrayRestoreArgs,
)
has_replicas = pytest.mark.skipif(not SEVERAL, reason="one device is one replica: it has nothing to hand anything to")
distinct_shardings = pytest.mark.skipif(not SEVERAL, reason="on one device all shardings are the same")
CLASSES = {"Orbax's": ORBAX, "Gracepoint's": checkpoint}


def weights() -> jax.Array:
    return jax.device_put(jnp.asarray(VALUES), sharding("x"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    checkpoint.save(root / "tree", {"w": weights()})
    with CheckpointManager(root / "steps") as manager:
        manager.save(1, {"w": weights()})
    for future in ArrayHandler().serialize([weights()], [ParamInfo("w", root / "leaves")]):
        future.result(timeout=60)
    return root


def by_checkpointer(root: Path, **call: Any) -> Any:
    with AsyncCheckpointer() as checkpointer:
        return checkpointer.restore(root / "tree", **call)["w"]


def by_manager(root: Path, **call: Any) -> Any:
    with CheckpointManager(root / "steps") as manager:
        found = manager.restore(1, **call)
    return found["w"] if isinstance(found, dict) else found.state["w"]


def by_composite(root: Path, args: Any) -> Any:
    with CheckpointManager(root / "steps") as manager:
        return manager.restore(1, args=ocp.args.Composite(default=pytree_restore(args))).default["w"]


def by_session(root: Path, args: Any) -> Any:
    with gracepoint.attach(root / "steps") as session:
        return session.restore({"w": weights()}, restore_args={"w": args})[0]["w"]


def pytree_restore(args: Any, **more: Any) -> Any:
    return ocp.args.PyTreeRestore(restore_args={"w": args}, **more)


def by_handler(kind: Callable[[], Any]) -> Callable[[Path, Any], Any]:
    return lambda root, args: kind().deserialize([ParamInfo("w", root / "leaves")], [args])[0]


RESTORES: dict[str, Callable[[Path, Any], Any]] = {
    "restore": lambda root, args: checkpoint.restore(root / "tree", restore_args={"w": args})["w"],
    "restore, for all leaves": lambda root, args: checkpoint.restore(root / "tree", restore_args=args)["w"],
    "AsyncCheckpointer": lambda root, args: by_checkpointer(root, restore_args={"w": args}),
    "AsyncCheckpointer, PyTreeRestore": lambda root, args: by_checkpointer(root, args=pytree_restore(args)),
    "PyTreeRestore with an item": lambda root, args: by_checkpointer(root, args=pytree_restore(args, item={"w": 0})),
    "PyTreeRestore with transforms": lambda root, args: by_checkpointer(
        root, args=pytree_restore(args, item={"w": 0}, transforms={})
    ),
    "CheckpointManager": lambda root, args: by_manager(root, restore_args={"w": args}),
    "CheckpointManager, PyTreeRestore": lambda root, args: by_manager(root, args=pytree_restore(args)),
    "CheckpointManager, Composite": by_composite,
    "ArrayHandler": by_handler(ArrayHandler),
}

# What is asked for by a class of arguments, and the values and the sharding that it must give.
ASKED: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "sharding": (lambda of: of.ArrayRestoreArgs(sharding=sharding("y")), VALUES, sharding("y")),
    "a recorded sharding": (
        lambda of: of.ArrayRestoreArgs(sharding=sharding_metadata.from_jax_sharding(sharding("y"))),
        VALUES,
        sharding("y"),
    ),
    "mesh and axes": (
        lambda of: of.ArrayRestoreArgs(mesh=sharding().mesh, mesh_axes=jax.sharding.PartitionSpec("y")),
        VALUES,
        sharding("y"),
    ),
    "a smaller shape": (
        lambda of: of.ArrayRestoreArgs(sharding=sharding(), global_shape=(4, 8), strict=False),
        VALUES[:4],
        sharding(),
    ),
    "a larger shape": (
        lambda of: of.ArrayRestoreArgs(sharding=sharding("x"), shape=(10, 8), strict=False),
        np.pad(VALUES, ((0, 2), (0, 0))),
        sharding("x"),
    ),
    "dtype": (
        lambda of: of.ArrayRestoreArgs(sharding=sharding("y"), dtype=jnp.float16),
        VALUES.astype(np.float16),
        sharding("y"),
    ),
    "dtype alone": (lambda of: of.RestoreArgs(dtype=jnp.float16), VALUES.astype(np.float16), sharding("x")),
    "numpy": (lambda of: of.RestoreArgs(restore_type=np.ndarray), VALUES, None),
    "numpy and dtype": (
        lambda of: of.RestoreArgs(restore_type=np.ndarray, dtype=np.int32),
        VALUES.astype(np.int32),
        None,
    ),
    "nothing": (lambda of: of.RestoreArgs(), VALUES, sharding("x")),
}
OF_ONE_REPLICA: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "one replica": (lambda of: of.SingleReplicaArrayRestoreArgs(sharding=sharding("y")), VALUES, sharding("y")),
    "one replica and dtype": (
        lambda of: of.SingleReplicaArrayRestoreArgs(sharding=sharding("y"), dtype=jnp.float16),
        VALUES.astype(np.float16),
        sharding("y"),
    ),
    "the devices of one replica": (
        lambda of: of.SingleReplicaArrayRestoreArgs(
            sharding=sharding("y"), single_replica_sharding=sharding_metadata.from_jax_sharding(second_replica())
        ),
        VALUES,
        sharding("y"),
    ),
}


def one_device() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))


def second_replica() -> jax.sharding.NamedSharding:
    every = sharding().mesh
    mesh = jax.sharding.Mesh(every.devices[-1:], every.axis_names, axis_types=every.axis_types)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y"))


@pytest.mark.parametrize("of", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize(
    ("make", "values", "where"),
    [pytest.param(*asked, id=name) for name, asked in ASKED.items()]
    + [pytest.param(*asked, id=name, marks=has_replicas) for name, asked in OF_ONE_REPLICA.items()],
)
@pytest.mark.parametrize("restore", RESTORES.values(), ids=RESTORES)
def test_every_entry_gives_what_the_arguments_ask_for(
    saved: Path, restore: Callable[[Path, Any], Any], make: Callable[[Any], Any], values: Any, where: Any, of: Any
) -> None:
    found = restore(saved, make(of))
    assert isinstance(found, np.ndarray if where is None else jax.Array)
    assert (found.dtype, np.asarray(found).tolist()) == (values.dtype, values.tolist())
    assert where is None or (isinstance(found, jax.Array) and found.sharding.is_equivalent_to(where, 2))


def test_a_session_gives_what_orbax_s_arguments_ask_for(saved: Path) -> None:
    found = by_session(saved, ocp.ArrayRestoreArgs(sharding=sharding("y"), global_shape=(4, 8), strict=False))
    assert (found.sharding, np.asarray(found).tolist()) == (sharding("y"), VALUES[:4].tolist())


@pytest.mark.parametrize("restore", RESTORES.values(), ids=RESTORES)
def test_no_entry_says_that_no_sharding_was_given_where_one_was(
    saved: Path, restore: Callable[[Path, Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    restore(saved, ocp.ArrayRestoreArgs(sharding=sharding("y")))
    assert "as none were given" not in caplog.text


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another shape": (
        lambda: ocp.ArrayRestoreArgs(sharding=sharding(), global_shape=(4, 8)),
        CheckpointMismatch,
        r"leaf 'w': expected float32\[4, 8\]",
    ),
    "two shardings": (
        lambda: ocp.ArrayRestoreArgs(
            mesh=sharding().mesh, mesh_axes=jax.sharding.PartitionSpec("y"), sharding=sharding("x")
        ),
        CheckpointRefused,
        r"leaf 'w': mesh and mesh_axes say sharded \(y\) .*, and sharding says sharded \(x\)",
    ),
    "no sharding": (
        lambda: ocp.ArrayRestoreArgs(sharding=jax.sharding.PartitionSpec("y")),
        CheckpointRefused,
        "leaf 'w': expected a jax.sharding.Sharding, found",
    ),
    "a sharding of more axes": (
        lambda: ocp.ArrayRestoreArgs(sharding=sharding("x", None, "y")),
        CheckpointRefused,
        r"leaf 'w': no array of shape \[8, 8\] can have",
    ),
    "a sharding of more axes, on one device": (
        lambda: ocp.ArrayRestoreArgs(sharding=jax.sharding.NamedSharding(one_device(), sharding("x", None, "y").spec)),
        CheckpointRefused,
        r"leaf 'w': no array of shape \[8, 8\] can have",
    ),
    "no arguments": (lambda: {"dtype": 1}, CheckpointRefused, "expected RestoreArgs, found a"),
}


@pytest.mark.parametrize("restore", ["restore", "CheckpointManager", "ArrayHandler"])
@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        pytest.param(*refused, id=name, marks=distinct_shardings if name == "two shardings" else ())
        for name, refused in REFUSED.items()
    ],
)
def test_every_entry_refuses_in_words_what_it_cannot_give(
    saved: Path, restore: str, make: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    if restore != "ArrayHandler" and message.startswith("expected RestoreArgs"):
        message = "restore_args.*" + message.removesuffix(", found a")
    with pytest.raises(kind, match=message):
        RESTORES[restore](saved, make())


@has_replicas
@pytest.mark.parametrize("of", CLASSES.values(), ids=CLASSES)
def test_the_handler_of_one_replica_takes_its_arguments(saved: Path, of: Any) -> None:
    restore = by_handler(SingleReplicaArrayHandler)
    found = restore(saved, of.SingleReplicaArrayRestoreArgs(sharding=sharding("y"), dtype=jnp.float16))
    assert (found.sharding, np.asarray(found).tolist()) == (sharding("y"), VALUES.tolist())
    assert found.dtype == jnp.float16
    with pytest.raises(CheckpointRefused, match="expected SingleReplicaArrayRestoreArgs, found ArrayRestoreArgs"):
        restore(saved, of.ArrayRestoreArgs(sharding=sharding("y")))


@has_replicas
def test_what_is_set_on_the_handler_of_one_replica_counts(saved: Path) -> None:
    handler = SingleReplicaArrayHandler(0, 1, 1 << 20, 0.5)
    names = ("replica_axis_index", "primary_replica_id", "broadcast_memory_limit_bytes")
    assert [getattr(handler, name) for name in (*names, "broadcast_memory_scaling_factor")] == [0, 1, 1 << 20, 0.5]
    handler.replica_axis_index = 1  # the values are sharded along it
    args = ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=sharding("y"))
    with pytest.raises(ValueError, match="sharded over axis 'y', along which there should be replicas"):
        handler.deserialize([ParamInfo("w", saved / "leaves")], [args])


@pytest.mark.parametrize("of", CLASSES.values(), ids=CLASSES)
def test_replicas_take_no_turns_where_the_arguments_name_one_that_reads(
    monkeypatch: pytest.MonkeyPatch, saved: Path, of: Any
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gang, options = StoreProcessGroup(InMemoryStore(), 0, 2), RestoreOptions(read_once=True)
    for args, expected in ((of.SingleReplicaArrayRestoreArgs(), False), (of.ArrayRestoreArgs(), True)):
        assert readers.may_be_taken(gang, storage_path(saved), {"w": args}, options) == expected


def written(handler: Any, folder: Path, value: Any, args: Any = None) -> list[ParamInfo]:
    infos = [ParamInfo("w", folder)]
    for future in handler.serialize([value], infos, args):
        future.result(timeout=60)
    return infos


@pytest.mark.parametrize("of", CLASSES.values(), ids=CLASSES)
def test_handlers_of_other_types_take_the_classes_too(tmp_path: Path, of: Any) -> None:
    numpy, scalar, string = NumpyHandler(), ScalarHandler(), StringHandler()
    infos = written(numpy, tmp_path / "numpy", np.arange(8), [of.SaveArgs(dtype=np.dtype(np.int16), chunk_byte_size=8)])
    assert (numpy.metadata(infos)[0].dtype, numpy.metadata(infos)[0].chunk_shape) == (np.int16, (4,))
    assert_same(numpy.deserialize(infos, [of.RestoreArgs(dtype=np.float32)]), [np.arange(8, dtype=np.float32)])
    args = of.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding("x"), global_shape=(10,), strict=False)
    (placed,) = numpy.deserialize(infos, [args])
    assert (placed.sharding, placed.tolist()) == (sharding("x"), [*range(8), 0, 0])

    infos = written(scalar, tmp_path / "scalar", 3, [of.SaveArgs()])
    for kind in (int, float, bool, np.float32, np.int8, jnp.bfloat16.dtype.type):
        (number,) = scalar.deserialize(infos, [of.RestoreArgs(restore_type=kind)])
        assert (type(number), number) == (kind, kind(3))
    with pytest.raises(CheckpointRefused, match="cannot restore into .*numpy.number"):
        scalar.deserialize(infos, [of.RestoreArgs(restore_type=np.number)])

    infos = written(string, tmp_path / "string", "text", [of.SaveArgs()])
    assert string.deserialize(infos, [of.RestoreArgs()]) == ["text"]
    assert string.deserialize(infos, [of.RestoreArgs(restore_type=str)]) == ["text"]
    for refused in (of.RestoreArgs(dtype=np.int8), of.ArrayRestoreArgs(sharding=sharding())):
        with pytest.raises(CheckpointRefused, match="leaf 'w': strings are restored as str"):
            string.deserialize(infos, [refused])
    with pytest.raises(CheckpointRefused, match="leaf 'w': strings have neither type nor chunks"):
        string.serialize(["text"], infos, [of.SaveArgs(chunk_byte_size=8)])


def test_a_number_that_the_type_cannot_hold_is_not_wrapped(tmp_path: Path) -> None:
    infos = written(ScalarHandler(), tmp_path / "scalar", 300)
    with pytest.raises(CheckpointMismatch, match="leaf 'w': 300 is no int8"):
        ScalarHandler().deserialize(infos, [ocp.RestoreArgs(restore_type=np.int8)])
    checkpoint.save(tmp_path / "tree", {"w": 300, "f": np.float32(0.5)})
    like = {"w": np.int64(0), "f": np.float32(0)}
    args = {name: ocp.RestoreArgs(restore_type=type(leaf)) for name, leaf in like.items()}
    assert_same(checkpoint.restore(tmp_path / "tree", restore_args=args), {"w": np.int64(300), "f": np.float32(0.5)})
    assert_same(
        checkpoint.restore(tmp_path / "tree", like, restore_args=args), {"w": np.int64(300), "f": np.float32(0.5)}
    )


def test_orbax_s_param_info_is_refused_as_its_flags_would_be_ignored(tmp_path: Path) -> None:
    info: Any = type_handlers.ParamInfo(name="w", parent_dir=tmp_path, use_zarr3=True)
    handlers: list[tuple[Any, Any]] = [
        (ArrayHandler(), jnp.ones(2)),
        (NumpyHandler(), np.ones(2)),
        (StringHandler(), "text"),
    ]
    for handler, value in handlers:
        with pytest.raises(CheckpointRefused, match="leaf 'w': expected a gracepoint.checkpoint.ParamInfo"):
            handler.serialize([value], [info])
        with pytest.raises(CheckpointRefused, match="leaf 'w': expected a gracepoint.checkpoint.ParamInfo"):
            handler.deserialize([info])


SAVE_ARGS = {"chunk_byte_size": 32, "dtype": jnp.dtype(jnp.float16), "shard_axes": (1,)}


def save_now(root: Path, args: Any) -> Path:
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save_and_wait(root / "saved", {"w": weights()}, save_args={"w": args})
    return root / "saved"


def save_later(root: Path, **call: Any) -> Path:
    with AsyncCheckpointer() as checkpointer:
        checkpointer.prepare({"w": weights()}, save_args={"w": ORBAX.SaveArgs(**SAVE_ARGS)})
        checkpointer.save(root / "saved", **call)
    return root / "saved"


def save_step(root: Path, **call: Any) -> Path:
    with CheckpointManager(root) as manager:
        manager.save(1, **call)
    return root / "1"


def save_leaf(root: Path, args: Any) -> Path:
    written(ArrayHandler(), root / "saved", weights(), [args])
    return root / "saved"


def pytree_save(args: Any) -> Any:
    return ocp.args.PyTreeSave({"w": weights()}, save_args={"w": args})


SAVES: dict[str, Callable[[Path, Any], Path]] = {
    "save_and_wait": save_now,
    "save": lambda root, args: save_later(root, tree={"w": weights()}, save_args={"w": args}),
    "save, for all leaves": lambda root, args: save_later(root, tree={"w": weights()}, save_args=args),
    "save, PyTreeSave": lambda root, args: save_later(root, args=pytree_save(args)),
    "CheckpointManager": lambda root, args: save_step(root, tree={"w": weights()}, save_args={"w": args}),
    "CheckpointManager, PyTreeSave": lambda root, args: save_step(root, args=pytree_save(args)),
    "CheckpointManager, Composite": lambda root, args: save_step(
        root, args=ocp.args.Composite(default=pytree_save(args))
    ),
    "ArrayHandler": save_leaf,
}


@pytest.mark.parametrize("of", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_every_entry_saves_what_save_args_ask_for(tmp_path: Path, save: Callable[[Path, Any], Path], of: Any) -> None:
    path = save(tmp_path, of.SaveArgs(**SAVE_ARGS))
    if save is save_leaf:
        (found,) = ArrayHandler().metadata([ParamInfo("w", path)])
    else:
        with AsyncCheckpointer() as checkpointer:
            found = checkpointer.metadata(path).tree["w"]
    # A shard is 4 x 8, or 8 x 8 on one device. 32 bytes hold 16 values of float16, and the second axis is cut.
    chunk = (4, 4) if SEVERAL else (8, 2)
    assert (found.dtype, found.shape, found.chunk_shape) == (jnp.float16, (8, 8), chunk)


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_every_entry_refuses_save_args_that_ask_for_the_aggregate_file(
    tmp_path: Path, save: Callable[[Path, Any], Path]
) -> None:
    with pytest.raises(CheckpointRefused, match="SaveArgs.aggregate is True, and is not supported"):
        save(tmp_path, ocp.SaveArgs(aggregate=True))


class Note:
    """A type of a user's own."""


class NoteHandler(StringHandler):
    """Notes are strings; keeps the arguments that it is given."""

    typestr = "note"

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        self.given += args
        for info in infos:
            info.path.mkdir(parents=True)
            (info.path / "note").write_text("x")
        return []

    def deserialize(self, infos: Any, args: Any = None) -> Any:
        self.given += args
        return [Note() for _ in infos]


def test_handlers_of_the_user_s_own_are_given_gracepoint_s_classes(tmp_path: Path) -> None:
    handler, handlers = NoteHandler(), HandlerRegistry()
    handlers.add(Note, handler)
    tree = {"note": Note(), "w": weights()}
    checkpoint.save(
        tmp_path / "a",
        tree,
        save_args={"note": ocp.SaveArgs(chunk_byte_size=9), "w": ocp.SaveArgs()},
        handlers=handlers,
    )
    args = {"note": ocp.RestoreArgs(dtype=np.int8)}
    checkpoint.restore(tmp_path / "a", restore_args=args, handlers=handlers)
    assert handler.given == [checkpoint.SaveArgs(chunk_byte_size=9), checkpoint.RestoreArgs(dtype=np.int8)]
