"""A checkpoint of a gang of thousands: its plan, done-records and manifest are real, its arrays have no values.

Shardings are JAX's, over devices that do not exist. What one process does at a save is done by the library's own code,
for one of the processes. The records of the other processes come from the same plan. Their chunks have made-up
checksums and no files, as neither a commit nor a listing reads chunks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import grid
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import DoneRecord, ManifestPart, StoredFile, file_of
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning import chunks as chunk_owners
from gracepoint.checkpoint.reading.stored_tree import open_tree
from gracepoint.checkpoint.saving import operation, planner
from gracepoint.checkpoint.saving.extras import NO_EXTRAS
from gracepoint.checkpoint.saving.part import write_manifest_part
from gracepoint.checkpoint.saving.planner import PreparedSave, SavePlanner, SaveSettings
from gracepoint.checkpoint.steps import commit, listing
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.writing.pool import WrittenFiles
from gracepoint.deadline import Deadline
from gracepoint.process_group import SingleProcess
from tests.unit.checkpoint.fakes import gang_arrays

DEVICES = 4  # of a process
_WRITERS = 8
# Rows and columns of the matrices of one layer, as in a large language model.
_MATRICES = {
    "q": (8192, 8192),
    "k": (8192, 1024),
    "v": (8192, 1024),
    "o": (8192, 8192),
    "gate": (8192, 28672),
    "up": (8192, 28672),
    "down": (28672, 8192),
}
_OPTIONS = WriteOptions(use_ocdbt=False)
_ATTEMPT = "job-0-a"


class OneOf(SingleProcess):
    """One process of a gang, as planning sees it. The other processes are not there."""

    def __init__(self, process_index: int, process_count: int) -> None:
        self.process_index = process_index
        self.process_count = process_count


@dataclasses.dataclass
class Times:
    """What one run measured. Seconds, unless a name says otherwise."""

    chunks: int = 0
    own_chunks: int = 0
    planned: float = 0.0
    planned_cpu: float = 0.0
    planned_by_first: float = 0.0
    compared: float = 0.0
    part_written: float = 0.0
    committed: float = 0.0
    listed: float = 0.0
    listed_cpu: float = 0.0
    read: float = 0.0
    read_cpu: float = 0.0
    records_bytes: int = 0
    manifest_bytes: int = 0
    parts_bytes: int = 0


def measure(directory: Path, processes: int, layers: int) -> Times:
    """Plans, records, commits, lists and opens one checkpoint below ``directory``."""
    times = Times()
    mesh = gang_arrays.mesh((8, processes * DEVICES // 8), ("replica", "fsdp"), DEVICES)
    rank = processes // 3
    for process_index in (0, rank):
        gang = OneOf(process_index, processes)
        # As in a new process: nothing is known of these shardings yet.
        state = _state(_another(mesh), layers, process_index)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        leaves, prepared = SavePlanner(gang, _ATTEMPT, SaveSettings(_OPTIONS)).plan(state)
        planned_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        if process_index == 0:
            times.planned_by_first, first, first_leaves = planned_s, prepared, leaves
        else:
            times.planned, times.planned_cpu = planned_s, cpu_s
            began_s = time.perf_counter()
            planner.describe(leaves, prepared.specs, prepared.plan)
            times.compared = time.perf_counter() - began_s
    times.chunks = prepared.plan.total_chunks
    times.own_chunks = sum(chunk.mine for chunk in prepared.plan.chunks)
    stored = [dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(first_leaves, first.specs, strict=True)]
    owners = chunk_owners.assign(stored, processes)
    paths = Layout(storage_path(directory))
    temporary = paths.temporary(7, _ATTEMPT, 1)
    with commit.of(paths).writing(temporary, time.time_ns(), process_index=0):
        _write_others(temporary, first, owners, processes, rank)
        times.part_written = _write_own(temporary, prepared, processes, rank)
    folder = directory / temporary.path.name
    times.parts_bytes = sum(path.stat().st_size for path in folder.glob("_GRACEPOINT.process_*"))
    times.records_bytes = sum(path.stat().st_size for path in folder.glob("done.*"))
    began_s = time.perf_counter()
    assert commit.of(paths).finalize(temporary, replace=True)
    times.committed = time.perf_counter() - began_s
    times.manifest_bytes = (directory / "7" / layout.MANIFEST).stat().st_size
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    assert listing.complete_listing(paths).steps == (7,)
    times.listed, times.listed_cpu = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    own = [chunk.file for chunk in prepared.plan.chunks if chunk.mine]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    source: Any = open_tree(paths.step(7), Deadline.after(60.0, time.monotonic)).source
    found = [source._files[path] for path in own]
    times.read, times.read_cpu = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    assert all(file.bytes > 0 for file in found)
    return times


def _another(mesh: Mesh) -> Mesh:
    return gang_arrays.mesh(mesh.devices.shape, mesh.axis_names, DEVICES)


def _state(mesh: Mesh, layers: int, process_index: int) -> dict[str, Any]:
    """Returns parameters and two moments of each, sharded over ``fsdp``, with vectors that all devices have."""

    def array(shape: tuple[int, ...], *spec: str | None) -> gang_arrays.GangArray:
        return gang_arrays.GangArray(shape, "float32", NamedSharding(mesh, PartitionSpec(*spec)), process_index)

    def tree() -> dict[str, Any]:
        return {
            f"layer_{number}": {
                **{name: array(shape, "fsdp") for name, shape in _MATRICES.items()},
                "norm_1": array((8192,)),
                "norm_2": array((8192,)),
            }
            for number in range(layers)
        }

    return {"params": tree(), "mu": tree(), "nu": tree(), "step": 7}


def _write_own(temporary: Temporary, prepared: PreparedSave, processes: int, rank: int) -> float:
    """Writes the records of process ``rank``, with the code of a save. Returns how many seconds that took."""
    files = {
        layout.in_item(layout.STATE_ITEM, chunk.file): StoredFile(chunk.bytes, rank)
        for chunk in prepared.plan.chunks
        if chunk.mine
    }
    copies = {layout.in_item(layout.STATE_ITEM, chunk.file): 0 for chunk in prepared.plan.chunks if not chunk.mine}
    data = b"{}"
    (temporary.path / layout.host_state_file(rank)).parent.make_folder()
    (temporary.path / layout.host_state_file(rank)).put(data)
    written = WrittenFiles(files | {layout.host_state_file(rank): file_of(data)}, {}, copies)
    began_s = time.perf_counter()
    plan = prepared.plan
    kept = write_manifest_part(temporary.path, layout.STATE_ITEM, rank, plan.chunks, plan.copied, written)
    _record(temporary, prepared, processes, rank, kept, len(files))
    return time.perf_counter() - began_s


def _write_others(
    temporary: Temporary,
    prepared: PreparedSave,
    owners: Mapping[int, chunk_owners.LeafOwners],
    processes: int,
    rank: int,
) -> None:
    """Writes the records of all processes but ``rank``."""
    chunks: list[dict[str, StoredFile]] = [{} for _ in range(processes)]
    local: list[dict[str, int]] = [{} for _ in range(processes)]
    for position, found in owners.items():
        spec = prepared.specs[position]
        assert spec is not None
        for index, process in zip(grid(spec), found.in_grid_order().tolist(), strict=True):
            path = layout.in_item(layout.STATE_ITEM, spec.chunk_file(index))
            chunks[process][path] = StoredFile(found.chunk_bytes, process)
            if position in prepared.plan.copied:
                local[process][path] = 0
    gang = OneOf(0, processes)
    first = operation.small_files(Layout(temporary.path.parent), temporary, gang, prepared, NO_EXTRAS, {})
    for path, data in first.items():
        (temporary.path / path).parent.make_folder()
        (temporary.path / path).put(data)

    def write(process: int) -> None:
        part = ManifestPart(chunks[process], {}).to_bytes()
        (temporary.path / layout.manifest_part(process)).put(part)
        files = {layout.manifest_part(process): file_of(part), layout.host_state_file(process): file_of(b"{}")}
        if process == 0:
            files |= {path: file_of(data) for path, data in first.items()}
        kept = WrittenFiles(files, local[process], {})
        _record(temporary, prepared, processes, process, kept, len(chunks[process]))

    with ThreadPoolExecutor(_WRITERS) as threads:
        list(threads.map(write, (process for process in range(processes) if process != rank)))


def _record(
    temporary: Temporary, prepared: PreparedSave, processes: int, process: int, kept: WrittenFiles, chunks: int
) -> None:
    record = DoneRecord(
        step=temporary.step,
        item=layout.STATE_ITEM,
        attempt=temporary.attempt,
        ordinal=temporary.ordinal,
        process_index=process,
        process_count=processes,
        digest=prepared.digest,
        arrays=prepared.arrays if process == 0 else None,
        files=kept.files,
        values=kept.values,
        copies=kept.copies,
        host_state=(),
        begun_ns=0,
        chunks=chunks,
        plan=prepared.plan.checksum,
    )
    commit.of(Layout(temporary.path.parent)).record(temporary, record, lambda: None)
