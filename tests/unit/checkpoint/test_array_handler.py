"""Leaves saved and restored by type, without a tree and a commit."""

from __future__ import annotations

import base64
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.sharding_impls import GSPMDSharding

from gracepoint.checkpoint import (
    ArrayHandler,
    ArrayRestoreArgs,
    HandlerRegistry,
    InProcessDispatcher,
    NumpyHandler,
    ParamInfo,
    RestoreArgs,
    SaveArgs,
    ScalarHandler,
    StringHandler,
    TransferPriority,
    TypeHandler,
    WriteOptions,
    default_handlers,
)
from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.planning.chunks import WritePlan
from gracepoint.checkpoint.reading import parallel_reader
from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, CheckpointRefused, SettingsError
from tests.unit.checkpoint.fakes.engine import assert_same, sharding
from tests.unit.checkpoint.fakes.formats import each_format

pytestmark = pytest.mark.integration


def infos_of(folder: Path, *names: str) -> list[ParamInfo]:
    return [ParamInfo(name, folder / "tree") for name in names]


def arrays() -> list[jax.Array]:
    return [
        jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")),
        jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), sharding("x")),
        jax.device_put(jax.random.split(jax.random.key(1), 4), sharding("y")),
        jnp.asarray(3),
    ]


def serialize(handler: TypeHandler, values: Sequence[Any], infos: Sequence[ParamInfo], args: Any = None) -> None:
    for future in handler.serialize(values, infos, args):
        future.result(timeout=60)
    handler.finalize(infos[0].parent_dir)


@each_format
def test_arrays_come_back_with_the_shardings_they_were_saved_with(
    tmp_path: Path, options: WriteOptions, caplog: pytest.LogCaptureFixture
) -> None:
    infos = infos_of(tmp_path, "params.w", "b/c", "key", "count")
    handler = ArrayHandler(options)
    serialize(handler, arrays(), infos)
    with caplog.at_level(logging.WARNING):
        found = ArrayHandler().deserialize(infos)
    assert_same(found, arrays())
    assert [array.sharding for array in found] == [array.sharding for array in arrays()]
    assert "restored with the shardings that they were saved with" in caplog.text


def test_arrays_come_back_as_the_arguments_say(tmp_path: Path) -> None:
    infos = infos_of(tmp_path, "w", "b")
    serialize(ArrayHandler(), arrays()[:2], infos)
    args = [
        ArrayRestoreArgs(sharding=sharding("y"), dtype=jnp.bfloat16),
        ArrayRestoreArgs(sharding=sharding(), global_shape=(4,), strict=False),
    ]
    cast, cut = ArrayHandler().deserialize(infos, args)
    assert_same([cast, cut], [arrays()[0].astype(jnp.bfloat16), arrays()[1][:4]])
    assert (cast.sharding, cut.sharding) == (sharding("y"), sharding())


def test_what_is_saved_is_what_the_arguments_say(tmp_path: Path) -> None:
    (info,) = infos_of(tmp_path, "w")
    value = jnp.arange(64.0).reshape(8, 8)
    serialize(ArrayHandler(), [value], [info], [SaveArgs(dtype=jnp.float16, chunk_byte_size=32)])
    (metadata,) = ArrayHandler().metadata([info])
    assert (metadata.shape, metadata.dtype, metadata.chunk_shape) == ((8, 8), jnp.float16, (2, 8))
    assert metadata.write_shape == (8, 8)
    assert sorted(path.name for path in info.path.iterdir()) == [".zarray", "0.0", "1.0", "2.0", "3.0"]


def test_values_may_change_as_soon_as_serialize_has_returned(tmp_path: Path) -> None:
    infos = infos_of(tmp_path, "w")
    value, given = np.arange(4.0), jnp.arange(4.0)
    written = NumpyHandler().serialize([value], infos)
    value[:] = 0
    other = infos_of(tmp_path / "jax", "w")
    written += ArrayHandler().serialize([given], other)
    given.delete()
    for future in written:
        future.result(timeout=60)
    (found,) = NumpyHandler().deserialize(infos)
    np.testing.assert_array_equal(found, np.arange(4.0))
    np.testing.assert_array_equal(ArrayHandler().deserialize(other)[0], np.arange(4.0))


