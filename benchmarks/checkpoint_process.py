"""One process of ``benchmarks.checkpoint``: joins the others, saves and restores, and prints what that took.

    checkpoint_process.py ROOT STATE_BYTES REPEATS LEAVES LEAVES_REPEATS

Its last line is a ``Measured`` in JSON for each of the two states, one of large arrays and one of many small ones. The
engines take turns in every repeat, and all processes begin each turn together. Nothing else runs meanwhile: what a turn
leaves behind is deleted and synced between two.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import checkpoint_engines as engines
from benchmarks.checkpoint_engines import Engine
from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.groups import GroupFactory, JoinedGroup
from gracepoint.checkpoint.planning.chunks import local_shards
from gracepoint.checkpoint.reading import stored_arrays
from gracepoint.checkpoint.reading.stored_tree import open_tree
from gracepoint.checkpoint.saving.planner import DEFAULT_SETTINGS, SavePlanner
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from tests.multiprocess.launcher import here

MEASURED = "measured "
_LAYERS = 12
_COLUMNS = 256
_SMALL_ELEMENTS = 64
_SHARDED_EVERY = 10
_READERS = 16
_TIMEOUT_S = 300.0

Place = Callable[[tuple[int, ...], PartitionSpec], jax.Array]


@dataclasses.dataclass
class Measured:
    """What one process measured with one state: seconds of each repeat, by engine.

    Attributes:
        prepare_s: What came before training, once.
        blocked_s: Until the call returned.
        committed_s: From the call until the save was committed.
        extra_bytes: Largest resident memory above what there was before, with what stays reserved.
        restore_s: With a cold page cache.
        memcpy_s: Copying what this process writes, into memory that was touched before.
        memcpy_bytes: How much that is.
        read_s: Reading the files that this process restores from with plain threads, with a cold page cache.
        read_bytes: How much that is.
    """

    prepare_s: dict[str, float] = dataclasses.field(default_factory=dict)
    blocked_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    committed_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    restore_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    memcpy_s: list[float] = dataclasses.field(default_factory=list)
    memcpy_bytes: int = 0
    read_s: list[float] = dataclasses.field(default_factory=list)
    read_bytes: int = 0


def main(root: Path, state_bytes: int, repeats: int, leaves: int, leaves_repeats: int) -> None:
    here().initialize_jax()
    together = Together(GroupFactory().join(timeout_s=_TIMEOUT_S))
    large = _Bench(root / "large", large_state(state_bytes), together).measure(repeats)
    small = _Bench(root / "small", small_state(leaves), together).measure(leaves_repeats)
    print(MEASURED + json.dumps([dataclasses.asdict(large), dataclasses.asdict(small)]), flush=True)
    together.meet()


def large_state(state_bytes: int) -> Any:
    """Returns about so many bytes over all processes: most split over all devices, some replicated in part or whole."""
    place = _placer()
    layer_rows = state_bytes // (_LAYERS * _COLUMNS * 4)

    def rows(share: float) -> tuple[int, int]:
        return max(1, round(layer_rows * share / 64)) * 64, _COLUMNS

    layers = [
        {
            "query": place(rows(0.25), PartitionSpec(("data", "model"))),
            "up": place(rows(0.25), PartitionSpec(("data", "model"))),
            "down": place(rows(0.25), PartitionSpec(("data", "model"))),
            "embedding": place(rows(0.20), PartitionSpec("model")),
            "scale": place(rows(0.05), PartitionSpec()),
        }
        for _ in range(_LAYERS)
    ]
    return {"layers": layers, "rate": place((), PartitionSpec()), "step": 1}


def small_state(leaves: int) -> Any:
    """Returns so many arrays of 256 bytes: every tenth is split over all devices, the others are on each."""
    place = _placer()
    split, whole = PartitionSpec(("data", "model")), PartitionSpec()
    return {
        f"layer{index}": place((_SMALL_ELEMENTS,), split if index % _SHARDED_EVERY == 0 else whole)
        for index in range(leaves)
    }


def _placer() -> Place:
    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("data", "model"))

    def place(shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
        def values(index: tuple[slice, ...] | None) -> npt.NDArray[np.float32]:
            bounds = [part.indices(length) for part, length in zip(index or (), shape, strict=True)]
            seed = [start for start, _, _ in bounds]  # replicas are equal
            drawn = np.random.default_rng(seed).standard_normal([b - a for a, b, _ in bounds], np.float32)
            return np.asarray(drawn, np.float32)

        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), values)

    return place


class Together:
    """The processes of the benchmark."""

    def __init__(self, joined: JoinedGroup) -> None:
        self._gang = joined.gang
        self._meetings = 0

    @property
    def is_first(self) -> bool:
        return self._gang.process_index == 0

    def meet(self) -> None:
        """Waits for all."""
        self._meetings += 1
        self._gang.barrier(f"benchmark/{self._meetings}", timeout_s=_TIMEOUT_S)

    def first(self, act: Callable[[], object]) -> None:
        """Has the first process do something, for which all wait."""
        self.meet()
        if self.is_first:
            act()
        self.meet()

    def timed(self, act: Callable[[], object]) -> float:
        """Begins ``act`` in all processes at once; returns its seconds in this one."""
        self.meet()
        began_s = time.perf_counter()
        act()
        return time.perf_counter() - began_s


class _Bench:
    """All measurements with one state."""

    def __init__(self, root: Path, state: Any, together: Together) -> None:
        joined = GroupFactory().join(timeout_s=_TIMEOUT_S)  # anew, as an attempt has one Checkpointer
        self._state = state
        self._together = together
        self._engines: dict[str, Engine] = {}
        for name in engines.NAMES:
            own = root / name.replace(", ", "-").replace(" ", "-")
            together.first(functools.partial(own.mkdir, parents=True))
            self._engines[name] = engines.make(name, own, joined)
        self._negate = jax.jit(jnp.negative, donate_argnums=0)
        self._memcpy = _Memcpy(state, joined)
        self._measured = Measured(memcpy_bytes=self._memcpy.bytes)

    def measure(self, repeats: int) -> Measured:
        measured = self._measured
        reserved_bytes = {}
        for name, engine in self._engines.items():
            before_bytes = resident_bytes()
            measured.prepare_s[name] = self._together.timed(functools.partial(engine.prepare, self._state))
            reserved_bytes[name] = resident_bytes() - before_bytes
            measured.blocked_s[name], measured.committed_s[name], measured.restore_s[name] = [], [], []
        for step in range(1, repeats + 1):
            measured.memcpy_s.append(self._together.timed(self._memcpy.of(self._state)))
            for name, engine in self._engines.items():
                above_bytes = self._save(name, engine, step)
                measured.extra_bytes[name] = max(measured.extra_bytes.get(name, 0), reserved_bytes[name] + above_bytes)
                if step < repeats:
                    self._delete(engine.folder(step))
        self._memcpy.release()
        for turn in range(repeats):
            self._restore(repeats, plain_first=turn % 2 == 0)
        for engine in self._engines.values():
            self._delete(engine.folder(repeats))
            engine.close()
        return measured

    def _save(self, name: str, engine: Engine, step: int) -> int:
        """Saves a state that was never saved before; returns by how much resident memory grew meanwhile at most."""
        self._state = jax.block_until_ready(
            jax.tree.map(lambda leaf: self._negate(leaf) if isinstance(leaf, jax.Array) else leaf, self._state)
        )
        before_bytes = resident_bytes()
        forget_peak()

        def save() -> None:
            began_s = time.perf_counter()
            engine.save(step, self._state)
            self._measured.blocked_s[name].append(time.perf_counter() - began_s)
            engine.wait()

        self._measured.committed_s[name].append(self._together.timed(save))
        return max(0, resident_bytes(peak=True) - before_bytes)

    def _restore(self, step: int, *, plain_first: bool) -> None:
        """Reads ``step`` plainly and restores it with each engine.

        Plain reading and Gracepoint's restore follow each other, and which is first alternates: a disk whose bandwidth
        is limited on average is faster after a pause, which the turns of Orbax are.
        """
        if plain_first:
            self._read_plainly(step)
            self._restore_with(engines.GRACEPOINT, step)
        else:
            self._restore_with(engines.GRACEPOINT, step)
            self._read_plainly(step)
        for name in self._engines:
            if name != engines.GRACEPOINT:
                self._restore_with(name, step)

    def _read_plainly(self, step: int) -> None:
        ours = self._engines[engines.GRACEPOINT].folder(step)
        files = _files_to_read(ours, self._state)
        self._measured.read_bytes = sum(path.stat().st_size for path in files)
        self._make_cold(ours)
        self._measured.read_s.append(self._together.timed(functools.partial(_read, files)))

    def _restore_with(self, name: str, step: int) -> None:
        engine = self._engines[name]
        self._make_cold(engine.folder(step))

        def restore() -> None:
            jax.block_until_ready(engine.restore(step, self._state))

        self._measured.restore_s[name].append(self._together.timed(restore))

    def _make_cold(self, folder: Path) -> None:
        def forget() -> None:
            os.sync()
            for path in folder.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)

        self._together.first(forget)

    def _delete(self, folder: Path) -> None:
        def delete() -> None:
            shutil.rmtree(folder)
            os.sync()

        self._together.first(delete)


class _Memcpy:
    """What a process must at least do before training goes on: copy its part of the state, each replica once."""

    def __init__(self, state: Any, joined: JoinedGroup) -> None:
        self._planner = SavePlanner(joined.gang, joined.attempt, DEFAULT_SETTINGS)
        chunks = self._chunks(state)
        self.bytes = sum(chunk.nbytes for chunk in chunks)
        self._buffers = [np.full_like(chunk, 0) for chunk in chunks]

    def of(self, state: Any) -> Callable[[], None]:
        """Returns what copies ``state``."""
        pairs = list(zip(self._buffers, self._chunks(state), strict=True))

        def copy() -> None:
            for buffer, chunk in pairs:
                np.copyto(buffer, chunk)

        return copy

    def release(self) -> None:
        self._buffers = []

    def _chunks(self, state: Any) -> list[npt.NDArray[Any]]:
        leaves, prepared = self._planner.plan(state)
        found = []
        for shard in prepared.plan.shards:
            values = np.asarray(local_shards(leaves[shard.leaf].data)[shard.index])
            for chunk in shard.chunks:
                inside = zip(chunk.index, shard.index, strict=True)
                found.append(values[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in inside)])
        return found


def _files_to_read(folder: Path, state: Any) -> list[Path]:
    """Returns the files that hold what this process has of ``state``: of whole trees, where chunks are in trees."""
    stored = open_tree(storage_path(folder), Deadline.after(_TIMEOUT_S, time.monotonic))
    assert stored.manifest is not None
    item = folder / stored.manifest.item
    found: set[Path] = set()
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    data = {pytree.name_of(pytree.path_of(path)): leaf for path, leaf in leaves}
    for spec in stored.manifest.arrays:
        if spec.format.ocdbt:
            return [path for path in item.rglob("*") if path.is_file()]
        held = local_shards(data[spec.name]) if isinstance(data[spec.name], jax.Array) else [()]
        for index in held:
            found.update(
                item / spec.chunk_file(chunk) for chunk in stored_arrays.touched(index, spec.shape, spec.chunk)
            )
    return sorted(found)


def _read(files: Sequence[Path]) -> None:
    """Reads each file as a whole into memory of its own, which stays until all are read."""

    def read(path: Path) -> npt.NDArray[np.uint8]:
        into = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            filled = 0
            while count := file.readinto(into[filled:].data):
                filled += count
        return into

    with ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(read, files))


def resident_bytes(*, peak: bool = False) -> int:
    """Returns this process's memory, now or at most since ``forget_peak``."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {wanted}")


def forget_peak() -> None:
    """Has the kernel begin anew with what it knows of the most memory."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
