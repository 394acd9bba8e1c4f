"""Measures saves and restores of a state on one accelerator, for ``benchmarks.accelerator``.

    accelerator_figures.py DIRECTORY CPU_MIB

Prints a line ``figure {...}`` for each figure as soon as it is there, so that those before an error or a time limit
are kept. All goes through the public interface. First a small state, which is also written and restored; then one of
half of the device's memory, as far as host memory and the disk allow, which is only copied: the process ends while it
is still being written.

This thread measures. A second one ("memory watch") looks how much memory of the device is used; it ends with each
measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import gracepoint
from benchmarks.accelerator import DEVICE, FIGURE
from gracepoint import machine
from gracepoint.checkpoint import WriteOptions, restore, save

MIB, GIB = 1 << 20, 1 << 30
_LEAF_BYTES = 256 * MIB
_SMALL_BYTES = 8 * GIB
_READERS, _PIECE_BYTES = 16, 16 * MIB
_REPEATS = 3
_STEP_S = 0.02
_SAVED_AT, _BASELINE_STEPS, _MOST_STEPS = 100, 50, 90


@dataclasses.dataclass
class Bench:
    """What all measurements share.

    Attributes:
        device: The device.
        folder: The folder for checkpoints.
        cpu_bytes: Size of the large state on the CPU.
    """

    device: Any
    folder: Path
    cpu_bytes: int

    @property
    def on_cpu(self) -> bool:
        return bool(self.device.platform == "cpu")

    @property
    def options(self) -> WriteOptions:
        """Values leave the CPU's devices as they leave an accelerator's."""
        return WriteOptions(pinned_host_transfer=True) if self.on_cpu else WriteOptions()

    def memory_bytes(self) -> int:
        """Memory of the device."""
        stats = self.device.memory_stats()
        fraction = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return 2 * self.cpu_bytes if stats is None else int(stats["bytes_limit"] / fraction)

    def used_bytes(self) -> int:
        stats = self.device.memory_stats()
        return _live_bytes() if stats is None else int(stats["bytes_in_use"])

    @contextlib.contextmanager
    def adding(self) -> Iterator[list[int]]:
        """Appends by how many bytes the block has raised the memory in use on the device at most."""
        before, found, peak_before = self.used_bytes(), list[int](), self._peak_bytes()
        ended, most = threading.Event(), [before]

        def watch() -> None:
            while not ended.wait(0.001):
                most.append(max(most.pop(), self.used_bytes()))

        watching = threading.Thread(target=watch, name="memory watch", daemon=True)
        watching.start()
        yield found
        ended.set()
        watching.join()
        # The device tells the peak of the whole process. If that was before, the samples tell that of the block.
        peak = self._peak_bytes()
        found.append((peak if peak > peak_before else most[0]) - before)

    def _peak_bytes(self) -> int:
        stats = self.device.memory_stats()
        return 0 if stats is None else int(stats["peak_bytes_in_use"])


def tell(name: str, value: float | None, unit: str, **goal: float) -> None:
    """Prints one figure. ``goal`` is ``at_most`` or ``at_least``. None: it could not be measured."""
    print(FIGURE + json.dumps({"name": name, "value": value, "unit": unit, **goal}), flush=True)


def main(directory: str, cpu_mib: str) -> None:
    bench = Bench(jax.devices()[0], Path(directory), int(cpu_mib) * MIB)
    disk_s = _write_s_per_byte(bench.folder)
    half = _largest(bench)
    small = min(_SMALL_BYTES, half // 2, max(64 * MIB, int(20 / disk_s)))
    small = max(1, small // _leaf_bytes(bench)) * _leaf_bytes(bench)
    print(
        DEVICE + f"{bench.device.device_kind} ({bench.device.platform}), {bench.memory_bytes() / GIB:.1f} GiB; "
        f"{machine.available_cores()} cores; JAX {jax.__version__}; disk {1 / disk_s / GIB:.2f} GiB/s; states of "
        f"{small / GIB:.2f} and {half / GIB:.2f} GiB ({half / bench.memory_bytes():.0%} of the device's memory)",
        flush=True,
    )
    _measure_small(bench, small)
    _measure_half(bench, half)
    sys.stdout.flush()
    os._exit(0)  # the save of the last state is not waited for


def _largest(bench: Bench) -> int:
    """Returns half of the device's memory, or what host memory and the disk have room for."""
    host = min(machine.left_by_pool().values(), default=machine.available_memory_bytes()) * 45 // 100
    disk = shutil.disk_usage(bench.folder).free * 7 // 10
    return max(2 * _leaf_bytes(bench), min(bench.memory_bytes() // 2, host, disk))


def _leaf_bytes(bench: Bench) -> int:
    return 80 * MIB if bench.on_cpu else _LEAF_BYTES  # in each case more than is transferred as a whole


def _state(bench: Bench, size_bytes: int) -> dict[str, jax.Array]:
    """Makes a state of large arrays, without temporary memory."""
    leaf_bytes = _leaf_bytes(bench)
    make = jax.jit(
        lambda number: jax.lax.iota(jnp.float32, leaf_bytes // 4).reshape(-1, 1024) + number,
        out_shardings=SingleDeviceSharding(bench.device),
    )
    count = max(1, size_bytes // leaf_bytes)
    state = {f"w{number:03}": make(np.float32(number)) for number in range(count)}
    jax.block_until_ready(state)
    return state


def _bytes_of(state: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


# A small state: written and restored.


def _measure_small(bench: Bench, size_bytes: int) -> None:
    state = _state(bench, size_bytes)
    form = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
        state,
    )
    path = bench.folder / "small"
    with bench.adding() as added:
        save(path, state, options=bench.options)
    tell("device memory added by a save that writes at once", max(added[0], 0) / MIB, "MiB", at_most=64)
    last = {name: float(leaf[-1, -1]) for name, leaf in state.items()}
    del state
    plain, ours = [], []
    for _ in range(_REPEATS):
        plain.append(_read_and_copied_s(bench, path))
        _forget(path)
        began_s = time.monotonic()
        restored = jax.block_until_ready(restore(path, form))
        ours.append(time.monotonic() - began_s)
        assert {name: float(leaf[-1, -1]) for name, leaf in restored.items()} == last, "other values were restored"
        del restored
    tell("a restore, against reading and copying overlapped", min(plain) / min(ours), "", at_least=0.9)
    tell("a restore reaches the device", size_bytes / min(ours) / GIB, "GiB/s")
    shutil.rmtree(path)


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and each.stat().st_size >= MIB)


def _forget(path: Path) -> None:
    """Has the system forget what it holds of the files in its page cache."""
    for file in _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        if sys.platform == "linux":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read_and_copied_s(bench: Bench, path: Path) -> float:
    """Returns how long plain threads take that read the files in pieces and copy each to the device."""
    _forget(path)
    pieces = [
        (file, offset) for file in _files(path) for offset in range(0, file.stat().st_size // 4 * 4, _PIECE_BYTES)
    ]

    def read(piece: tuple[Path, int]) -> jax.Array:
        file, offset = piece
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            values = np.empty(min(_PIECE_BYTES, file.stat().st_size // 4 * 4 - offset), np.uint8)
            view = values.data
            while view and (count := opened.readinto(view)):
                view = view[count:]
        return jax.block_until_ready(jax.device_put(values.view(np.float32), bench.device))

    began_s = time.monotonic()
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(read, pieces))
    took_s = time.monotonic() - began_s
    del found
    return took_s


# A state of half of the device's memory: copied by a periodic save, with steps beside.


def _measure_half(bench: Bench, size_bytes: int) -> None:
    state: dict[str, Any] = {"large": _state(bench, size_bytes), "seen": jnp.zeros((128, 128), jnp.float32)}
    size_bytes = _bytes_of(state["large"])
    pinned_s = _pinned_copy_s(bench, state["large"])
    tell("a pinned copy of the state leaves the device", size_bytes / pinned_s / GIB, "GiB/s")
    step = _step_of(_STEP_S, bench)
    session = gracepoint.attach(
        bench.folder / "half", save_every_steps=_SAVED_AT, keep_last=1, write_options=bench.options
    )
    session.restore(like=state)
    measured = [_passed(session, number, state, step) for number in range(1, _SAVED_AT)]
    alone_s = measured[-_BASELINE_STEPS:]
    jax.block_until_ready(state)
    stats: list[tuple[str, float]] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: stats.append((event, duration_secs))
    )
    with bench.adding() as added:
        began_s = time.monotonic()
        session.step(_SAVED_AT, state)
        blocked_s = time.monotonic() - began_s
    beside_s = []
    for number in range(_SAVED_AT + 1, _SAVED_AT + _MOST_STEPS):
        took_s = _passed(session, number, state, step)
        if (bench.folder / "half" / str(_SAVED_AT)).exists():
            break
        beside_s.append(took_s)
    tell("training blocked by a periodic save, against a pinned copy", blocked_s / pinned_s, "", at_most=1.2)
    tell("training blocked by that save", blocked_s, "s")
    copied_s = [value for event, value in stats if event == _COPIED]
    speed = pinned_s / max(copied_s) if copied_s else None
    tell("values leave the device, against a pinned copy", speed, "", at_least=0.9)
    tell("device memory added by a periodic save", max(added[0], 0) / MIB, "MiB", at_most=64)
    ratio = statistics.mean(beside_s) / statistics.mean(alone_s) if beside_s else None
    tell("a 20 ms step beside that save, against one alone", ratio, "", at_most=1.02)
    tell("such a step alone", statistics.mean(alone_s) * 1000, "ms")


#: The copy to host memory, as listeners of ``jax.monitoring`` are told of it.
_COPIED = "/jax/orbax/write/blocking_d2h_duration_secs"


def _passed(session: gracepoint.Session, number: int, state: dict[str, Any], step: Callable[[Any], Any]) -> float:
    """Takes one step, and passes its sync point. Returns what that took."""
    began_s = time.monotonic()
    state["seen"] = jax.block_until_ready(step(state["seen"]))
    session.step(number, state)
    return time.monotonic() - began_s


def _pinned_copy_s(bench: Bench, arrays: dict[str, jax.Array]) -> float:
    """Returns how long the arrays take to pinned host memory, two at a time; the shortest of some times."""
    pinned = SingleDeviceSharding(bench.device, memory_kind="pinned_host")

    def copy() -> float:
        began_s = time.monotonic()
        under_way: list[jax.Array] = []
        for array in arrays.values():
            under_way.append(jax.device_put(array, pinned))
            if len(under_way) > 1:
                jax.block_until_ready(under_way.pop(0))
        jax.block_until_ready(under_way)
        return time.monotonic() - began_s

    copy()  # allocates the memory
    return min(copy() for _ in range(_REPEATS))


def _step_of(seconds: float, bench: Bench) -> Callable[[Any], Any]:
    """Returns a step that takes so long: products of matrices, one after the other."""
    side = 256 if bench.on_cpu else 1024
    factor = jax.device_put(np.eye(side, dtype=np.float32), bench.device)

    def taken(seen: Any, count: Any, factor: Any) -> Any:
        product = jax.lax.fori_loop(0, count, lambda _, found: found @ factor, factor)
        return seen + product[0, 0]

    step = jax.jit(taken)

    seen = jnp.zeros((128, 128), jnp.float32)
    count = 4
    jax.block_until_ready(step(seen, count, factor))
    for _ in range(6):
        began_s = time.monotonic()
        for _ in range(5):
            jax.block_until_ready(step(seen, count, factor))
        count = max(1, math.ceil(count * seconds / ((time.monotonic() - began_s) / 5)))
    return lambda seen: step(seen, count, factor)


def _write_s_per_byte(folder: Path) -> float:
    """Returns how long a byte takes to the disk, by a file of its own."""
    block = np.ones(4 * MIB, np.uint8)
    began_s = time.monotonic()
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(32):
            file.write(block.data)
        os.fsync(file.fileno())
    (folder / "probe").unlink()
    return (time.monotonic() - began_s) / (32 * block.nbytes)


def _live_bytes() -> int:
    """Returns the bytes of all arrays; arrays that share a buffer are counted once."""
    buffers: dict[int, int] = {}
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # deleted meanwhile
            if array.sharding.memory_kind != "pinned_host":
                buffers[array.unsafe_buffer_pointer()] = array.nbytes
    return sum(buffers.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