@each_format
def test_leaves_of_all_types_that_are_written_at_once_share_a_folder(tmp_path: Path, options: WriteOptions) -> None:
    handlers = default_handlers(options)
    cases: list[tuple[TypeHandler, list[Any], list[ParamInfo]]] = [
        (handlers.get(jax.Array), arrays(), infos_of(tmp_path, "w", "b", "key", "count")),
        (handlers.get(np.ndarray), [np.arange(6).reshape(2, 3)], infos_of(tmp_path, "n")),
        (handlers.get(int), [3, 2.5], infos_of(tmp_path, "i", "f")),
    ]
    for future in [future for handler, *leaves in cases for future in handler.serialize(*leaves)]:
        future.result(timeout=60)
    for handler, _, infos in cases:
        handler.finalize(infos[0].parent_dir)
    for handler, values, infos in cases:
        assert_same(handler.deserialize(infos), values)


def test_many_small_arrays_leave_leaves_of_other_types_where_they_are_found(tmp_path: Path) -> None:
    handlers = default_handlers()
    many = [jnp.full(2, i) for i in range(520)]
    infos = infos_of(tmp_path, *(f"w{i}" for i in range(520)))
    serialize(handlers.get(int), [7], infos_of(tmp_path, "i"))
    serialize(handlers.get(jax.Array), many, infos)
    assert (tmp_path / "tree" / "manifest.ocdbt").is_file()
    assert handlers.get(int).deserialize(infos_of(tmp_path, "i")) == [7]
    assert_same(handlers.get(jax.Array).deserialize(infos), many)


@each_format
def test_a_folder_that_is_written_again_has_the_new_values(tmp_path: Path, options: WriteOptions) -> None:
    (info,) = infos_of(tmp_path, "w")
    for value in (1.0, 2.0, 3.0):
        serialize(ArrayHandler(options), [jnp.full(3, value)], [info])
        assert ArrayHandler().deserialize([info])[0].tolist() == [value] * 3


def test_numbers_and_numpy_arrays_and_strings_come_back(tmp_path: Path) -> None:
    numpy, scalar, string = NumpyHandler(), ScalarHandler(), StringHandler()
    cases: list[tuple[TypeHandler, list[Any], list[ParamInfo]]] = [
        (numpy, [np.arange(6, dtype=np.int16).reshape(2, 3), np.asarray(False)], infos_of(tmp_path, "a", "b")),
        (scalar, [3, 2.5, True, np.float32(0.5)], infos_of(tmp_path, "i", "f", "t", "n")),
        (string, ["é", ""], infos_of(tmp_path, "s", "t/u~v")),
    ]
    for handler, values, infos in cases:
        serialize(handler, values, infos)
    for handler, values, infos in cases:
        found = handler.deserialize(infos)
        expected = [value.item() if isinstance(value, np.generic) else value for value in values]  # as Python's numbers
        assert_same(found, expected)
        assert [metadata.value_type for metadata in handler.metadata(infos)] == [handler.typestr] * len(infos)
    assert ScalarHandler().deserialize(infos_of(tmp_path, "i"), [RestoreArgs(restore_type=float)]) == [3.0]


@pytest.mark.parametrize(
    ("handler", "values", "message"),
    [
        pytest.param(ArrayHandler(), [np.zeros(1)], "leaf 'w': expected a jax.Array, found a ndarray", id="other type"),
        pytest.param(ArrayHandler(), [jnp.zeros((0, 2))], "leaf 'w' has no elements", id="zero size"),
        pytest.param(NumpyHandler(), [np.zeros(0)], "leaf 'w' has no elements", id="zero size in numpy"),
        pytest.param(ArrayHandler(), [], "expected as many values and args as there are infos, 1, found 0", id="none"),
    ],
)
def test_what_a_handler_cannot_save_is_refused_by_name(
    tmp_path: Path, handler: TypeHandler, values: list[Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)) as refused:
        handler.serialize(values, infos_of(tmp_path, "w"))
    assert isinstance(refused.value, ValueError)  # as in Orbax


