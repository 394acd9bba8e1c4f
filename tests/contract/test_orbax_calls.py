"""Orbax's form of a call, its items and its custom metadata: as in Orbax, between both, or refused in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import AsyncCheckpointer, CheckpointManager
from gracepoint.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointRefused, SaveFailed, SettingsError
from tests.unit.checkpoint.fakes.engine import assert_same, flip_bit, sharding

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

CUSTOM = {"run": "a", "numbers": [1, 2.5, None], "nested": {"ü": True}}


def state() -> dict[str, Any]:
    return {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")), "n": np.arange(3), "i": 3}


class Iterator:
    """A data loader's iterator, which saves and restores its position in each process."""

    def __init__(self, position: int = 0) -> None:
        self.position = position


class IteratorHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """A handler as data loaders have it for Orbax: a file for each process."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json").write_text(
            json.dumps({"position": args.item.position})
        )

    def restore(self, directory: Any, args: Any) -> Any:
        text = (directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json").read_text()
        args.item.position = json.loads(text)["position"]
        return args.item


@ocp.args.register_with_handler(IteratorHandler, for_save=True, for_restore=True)
class IteratorArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """The arguments of ``IteratorHandler``."""

    def __init__(self, item: Iterator) -> None:
        self.item = item


SAVES: dict[str, Callable[[Any], Any]] = {
    "StandardSave": lambda tree: ocp.args.StandardSave(tree),
    "PyTreeSave": lambda tree: ocp.args.PyTreeSave(tree),
    "with save_args": lambda tree: ocp.args.PyTreeSave(tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), tree)),
}
RESTORES: dict[str, Callable[[Any], Any]] = {
    "StandardRestore": lambda like: ocp.args.StandardRestore(like),
    "StandardRestore of all": lambda like: ocp.args.StandardRestore(),
    "PyTreeRestore": lambda like: ocp.args.PyTreeRestore(
        like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
    ),
    "numbers in the place of arrays": lambda like: ocp.args.PyTreeRestore(
        dict.fromkeys(like, 0), restore_args=ocp.checkpoint_utils.construct_restore_args(like)
    ),
    "numbers without arguments": lambda like: ocp.args.PyTreeRestore(dict.fromkeys(like, 0)),
    "part of the tree": lambda like: ocp.args.PyTreeRestore({"w": like["w"]}, partial_restore=True),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "in the background"])
def test_the_same_call_saves_as_in_orbax(tmp_path: Path, save: Callable[[Any], Any], waits: bool) -> None:
    with AsyncCheckpointer() as checkpointer:
        (checkpointer.save_and_wait if waits else checkpointer.save)(tmp_path / "ours", args=save(state()))
    assert_same(ocp.PyTreeCheckpointer().restore(tmp_path / "ours"), state())


@pytest.mark.parametrize("by_position", [True, False], ids=["by position", "args="])
@pytest.mark.parametrize("make", RESTORES.values(), ids=RESTORES)
def test_the_same_call_restores_as_in_orbax(tmp_path: Path, make: Callable[[Any], Any], by_position: bool) -> None:
    checkpoint.save(tmp_path / "ours", state())
    args = make(state())
    kind = ocp.PyTreeCheckpointHandler if isinstance(args, ocp.args.PyTreeRestore) else ocp.StandardCheckpointHandler
    with ocp.Checkpointer(kind()) as theirs, AsyncCheckpointer() as ours:
        found = ours.restore(tmp_path / "ours", args) if by_position else ours.restore(tmp_path / "ours", args=args)
        assert_same(found, theirs.restore(tmp_path / "ours", args=args))


def test_shapes_that_differ_are_cut_and_filled_where_orbax_is_not_strict(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ours", state())
    like = state() | {"w": jax.ShapeDtypeStruct((4, 16), np.float32, sharding=sharding())}
    args = ocp.args.StandardRestore(like, strict=False)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as theirs, AsyncCheckpointer() as ours:
        assert_same(ours.restore(tmp_path / "ours", args=args), theirs.restore(tmp_path / "ours", args=args))
        with pytest.raises(ValueError, match="leaf 'w'"):
            ours.restore(tmp_path / "ours", args=ocp.args.StandardRestore(like))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "twice": (lambda: {"tree": state(), "args": ocp.args.StandardSave(state())}, "tree= and args= are both given"),
    "no arguments": (lambda: {"args": state()}, "args: expected arguments of Orbax"),
    "of a restore": (lambda: {"args": ocp.args.StandardRestore()}, "args: expected StandardSave or PyTreeSave"),
    "of json": (lambda: {"args": ocp.args.JsonSave({})}, "args: expected StandardSave or PyTreeSave, found a JsonSave"),
    "Composite": (
        lambda: {"args": ocp.args.Composite(default=ocp.args.StandardSave(state()))},
        "a Composite has items, and a checkpoint with its own path has none",
    ),
    "size of data files": (
        lambda: {"args": ocp.args.PyTreeSave(state(), ocdbt_target_data_file_size=5)},
        "WriteOptions(ocdbt_target_data_file_bytes=5)",
    ),
    "metadata twice": (
        lambda: {"args": ocp.args.StandardSave(state(), custom_metadata=CUSTOM), "custom_metadata": CUSTOM},
        "custom_metadata is given twice",
    ),
    "metadata no dict": (lambda: {"tree": state(), "custom_metadata": [1]}, "custom_metadata: expected a dict"),
    "metadata no JSON": (lambda: {"tree": state(), "custom_metadata": {"a": object()}}, "expected a dict of JSON"),
    "metadata with numbers": (lambda: {"tree": state(), "custom_metadata": {1: 2}}, "with strings as keys"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_save_that_is_not_supported_is_refused_in_words(
    tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    with AsyncCheckpointer() as checkpointer:
        with pytest.raises(CheckpointRefused) as caught:
            checkpointer.save(tmp_path / "ours", **make())
        assert message in str(caught.value)
        assert not list(tmp_path.iterdir())
        checkpointer.save(tmp_path / "ours", state())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (ocp.args.PyTreeRestore(legacy_transform_fn=lambda *_: None), "legacy_transform_fn is not supported"),
        (ocp.args.StandardSave({}), "args: expected StandardRestore or PyTreeRestore"),
        (ocp.args.StandardRestore(fallback_sharding=sharding()), "fallback_sharding is not supported"),
    ],
    ids=["a function for old trees", "of a save", "a sharding for all"],
)
def test_a_restore_that_is_not_supported_is_refused_in_words(tmp_path: Path, args: Any, message: str) -> None:
    checkpoint.save(tmp_path / "ours", state())
    with AsyncCheckpointer() as checkpointer, pytest.raises(CheckpointRefused, match=message):
        checkpointer.restore(tmp_path / "ours", args=args)


def test_custom_metadata_goes_both_ways_at_a_path(tmp_path: Path) -> None:
    with ocp.PyTreeCheckpointer() as theirs, AsyncCheckpointer() as ours:
        theirs.save(tmp_path / "theirs", state(), custom_metadata=CUSTOM)
        theirs.save(tmp_path / "of the tree", args=ocp.args.PyTreeSave(state(), custom_metadata=CUSTOM))
        ours.save(tmp_path / "ours", state(), custom_metadata=CUSTOM)
        ours.save(tmp_path / "by args", args=ocp.args.PyTreeSave(state(), custom_metadata=CUSTOM))
        checkpoint.save(tmp_path / "at once", state(), custom_metadata=CUSTOM)
        checkpoint.save(tmp_path / "none", state())
        for path in sorted(tmp_path.iterdir()):
            expected = {} if path.name == "none" else CUSTOM
            assert ours.metadata(path).custom_metadata == expected, path
            found = theirs.metadata(path)
            if path.name not in ("theirs", "of the tree"):
                assert (found.custom_metadata, found.item_metadata.custom_metadata) == (expected, expected or None)
                assert checkpoint.verify(path).damage == ()
            assert_same(checkpoint.restore(path), state())


def test_custom_metadata_and_items_go_to_orbax_s_manager_and_back(tmp_path: Path) -> None:
    handlers: Any = {"iter": IteratorHandler(), "json": ocp.JsonCheckpointHandler()}
    with CheckpointManager(tmp_path / "ours", item_name="items", item_handlers=handlers) as ours:
        items = {"iter": IteratorArgs(Iterator(7)), "json": ocp.args.JsonSave({"a": [1, "b"]})}
        ours.save(3, state(), items=items, custom_metadata=CUSTOM)
        ours.wait_until_finished()
        assert ours.metadata(3).custom_metadata == CUSTOM
    with ocp.CheckpointManager(tmp_path / "ours", item_names=("items", "iter", "json")) as theirs:
        found = theirs.restore(
            3,
            args=ocp.args.Composite(
                items=ocp.args.PyTreeRestore(state()), iter=IteratorArgs(Iterator()), json=ocp.args.JsonRestore()
            ),
        )
        assert_same(found["items"], state())
        assert (found["iter"].position, found["json"]) == (7, {"a": [1, "b"]})
        assert theirs.metadata(3).custom_metadata == CUSTOM
    assert checkpoint.verify(tmp_path / "ours" / "3").damage == ()


MANAGERS: dict[str, Callable[[Path], Any]] = {
    "Orbax": lambda path: ocp.CheckpointManager(path, item_names=("items", "iter")),
    "Gracepoint": lambda path: CheckpointManager(path, item_name="items", item_handlers={"iter": IteratorHandler()}),
}


@pytest.mark.parametrize("reader", MANAGERS)
@pytest.mark.parametrize("writer", MANAGERS)
def test_a_loop_in_maxtext_s_form_saves_and_restores_with_both(tmp_path: Path, writer: str, reader: str) -> None:
    with MANAGERS[writer](tmp_path / "run") as manager:
        for step in (1, 2):
            args = ocp.args.Composite(items=ocp.args.PyTreeSave(item=state()), iter=IteratorArgs(Iterator(step)))
            assert manager.save(step, args=args)
        manager.wait_until_finished()
    with MANAGERS[reader](tmp_path / "run") as manager:
        assert manager.latest_step() == 2
        args = ocp.args.Composite(
            items=ocp.args.PyTreeRestore(
                item=state(), restore_args=ocp.checkpoint_utils.construct_restore_args(state())
            ),
            iter=IteratorArgs(Iterator()),
        )
        found = manager.restore(1, args=args)
        assert_same(found["items"], state())
        assert found["iter"].position == 1
        only = manager.restore(2, args=ocp.args.Composite(items=ocp.args.PyTreeRestore(state())))
        assert list(only) == ["items"]


def test_the_only_tree_of_orbax_s_step_is_the_state(tmp_path: Path) -> None:
    with MANAGERS["Orbax"](tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(items=ocp.args.StandardSave(state()), iter=IteratorArgs(Iterator())))
        manager.wait_until_finished()
    assert checkpoint.all_steps(tmp_path) == [1]
    with CheckpointManager(tmp_path) as ours:
        assert_same(ours.restore(like=state()).state, state())
        assert ours.metadata(1).by_orbax
        assert ours.restore(args=ocp.args.StandardRestore())["i"] == 3
    assert_same(checkpoint.restore(tmp_path / "1"), state())


def test_of_several_trees_the_one_that_is_named_is_the_state(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path, item_names=("params", "more")) as manager:
        args = {"params": ocp.args.StandardSave(state()), "more": ocp.args.StandardSave({"a": 1})}
        manager.save(1, args=ocp.args.Composite(**args))
        manager.wait_until_finished()
    with CheckpointManager(tmp_path, item_name="params") as ours:
        assert_same(ours.restore(like=state()).state, state())
        assert set(ours.metadata(1).tree) == set(state())
    with CheckpointManager(tmp_path) as ours, pytest.raises(CheckpointCorrupt, match="and several other items"):
        ours.restore(like=state())


ITEMS_REFUSED: dict[str, tuple[Callable[[CheckpointManager], Any], type[Exception], str]] = {
    "no handler": (lambda m: m.save(1, state(), items={"a": 1}), CheckpointRefused, "item 'a' has no handler"),
    "no handler to restore": (lambda m: m.restore(items={"a": 1}), CheckpointRefused, "item 'a' has no handler"),
    "other item": (
        lambda m: m.save(1, args=ocp.args.Composite(default=ocp.args.StandardSave(state()))),
        CheckpointRefused,
        "expected the state in item 'items', found default: make the CheckpointManager with item_name='default'",
    ),
    "no tree": (
        lambda m: m.save(1, args=ocp.args.Composite(iter=IteratorArgs(Iterator()))),
        CheckpointRefused,
        "expected the state in item 'items', found iter: add it, a StandardSave or PyTreeSave",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), ITEMS_REFUSED.values(), ids=ITEMS_REFUSED)
def test_items_that_nothing_is_known_of_are_refused(
    tmp_path: Path, call: Callable[[CheckpointManager], Any], kind: type[Exception], message: str
) -> None:
    with MANAGERS["Gracepoint"](tmp_path) as manager, pytest.raises(kind, match=message):
        call(manager)


@pytest.mark.parametrize("name", ["", "a/b", "..", "host_state", "_METADATA", "ü", "done.process_0.json"])
def test_items_need_names_that_are_free(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="expected 1 to 128 letters"):
        CheckpointManager(tmp_path, item_name=name)


def test_options_of_orbax_s_manager_are_refused_with_what_is_meant(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="options: expected WriteOptions, found a CheckpointManagerOptions: when"):
        CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2))


def test_an_item_that_is_damaged_or_missing_is_reported(tmp_path: Path) -> None:
    with MANAGERS["Gracepoint"](tmp_path) as manager:
        manager.save(1, state())
        manager.save(2, state(), items={"iter": IteratorArgs(Iterator(2))})
        manager.wait_until_finished()
        with pytest.raises(CheckpointMismatch, match="has no item 'iter'"):
            manager.restore(1, items={"iter": IteratorArgs(Iterator())})
        assert manager.restore(2, items={"iter": IteratorArgs(Iterator())}).items["iter"].position == 2
        flip_bit(tmp_path / "2" / "iter" / "process_0-of-1.json")
        with pytest.raises(CheckpointCorrupt, match=r"2/iter/process_0-of-1\.json"):
            manager.restore(2, items={"iter": IteratorArgs(Iterator())})
        assert_same(manager.restore(2, like=state()).state, state())


def test_a_handler_of_an_item_that_fails_fails_the_save(tmp_path: Path) -> None:
    class Silent(IteratorHandler):
        def save(self, directory: Any, args: Any) -> None:
            if args.item.position:
                raise OSError("no iterator")

    with CheckpointManager(tmp_path, item_handlers={"iter": Silent()}) as manager:
        with pytest.raises(OSError, match="no iterator"):
            manager.save(1, state(), items={"iter": IteratorArgs(Iterator(1))})
        manager.save(2, state(), items={"iter": IteratorArgs(Iterator(0))})
        with pytest.raises(SaveFailed, match="item 'iter': its handler wrote nothing"):
            manager.wait_until_finished()
        manager.save(3, state())
        manager.wait_until_finished()
        assert manager.all_steps() == [3]


@pytest.mark.parametrize("place", ["a file", "a folder", "a step"])
def test_checkpoints_in_msgpack_are_refused_by_their_name(tmp_path: Path, place: str) -> None:
    path = {"a file": tmp_path / "checkpoint_7", "a folder": tmp_path / "a", "a step": tmp_path / "7"}[place]
    if place != "a file":
        (path / "default" if place == "a step" else path).mkdir(parents=True)
    file = {"a file": path, "a folder": path / "checkpoint", "a step": path / "default" / "checkpoint"}[place]
    file.write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(CheckpointRefused, match="msgpack"):
        checkpoint.restore(path)
    assert checkpoint.all_steps(tmp_path) == []
    if place == "a step":
        with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointCorrupt, match="msgpack"):
            manager.restore()


def as_older_metadata(path: Path, aggregated: tuple[str, ...]) -> None:
    """Rewrites the metadata in ``path`` as Orbax 0.4 wrote it: without the format, with values in a msgpack file."""
    file = path / "_METADATA"
    found = json.loads(file.read_text())
    for name, entry in found["tree_metadata"].items():
        entry["value_metadata"].pop("write_shape", None)
        if name in {f"('{each}',)" for each in aggregated}:
            entry["value_metadata"]["skip_deserialize"] = True
    file.write_text(json.dumps({"tree_metadata": found["tree_metadata"], "use_zarr3": False}))
    for each in aggregated:
        shutil.rmtree(path / each, ignore_errors=True)
    (path / "checkpoint").write_bytes(b"\x81\xa1a\x01")  # also there if no value is in it


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
def test_what_orbax_0_4_wrote_is_restored(tmp_path: Path, ocdbt: bool) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as theirs:
        theirs.save(tmp_path / "a", state())
    as_older_metadata(tmp_path / "a", ())
    assert_same(checkpoint.restore(tmp_path / "a"), state())


@pytest.mark.parametrize("ocdbt", [True, False], ids=["ocdbt", "files"])
@pytest.mark.parametrize("aggregated", [("i",), ("i", "w")], ids=["some", "all"])
def test_values_that_orbax_0_4_wrote_to_msgpack_are_refused_by_its_name(
    tmp_path: Path, aggregated: tuple[str, ...], ocdbt: bool
) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as theirs:
        theirs.save(tmp_path / "2" / "default", state())
    checkpoint.save(tmp_path / "1", state())
    as_older_metadata(tmp_path / "2" / "default", aggregated)
    said = rf"the values of {len(aggregated)} leaves, as 'i', in a msgpack file, checkpoint.*restore it with Orbax"
    with AsyncCheckpointer() as ours, CheckpointManager(tmp_path) as manager:
        calls: list[Callable[[], Any]] = [
            lambda: checkpoint.restore(tmp_path / "2"),
            lambda: ours.metadata(tmp_path / "2" / "default"),
            lambda: manager.metadata(2),
            lambda: manager.restore(2),
            lambda: manager.restore(),
        ]
        for call in calls:
            with pytest.raises(CheckpointRefused, match=said):
                call()


NUMBERS: dict[str, Callable[[], Any]] = {
    "as saved": lambda: (dict.fromkeys(state(), 0), {}, {}),
    "as the arguments say": lambda: ({"w": 0}, {"w": ocp.ArrayRestoreArgs(sharding=sharding("y"))}, {}),
    "what was not saved": lambda: ({"w": 0, "more": 5}, {}, {}),
    "a default": lambda: ({"w": 7, "i": 0}, {}, {"w": ocp.Transform(use_fallback=True)}),
    "renamed": lambda: ({"v": 0}, {"v": ocp.ArrayRestoreArgs(sharding=sharding("y"))}, {"v": ocp.Transform("w")}),
    "computed": lambda: ({"w": 0, "i": 0}, {}, {"[wi]": ocp.Transform(value_fn=lambda value: value * 2)}),
    "computed, of another shape": lambda: (
        {"w": 0},
        {"w": ocp.ArrayRestoreArgs(sharding=sharding("y"))},
        {"w": ocp.Transform(value_fn=lambda value: value.max(1, keepdims=True).astype("float16"))},
    ),
}


@pytest.mark.parametrize("make", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("by_ours", [True, False], ids=["ours", "theirs"])
def test_numbers_of_an_item_stand_for_any_leaf_with_transforms_too(
    tmp_path: Path, make: Callable[[], Any], by_ours: bool
) -> None:
    item, given, transforms = make()
    if by_ours:
        checkpoint.save(tmp_path / "a", state())
    else:
        ocp.PyTreeCheckpointer().save(tmp_path / "a", state())
    restore_args = {name: given.get(name, ocp.RestoreArgs()) for name in item}
    args = ocp.args.PyTreeRestore(item, restore_args=restore_args, transforms=transforms)
    expected = ocp.PyTreeCheckpointer().restore(tmp_path / "a", args=args)
    with AsyncCheckpointer() as ours:
        found = ours.restore(tmp_path / "a", args=args)
    assert_same(found, expected)
    for leaf, there in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert not isinstance(there, jax.Array) or leaf.sharding.is_equivalent_to(there.sharding, there.ndim)


def is_nothing(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


@pytest.mark.parametrize("like", [True, False], ids=["with an item", "as saved"])
def test_leaves_that_are_nothing_may_have_arguments(tmp_path: Path, like: bool) -> None:
    tree = state() | {"none": None, "masked": optax.MaskedNode(), "deep": {"none": None}}
    args = {of: jax.tree.map(lambda _, of=of: of(), tree, is_leaf=is_nothing) for of in (ocp.SaveArgs, ocp.RestoreArgs)}
    checkpoint.save(tmp_path / "a", tree, save_args=args[ocp.SaveArgs])
    restore = ocp.args.PyTreeRestore(tree if like else None, restore_args=args[ocp.RestoreArgs])
    expected = ocp.PyTreeCheckpointer().restore(tmp_path / "a", args=restore)
    with AsyncCheckpointer() as ours:
        assert_same(ours.restore(tmp_path / "a", args=restore), expected)
        with pytest.raises(CheckpointRefused, match="expected a leaf or container of what is restored"):
            ours.restore(tmp_path / "a", restore_args={"gone": ocp.RestoreArgs()})
