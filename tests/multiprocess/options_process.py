"""One of the processes that write with all kinds of options.

The first argument says what it does, the second is an empty folder, and the third of some is a name in ``FORMATS``.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint import multihost
from gracepoint.checkpoint import (
    ArrayHandler,
    AsyncCheckpointer,
    NumpyHandler,
    ParamInfo,
    ScalarHandler,
    StringHandler,
    TypeHandler,
    WriteOptions,
)
from gracepoint.checkpoint.format.records import done_records, read_manifest
from gracepoint.checkpoint.saving import device_copy, planner
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointError, SettingsError
from tests.multiprocess.checkpoint_process import assert_same_here
from tests.multiprocess.launcher import here

FORMATS = {
    "files": WriteOptions(min_slice_bytes=1 << 10),
    "zarr3": WriteOptions(min_slice_bytes=1 << 10, use_zarr3=True, compression="zstd"),
    "tree": WriteOptions(min_slice_bytes=1 << 10, use_ocdbt=True),
    "bounded": WriteOptions(min_slice_bytes=1 << 10, device_host_max_bytes=1 << 11, write_limit_bytes=1 << 11),
    "devices": WriteOptions(min_slice_bytes=1 << 10, pinned_host_transfer=True),  # as from accelerators
    "one": WriteOptions(min_slice_bytes=1 << 10, max_replicas=1),
}


def place(values: Any, *spec: Any) -> jax.Array:
    where = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y")), PartitionSpec(*spec))
    array = np.asarray(values)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def make_state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "replicated": place(rng.standard_normal((16, 64)).astype(np.float32)),
        "half": place(rng.standard_normal((16, 64)).astype(np.float32), None, "y"),
        "sharded": place(rng.standard_normal((16, 64)).astype(jnp.bfloat16), ("x", "y")),
    }


def check_formats(folder: Path) -> None:
    """Both processes write each replicated shard's halves, and Gracepoint and Orbax read the whole."""
    state = make_state()
    for name, options in FORMATS.items():
        with AsyncCheckpointer(options=options) as checkpointer:
            checkpointer.save(folder / name, state)
            checkpointer.wait_until_finished()
            assert_same_here(checkpointer.restore(folder / name, state), state)
        with ocp.StandardCheckpointer() as orbax:
            assert_same_here(orbax.restore(folder / name, state), state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "MANY_CHUNKS", 1)  # the manifest is in parts
        for name in ("files", "zarr3", "tree"):
            with AsyncCheckpointer(options=FORMATS[name]) as checkpointer:
                checkpointer.save(folder / f"{name} in parts", state)
                assert_same_here(checkpointer.restore(folder / f"{name} in parts", state), state)
            with ocp.StandardCheckpointer() as orbax:
                assert_same_here(orbax.restore(folder / f"{name} in parts", state), state)
            manifest = read_manifest(storage_path(folder / f"{name} in parts"))
            assert manifest is not None
            assert manifest.is_in_parts
    for name, expected in (("files", [1, 1]), ("one", [1, 0])):
        records = done_records(storage_path(folder / name))
        assert records is not None
        chunks = [
            sum(path.startswith("replicated/") and not path.endswith(".zarray") for path in record.files)
            for record in records
        ]
        assert sorted(chunks, reverse=True) == expected, (name, chunks)


def check_slices(folder: Path) -> None:
    """From devices each process takes its part of a replicated array, and no more."""
    taken: list[tuple[int, int]] = []
    start = device_copy.start

    def noting(pull: Any, data: Any, options: Any) -> Any:
        taken.append((pull.bytes, data.nbytes))
        return start(pull, data, options)

    with pytest.MonkeyPatch.context() as patch, AsyncCheckpointer(options=FORMATS["devices"]) as checkpointer:
        patch.setattr(device_copy, "start", noting)
        checkpointer.save(folder, {"replicated": make_state()["replicated"]})
        checkpointer.wait_until_finished()
    assert taken == [(2048, 4096)], taken