def test_arrays_without_elements_are_saved_where_that_is_asked_for(tmp_path: Path) -> None:
    infos = infos_of(tmp_path, "w")
    serialize(ArrayHandler(allow_zero_size=True), [jnp.zeros((0, 2))], infos)
    (found,) = ArrayHandler().deserialize(infos)
    assert found.shape == (0, 2)


def test_a_leaf_that_is_missing_is_named(tmp_path: Path) -> None:
    serialize(ArrayHandler(), [jnp.zeros(1)], infos_of(tmp_path, "w"))
    serialize(StringHandler(), ["x"], infos_of(tmp_path, "s"))
    for handler in (ArrayHandler(), StringHandler()):
        with pytest.raises(CheckpointCorrupt, match="'gone'"):
            handler.deserialize(infos_of(tmp_path, "gone"))


def test_a_leaf_that_does_not_fit_is_named(tmp_path: Path) -> None:
    infos = infos_of(tmp_path, "w")
    serialize(ArrayHandler(), [jnp.zeros(4)], infos)
    with pytest.raises(CheckpointMismatch, match=r"leaf 'w': expected float32\[5\].*, found float32\[4\]"):
        ArrayHandler().deserialize(infos, [ArrayRestoreArgs(sharding=sharding(), global_shape=(5,))])


def test_memory_is_counted_by_what_this_process_writes_and_reads() -> None:
    values = arrays()
    assert ArrayHandler().memory_size(values) == [(256, 256), (16, 16), (32, 32), (4, 4)]
    assert StringHandler().memory_size(["é"]) == [(2, 2)]
    assert NumpyHandler().memory_size([np.zeros((3, 2), np.int16), np.zeros(1)]) == [(12, 12), (8, 8)]
    assert ScalarHandler().memory_size([3, np.float32(0.5)]) == [(8, 8), (4, 4)]


def test_callbacks_are_given_the_key_paths(tmp_path: Path) -> None:
    told: list[Any] = []

    class Callback:
        def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
            return TransferPriority.ASYNCHRONOUS_PRIORITIZED

        def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
            told.append(("transferred", jax.tree_util.keystr(keypath)))

        def on_write_end(self, keypath: tuple[Any, ...]) -> None:
            told.append(("written", jax.tree_util.keystr(keypath)))

    ((keypath, value),) = jax.tree_util.tree_flatten_with_path({"a": [jnp.zeros(3)]})[0]
    handler = ArrayHandler(WriteOptions(device_host_max_bytes=100, callback=Callback()))
    serialize(handler, [value], [ParamInfo("a.0", tmp_path, keypath)])
    assert told == [("transferred", "['a'][0]"), ("written", "['a'][0]")]


