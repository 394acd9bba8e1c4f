"""How much memory a save may have, how much there is, and that none is lost from save to save."""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental.layout import Format, Layout

from gracepoint import checkpoint, machine
from gracepoint.checkpoint import AsyncCheckpointer, CheckpointManager, memory
from gracepoint.checkpoint.format.array_spec import as_bytes
from gracepoint.checkpoint.options import SaveArgs, TransferPriority, WriteOptions
from gracepoint.errors import BarrierError, CheckpointError
from gracepoint.process_group import ProcessGroup, SingleProcess
from tests.unit.checkpoint.fakes.engine import engine, in_gang, outcomes_in_gang, restore, save
from tests.unit.checkpoint.fakes.transfer_recorder import Recorder

MIB = 1 << 20
MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:   {} kB\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_container_limit_leaves_out_reclaimable_page_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO.format(9_000_000),
            "proc/self/cgroup": "0::/kubepods/pod1\n",
            f"{group}/memory.max": "1000\n",
            f"{group}/memory.current": "900\n",
            f"{group}/memory.stat": "anon 300\ninactive_file 250\nactive_file 50\n",
        },
    )
    assert min(machine.left_by_pool(tmp_path).values()) == 400


def test_the_limit_of_a_group_above_counts_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO.format(9_000_000),
            "proc/self/cgroup": "0::/kubepods/pod1\n",
            "sys/fs/cgroup/kubepods/memory.max": "500\n",
            "sys/fs/cgroup/kubepods/memory.current": "100\n",
            "sys/fs/cgroup/kubepods/pod1/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/memory.current": "100\n",
        },
    )
    assert min(machine.left_by_pool(tmp_path).values()) == 400


def test_a_container_that_sees_its_group_as_the_root_is_understood(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "500\n",
            "sys/fs/cgroup/memory.current": "100\n",
        },
    )
    assert min(machine.left_by_pool(tmp_path).values()) == 400


def test_groups_of_the_first_version_are_understood(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/pod1\n4:memory:/pod1\n",
            "sys/fs/cgroup/memory/pod1/memory.limit_in_bytes": "500\n",
            "sys/fs/cgroup/memory/pod1/memory.usage_in_bytes": "100\n",
        },
    )
    assert min(machine.left_by_pool(tmp_path).values()) == 400


def test_without_a_group_the_machine_s_memory_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO.format(7)})
    assert machine.left_by_pool(tmp_path) == {"machine": 7 * 1024}


def test_what_nothing_reports_is_not_known_and_not_zero(tmp_path: Path) -> None:
    assert machine.left_by_pool(tmp_path) == {}
    memory.check_fits(1 << 60, None, gang=SingleProcess(), key="k", free_memory=dict)


def test_a_snapshot_that_may_not_be_taken_is_refused_before_training_starts(tmp_path: Path) -> None:
    state = {"w": np.zeros(100)}
    checkpointer = engine(tmp_path, host_memory_limit_bytes=799)
    message = "needs 800 bytes of host memory in this process for a snapshot of its part of the state, and "
    with pytest.raises(CheckpointError, match=re.escape(message + "host_memory_limit_bytes allows 799: give")):
        checkpointer.prepare(state)
    checkpointer.prepare(state, in_background=False)  # an emergency takes no snapshot
    engine(tmp_path, host_memory_limit_bytes=800).prepare(state)


def test_the_bound_holds_without_a_session_too(tmp_path: Path) -> None:
    for made in (AsyncCheckpointer, lambda **options: CheckpointManager(tmp_path, **options)):
        with made(host_memory_limit_bytes=800) as checkpointer:
            checkpointer.prepare({"w": np.zeros(100)})
            with pytest.raises(CheckpointError, match="host_memory_limit_bytes allows 800: give"):
                checkpointer.prepare({"w": np.zeros(101)})


def refused(left: Sequence[dict[str, int]], needed: Sequence[int]) -> list[Any]:
    """Returns what each process is told that needs so much and sees so much left; empty where it may take it."""

    def run(gang: ProcessGroup) -> Any:
        here = gang.process_index
        try:
            memory.check_fits(needed[here], None, gang=gang, key="k", free_memory=lambda: left[here])
        except CheckpointError as error:
            return re.findall(r"needs (.*) for a snapshot of its part of the state, and (.*): give", str(error)).pop()
        return ""

    return in_gang(len(needed), run)


def test_snapshot_without_memory_is_refused_before_training() -> None:
    assert refused([{"machine": 800}], [800]) == [""]
    told = ("801 bytes of host memory in this process", "this process can still have 800")
    assert refused([{"machine": 900, "machine/1": 800}], [801]) == [told]


def test_processes_sharing_a_container_refuse_together() -> None:
    pods = [{"a": 1000, "a/1": 100}, {"a": 1000, "a/1": 100}, {"a": 1000, "a/2": 100}]
    assert refused(pods, [50, 50, 60]) == ["", "", ""]
    shared = "processes 0, 1 share a machine or container, need 120 and can have 100"
    assert refused(pods, [60, 60, 60]) == [
        ("60 bytes of host memory in this process", shared),
        ("60 bytes of host memory in this process", shared),
        ("60 bytes of host memory in process 0", shared),
    ]