def check_handlers(folder: Path) -> None:
    """Handlers store arrays over all processes, and refuse those of one; of numpy arrays and numbers one process's."""
    state = make_state()
    host, numbers = {"n": np.arange(3), "m": np.full((2, 5), 0.25)}, {"count": 7, "rate": 0.5}
    for name, options in FORMATS.items():
        by_handler: list[tuple[NumpyHandler, dict[str, Any]]] = [
            (ArrayHandler(options), state),
            (NumpyHandler(options), host),
            (ScalarHandler(options, primary_host=1), numbers),
        ]
        with multihost.failing_together(f"{name} written", timeout=60):
            futures = [
                future
                for handler, leaves in by_handler
                for future in handler.serialize(list(leaves.values()), infos_of(leaves, folder / name))
            ]
            for future in futures:
                future.result(timeout=60)
        with multihost.failing_together(f"{name} merged", timeout=60):
            if jax.process_index() == 0:
                for handler, _ in by_handler:
                    handler.finalize(folder / name)
        assert_same_here(
            dict(zip(state, ArrayHandler().deserialize(infos_of(state, folder / name)), strict=True)), state
        )
        for found, expected in zip(
            NumpyHandler().deserialize(infos_of(host, folder / name)), host.values(), strict=True
        ):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        assert ScalarHandler().deserialize(infos_of(numbers, folder / name)) == [7, 0.5], name
    # With no primary host each process writes all of it, here into a folder of its own.
    own = folder / f"own of {jax.process_index()}"
    leaves_of: list[tuple[TypeHandler, dict[str, Any]]] = [
        (NumpyHandler(primary_host=None), host),
        (ScalarHandler(primary_host=None), numbers),
        (StringHandler(primary_host=None), {"name": "é"}),
    ]
    for writer, leaves in leaves_of:
        infos = infos_of(leaves, own)
        for future in writer.serialize(list(leaves.values()), infos):
            future.result(timeout=60)
        for found, expected in zip(writer.deserialize(infos), leaves.values(), strict=True):
            np.testing.assert_array_equal(found, expected)
    for primary in (0, 1):  # the primary host alone writes what all have; here each process has a folder of its own
        is_primary, own_of = primary == jax.process_index(), folder / f"{primary} writes, of {jax.process_index()}"
        kinds: list[tuple[TypeHandler, dict[str, Any]]] = [
            (ArrayHandler(primary_host=primary), state),
            (NumpyHandler(primary_host=primary), host),
            (ScalarHandler(primary_host=primary), numbers),
            (StringHandler(primary_host=primary), {"name": "é"}),
        ]
        for writer, leaves in kinds:
            for future in writer.serialize(list(leaves.values()), infos_of(leaves, own_of)):
                future.result(timeout=60)
        for name in ("_sharding", "_strings.json", *host, *numbers):
            assert (own_of / name).exists() == is_primary, (primary, name)
        assert (own_of / "array_metadatas" / f"process_{jax.process_index()}").is_file()
    with pytest.raises(SettingsError, match="primary_host is 2; expected one of the process indices 0 to 1"):
        NumpyHandler(primary_host=2).serialize([np.ones(1)], [ParamInfo("w", own)])
    written = ArrayHandler(FORMATS["files"]).memory_size(list(state.values()))
    assert written == [(2048, 4096), (2048, 4096), (1024, 1024)], written
    with pytest.raises(CheckpointError, match="leaf 'w' is local to this process, one of 2"):
        ArrayHandler().serialize([jnp.zeros(3)], [ParamInfo("w", folder / "local")])


def infos_of(leaves: dict[str, Any], folder: Path) -> list[ParamInfo]:
    return [ParamInfo(name, folder) for name in leaves]


def check_some_of_the_processes(folder: Path) -> None:
    """One process alone saves what it holds a replica of, and refuses what another holds a part of."""
    state = make_state()
    if jax.process_index() == 1:
        with AsyncCheckpointer(active_processes=[1], primary_host=1) as checkpointer:
            checkpointer.save(folder, {"replicated": state["replicated"]})
            checkpointer.wait_until_finished()
            with pytest.raises(CheckpointError, match=r"leaf 'sharded': no process of those that save, 1, holds"):
                checkpointer.save(folder.with_name("refused"), state)
    multihost_utils.sync_global_devices("saved alone")
    with ocp.StandardCheckpointer() as orbax:
        found = orbax.restore(folder, {"replicated": state["replicated"]})
    assert_same_here(found, {"replicated": state["replicated"]})


def fail_in_one_process(folder: Path) -> None:
    """Process 1 may not write as much as it has to; process 0 has nobody to wait for then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    values = np.random.default_rng(0).standard_normal((64, 1024), np.float32)  # so that compression does not help
    state = {"sharded": place(values, ("x", "y"))}
    try:
        with multihost.failing_together("written", timeout=60):
            if jax.process_index() == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
            for future in ArrayHandler(FORMATS[sys.argv[3]]).serialize(list(state.values()), infos_of(state, folder)):
                try:
                    future.result(timeout=60)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                    print(f"written or not at {time.monotonic()}", flush=True)
    finally:
        print(f"ends at {time.monotonic()}", flush=True)


def check_all(folder: Path) -> None:
    check_formats(folder / "saved")
    check_slices(folder / "sliced")
    check_handlers(folder / "stored")
    check_some_of_the_processes(folder / "alone")
    multihost_utils.sync_global_devices("done")
    print("done")


if __name__ == "__main__":
    here().initialize_jax()
    {"all": check_all, "fail": fail_in_one_process}[sys.argv[1]](Path(sys.argv[2]))
    jax.distributed.shutdown()