class Remote:
    """A dispatcher whose arrays are elsewhere: the work gets other ones there than those that were given here."""

    def __init__(self) -> None:
        self.work: list[tuple[str, int]] = []

    def device_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        self.work.append(("to host", len(arrays)))
        return [array + 1 for array in arrays]

    def dispatch(self, name: str, function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> Future[Any]:
        self.work.append((name, len(arrays)))
        future: Future[Any] = Future()
        future.set_result(function([array + 10 for array in arrays]))
        for array in arrays:
            array.delete()  # they are of no use there
        return future


def test_dispatcher_transfers_arrays_and_stores_its_result(tmp_path: Path) -> None:
    remote = Remote()
    handler = ArrayHandler(dispatcher=remote)
    infos = infos_of(tmp_path, "a", "b")
    given = [jnp.zeros(2), jnp.ones(3)]
    serialize(handler, given, infos)
    for array in given:
        array.delete()  # donated
    assert [value.tolist() for value in handler.deserialize(infos)] == [[11.0] * 2, [12.0] * 3]
    assert remote.work == [
        ("to host", 2),
        ("writing jax.Array leaves", 2),
        ("reading jax.Array leaves", 0),
    ]


def test_a_dispatcher_copies_before_serialize_returns_only_what_is_synchronous(tmp_path: Path) -> None:
    class Callback:
        def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
            later = jax.tree_util.keystr(keypath) == "['later']"
            return TransferPriority.ASYNCHRONOUS_PRIORITIZED if later else TransferPriority.SYNCHRONOUS

        def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
            pass

        def on_write_end(self, keypath: tuple[Any, ...]) -> None:
            pass

    nodes = jax.tree_util.tree_flatten_with_path({"later": jnp.zeros(1), "now": jnp.zeros(1)})[0]
    infos = [ParamInfo(jax.tree_util.keystr(path), tmp_path / "tree", path) for path, _ in nodes]
    remote = Remote()
    options = WriteOptions(device_host_max_bytes=100, callback=Callback())
    serialize(ArrayHandler(options, dispatcher=remote), [value for _, value in nodes], infos)
    assert remote.work[0] == ("to host", 1)
    assert [value.tolist() for value in ArrayHandler().deserialize(infos)] == [[10.0], [11.0]]


def test_types_of_numpy_values_are_stored_by_a_later_dispatcher(tmp_path: Path) -> None:
    class Later(InProcessDispatcher):
        def dispatch(self, name: str, function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> Future[Any]:
            def work(arrays: Sequence[Any]) -> Any:
                assert changed.wait(60)
                return function(arrays)

            return super().dispatch(name, work, arrays)

    changed = threading.Event()
    value, infos = np.arange(3.0), infos_of(tmp_path, "w")
    (written,) = NumpyHandler(dispatcher=Later()).serialize([value], infos)
    value[:] = 0
    changed.set()
    written.result(timeout=60)
    assert NumpyHandler().deserialize(infos)[0].tolist() == [0.0, 1.0, 2.0]


def test_the_in_process_dispatcher_s_copies_outlive_a_donation(tmp_path: Path) -> None:
    infos = infos_of(tmp_path, "params.w", "b/c", "key", "count")
    given = arrays()
    written = ArrayHandler(dispatcher=InProcessDispatcher()).serialize(given, infos)
    for array in given:
        array.delete()
    for future in written:
        future.result(timeout=60)
    assert_same(ArrayHandler().deserialize(infos), arrays())


@pytest.mark.parametrize("primary_host", [None, 0], ids=["every host", "process 0"])
@pytest.mark.parametrize(
    ("handler", "value"),
    [
        pytest.param(ArrayHandler, jnp.ones(2), id="arrays"),
        pytest.param(NumpyHandler, np.ones(2), id="numpy"),
        pytest.param(ScalarHandler, 3, id="numbers"),
        pytest.param(StringHandler, "text", id="strings"),
    ],
)
def test_the_primary_host_writes(tmp_path: Path, handler: Any, value: Any, primary_host: int | None) -> None:
    infos = infos_of(tmp_path, "w")
    serialize(handler(primary_host=primary_host), [value], infos)
    assert_same(handler().deserialize(infos), [value])
    assert (tmp_path / "tree" / "_sharding").is_file() == (handler is ArrayHandler)


@pytest.mark.parametrize(
    "arguments", [{"options": WriteOptions(store_sharding=False)}, {"enable_write_sharding_file": False}], ids=str
)
def test_a_handler_stores_no_shardings_where_that_is_not_wanted(tmp_path: Path, arguments: dict[str, Any]) -> None:
    infos = infos_of(tmp_path, "w")
    serialize(ArrayHandler(**arguments), [jnp.ones(2)], infos)
    assert not (tmp_path / "tree" / "_sharding").exists()
    assert ArrayHandler().metadata(infos)[0].sharding is None


@pytest.mark.parametrize("handler", [ArrayHandler, NumpyHandler, ScalarHandler, StringHandler])
def test_unknown_primary_host_is_refused_and_nothing_is_saved(tmp_path: Path, handler: Any) -> None:
    with pytest.raises(SettingsError, match="primary_host is 1; expected one of the process indices 0 to 0, or None"):
        handler(primary_host=1).serialize(["x"], infos_of(tmp_path, "w"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"metadata_key": "mine"}, "metadata_key='mine': arrays are written", id="metadata_key"),
        pytest.param({"replica_id": 1}, "replica_id=1: which replica writes", id="replica_id"),
        pytest.param(
            {"array_metadata_store": object()}, "array_metadatas is written in Orbax's form", id="array_metadata_store"
        ),
        pytest.param(
            {"enable_replica_parallel_separate_folder": True}, "replicas have no separate folder", id="replicas' folder"
        ),
        pytest.param({"options": "mine"}, "expected WriteOptions, found 'mine'", id="metadata_key by position"),
        pytest.param({"nonsense": 1}, "unknown argument 'nonsense'; expected one of", id="unknown"),
    ],
)
def test_arguments_that_change_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        ArrayHandler(**arguments)