def test_processes_on_one_machine_share_it_whatever_containers_they_are_in() -> None:
    pods = [{"a": 100, "a/1": 90}, {"a": 100, "a/2": 90}]
    shared = "processes 0, 1 share a machine or container, need 120 and can have 100"
    assert refused(pods, [60, 60]) == [("60 bytes of host memory in this process", shared)] * 2
    assert refused([{"a": 100}, {"b": 100}], [60, 60]) == ["", ""]


def test_process_that_cannot_prepare_notifies_waiting_peers(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        engine(tmp_path, gang).prepare({"w": object() if gang.process_index else np.zeros(3)})

    waiting, failed = outcomes_in_gang(2, run)
    assert isinstance(failed, CheckpointError)
    assert isinstance(waiting, BarrierError)
    assert "process 1 reported CheckpointRefused" in str(waiting)


def test_leaves_that_are_copied_later_need_no_memory_for_a_snapshot(tmp_path: Path) -> None:
    class Later(Recorder):
        def key_priority(self, keypath: object) -> TransferPriority:
            return TransferPriority.ASYNCHRONOUS_DEPRIORITIZED

    options = WriteOptions(device_host_max_bytes=100, callback=Later())
    engine(tmp_path, host_memory_limit_bytes=1, options=options).prepare({"w": jnp.zeros(100)})


@pytest.mark.long
@pytest.mark.parametrize("in_memory", [False, True], ids=["direct I/O", "page cache"])
@pytest.mark.parametrize("case", ["transposed", "transposed bfloat16", "cast"])
def test_streaming_save_copies_only_leaves_stored_in_another_layout(tmp_path: Path, in_memory: bool, case: str) -> None:
    dtype = jnp.float32 if case == "transposed" else jnp.bfloat16
    leaf = jnp.arange(80 * MIB // dtype.dtype.itemsize, dtype=dtype).reshape(-1, 4096)
    if "transposed" in case:
        leaf = jax.device_put(leaf, Format(Layout(major_to_minor=(1, 0)), leaf.sharding))
    save_args = SaveArgs(dtype=jnp.float32) if case == "cast" else None
    with tempfile.TemporaryDirectory(dir="/dev/shm" if in_memory else tmp_path) as folder:
        with AsyncCheckpointer() as checkpointer:
            checkpointer.save_and_wait(f"{folder}/small", {"w": leaf[:1]}, save_args=save_args)
            jax.block_until_ready(leaf)
            gc.collect()
            before_bytes = _forget_peak()
            checkpointer.save_and_wait(f"{folder}/large", {"w": leaf}, save_args=save_args)
            assert _peak_bytes() - before_bytes < 64 * MIB
        found = checkpoint.restore(f"{folder}/large")["w"]
        assert as_bytes(np.asarray(found)) == as_bytes(np.asarray(leaf).astype(found.dtype))


@pytest.mark.long
def test_memory_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    state = {"w": jnp.zeros(MIB, jnp.float32), "b": jnp.zeros(10)}  # 4 MiB
    files = engine(tmp_path / "files", keep_last=1)
    tree = engine(tmp_path / "tree", options=WriteOptions(use_ocdbt=True), keep_last=1)
    process = psutil.Process()
    rss = {}
    for step in range(1, 141):
        checkpointer = files if step % 4 < 2 else tree
        if step % 2:
            checkpointer.save_in_background(step, state, {"step": step})
        else:
            save(checkpointer, step, state)
        rss[step] = process.memory_info().rss
    for checkpointer in (files, tree):
        checkpointer.close(30)
    # Were one of the four kinds of saves to lose a copy of its state, that would be 80 MiB; by the sixtieth save most
    # threads' allocators have kept what they will.
    assert rss[140] - rss[60] < 32 * MIB, [size // MIB for size in rss.values()]


@pytest.mark.long
def test_leaf_over_two_gib_is_saved_without_a_copy_and_restored(tmp_path: Path) -> None:
    length = (1 << 31) + (3 << 20) + 5
    leaf = np.zeros(length, np.uint8)  # memory that was never touched costs none
    marks = {0: 1, (1 << 31) - 1: 2, 1 << 31: 3, length - 1: 4}
    for position, value in marks.items():
        leaf[position] = value
    checkpointer = engine(tmp_path)
    before_bytes = _forget_peak()
    save(checkpointer, 1, {"w": leaf})
    assert _peak_bytes() - before_bytes < 512 * MIB
    before_bytes = _forget_peak()
    restored = restore(tmp_path, {"w": leaf})
    assert _peak_bytes() - before_bytes < length + 512 * MIB
    assert restored is not None
    assert np.count_nonzero(restored.state["w"]) == len(marks)
    assert {position: int(restored.state["w"][position]) for position in marks} == marks


def _forget_peak() -> int:
    """Returns the resident memory, above which the peak counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