def test_making_a_handler_of_arrays_is_recorded_by_orbaxs_event() -> None:
    told: list[str] = []

    def listen(event: str, **_: Any) -> None:
        told.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        ArrayHandler()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert "/jax/orbax/array_handler/init" in told


def test_arrays_without_elements_that_are_saved_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    serialize(NumpyHandler(allow_zero_size=True), [np.zeros(0)], infos_of(tmp_path, "w"))
    assert "leaf 'w' is saved without elements" in caplog.text


def test_a_handler_says_whether_it_has_a_dispatcher() -> None:
    assert not ArrayHandler().has_dispatcher()
    assert ArrayHandler(dispatcher=InProcessDispatcher()).has_dispatcher()


def test_a_handler_reads_within_its_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = infos_of(tmp_path, *(f"w{i}" for i in range(8)))
    values = [jnp.full((64, 64), i, jnp.float32) for i in range(8)]  # 16 KiB each
    serialize(ArrayHandler(WriteOptions(use_ocdbt=False)), values, infos)
    limits: list[int | None] = []
    read_all = parallel_reader.read_all

    def noted(requests: Any, source: Any, *, limit_bytes: int | None, **options: Any) -> int:
        limits.append(limit_bytes)
        return read_all(requests, source, limit_bytes=limit_bytes, **options)

    monkeypatch.setattr("gracepoint.checkpoint.restoring.restore_tree.read_all", noted)
    for handler in (ArrayHandler(read_limit_bytes=1 << 15), ArrayHandler(), ArrayHandler(read_limit_bytes=None)):
        assert_same(handler.deserialize(infos), values)
    assert limits == [1 << 15, 4 << 30, None]


def test_leaves_of_two_formats_in_one_call_raise_naming_the_leaf(tmp_path: Path) -> None:
    infos = infos_of(tmp_path, "a", "b")
    serialize(ArrayHandler(WriteOptions(use_ocdbt=True)), [jnp.zeros(2)], infos[:1])
    serialize(NumpyHandler(WriteOptions(use_ocdbt=False)), [np.zeros(2)], infos[1:])
    with pytest.raises(CheckpointCorrupt, match="'a'"):
        ArrayHandler().deserialize(infos)


def test_shardings_that_orbax_cannot_record_are_left_out(tmp_path: Path) -> None:
    everywhere = GSPMDSharding.get_replicated(tuple(jax.devices()))
    values = [jax.device_put(jnp.arange(4.0), everywhere), jax.device_put(jnp.arange(4.0), sharding("x"))]
    infos = infos_of(tmp_path, "a", "b")
    serialize(ArrayHandler(), values, infos)
    recorded = json.loads((tmp_path / "tree" / "_sharding").read_text())
    assert [base64.urlsafe_b64decode(name) for name in recorded] == [b"b"]
    args = [ArrayRestoreArgs(sharding=everywhere), ArrayRestoreArgs()]
    assert_same(ArrayHandler().deserialize(infos, args), values)
    with pytest.raises(CheckpointRefused, match="leaf 'a'.* no sharding is known"):
        ArrayHandler().deserialize(infos[:1])


def test_an_error_of_a_write_is_the_future_s(tmp_path: Path) -> None:
    (tmp_path / "tree").write_text("no folder")
    (future,) = ArrayHandler().serialize([jnp.zeros(2)], infos_of(tmp_path, "w"))
    with pytest.raises(OSError, match="tree"):
        future.result(timeout=60)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gracepoint: writing")]


def test_a_registry_knows_handlers_by_type_and_by_orbax_s_word() -> None:
    registry = default_handlers()
    for leaf_type, typestr in (
        (type(jnp.zeros(1)), "jax.Array"),
        (np.ndarray, "np.ndarray"),
        (int, "scalar"),
        (bool, "scalar"),
        (np.float32, "scalar"),
        (str, "string"),
    ):
        assert registry.get(leaf_type).typestr == typestr
        assert registry.get(typestr).typestr == typestr
    assert not registry.has(bytes)
    with pytest.raises(SettingsError, match="leaves of type bytes have no handler; there are some for jax.Array, np"):
        registry.get(bytes)


def test_a_handler_replaces_another_one_only_on_request() -> None:
    registry, mine = HandlerRegistry(), ScalarHandler()
    registry.add(int, ScalarHandler())
    with pytest.raises(SettingsError, match="int has a handler already; pass override=True"):
        registry.add(int, mine)
    registry.add(int, mine, override=True)
    assert registry.get(bool) is mine
    registry.add(bytes, NumpyHandler(), matches=lambda found: found is bytes)
    assert registry.has(bytes)
    assert not registry.has(bytearray)


class _VanishingFiles:
    """Lets every lock file vanish as soon as it was looked at, as it does where its writer renames it just then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.vanished: list[Path] = []
        is_file = Path.is_file

        def look(path: Path) -> bool:
            found = is_file(path)
            if found and path.name.endswith(".__lock"):
                path.unlink()
                self.vanished.append(path)
            return found

        patch.setattr(Path, "is_file", look)


class IdleHandler(NumpyHandler):
    """Does what a process does that is not the primary one: it writes nothing."""

    def _plan(self, leaves: Sequence[pytree.Leaf]) -> WritePlan:
        return WritePlan((), (), 0)


def test_call_that_writes_nothing_ignores_files_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = WriteOptions(use_ocdbt=True)
    for future in ArrayHandler(options).serialize(arrays()[:1], infos_of(tmp_path, "w")):
        future.result(timeout=60)
    lock = tmp_path / "tree" / "ocdbt.process_0" / "manifest.ocdbt.__lock"
    lock.touch()
    vanishing = _VanishingFiles(monkeypatch)
    for future in IdleHandler(options).serialize([np.arange(3)], infos_of(tmp_path, "n")):
        future.result(timeout=60)
    assert vanishing.vanished == []
    assert lock.exists()


@pytest.mark.parametrize("options", [WriteOptions(use_ocdbt=True), WriteOptions(use_ocdbt=True, compression="zstd")])
def test_concurrent_calls_into_one_folder_are_independent(tmp_path: Path, options: WriteOptions) -> None:
    writing, idle = ArrayHandler(options), IdleHandler(options)
    for round_number in range(20):
        infos = infos_of(tmp_path / str(round_number), "w", "b", "key", "count")
        futures = [*writing.serialize(arrays(), infos)]
        for number in range(8):
            futures += idle.serialize([np.arange(3)], infos_of(tmp_path / str(round_number), f"n{number}"))
        for future in futures:
            future.result(timeout=60)
        writing.finalize(infos[0].parent_dir)
        assert_same(ArrayHandler().deserialize(infos), arrays())


def test_arguments_that_strings_have_no_use_for_are_refused(tmp_path: Path) -> None:
    infos = infos_of(tmp_path, "s")
    with pytest.raises(CheckpointRefused, match="leaf 's': strings have neither type nor chunks"):
        StringHandler().serialize(["x"], infos, [SaveArgs(dtype=np.float32)])
    serialize(StringHandler(), ["x"], infos, [SaveArgs()])
    assert StringHandler().deserialize(infos, [RestoreArgs(restore_type=str)]) == ["x"]
    with pytest.raises(CheckpointRefused, match="leaf 's': strings are restored as str"):
        StringHandler().deserialize(infos, [RestoreArgs(restore_type=int)])


@pytest.mark.parametrize("given", ["mesh", "mesh_axes"])
def test_half_of_a_sharding_is_refused(tmp_path: Path, given: str) -> None:
    infos = infos_of(tmp_path, "w")
    serialize(ArrayHandler(), [jnp.zeros(4)], infos)
    half: Any = {"mesh": sharding().mesh, "mesh_axes": jax.sharding.PartitionSpec("x")}[given]
    with pytest.raises(CheckpointRefused, match=f"leaf 'w': {given} without mesh"):
        ArrayHandler().deserialize(infos, [ArrayRestoreArgs(**{given: half})])
