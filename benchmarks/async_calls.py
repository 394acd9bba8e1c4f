"""What a save costs the training, run in a thread or in a worker process, with Orbax beside them.

    python -m benchmarks.async_calls [--mib 512] [--repeats 5] [--alone-s 2] [--json FILE]

One process, by turns: a training step of 5 ms in a loop, alone; and the same loop while 512 MiB are written by
``ThreadAsyncCaller``, by ``PersistentAsyncCaller`` (with its usual priority, and with ``idle``), by Gracepoint's engine
(in a thread, and in a worker), and by Orbax's ``AsyncCheckpointer``. The slow-down is the median step during the write,
divided by the median step of the turns alone before and after it. The step is a jitted computation on one CPU device
with one thread, as a step on an accelerator leaves most of the CPU alone.

How much a step slows down beside any writer depends on the machine: cores share memory, caches, and often the host's
I/O threads. So one more process takes turns, which has no JAX and no Gracepoint and only writes as many bytes from
touched memory in the same way. Its slow-down is the machine's limit, and the worker's goal is a ratio to it.

The hand-over is compared with a copy of as many bytes within this process, which comes right before it in each turn. Of
the engine it also measures emergency saves, and a periodic save while all cores are busy
(``benchmarks.async_calls_engine``).
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax.numpy as jnp
import numpy as np

from benchmarks import async_calls_writing as writing
from benchmarks import report
from benchmarks.async_calls_engine import Engine, busy_cores
from benchmarks.async_calls_steps import SlowDown, make_step, repeat
from benchmarks.report import Better, Figure
from gracepoint.async_calls import AsyncCaller, AsyncRequest, PersistentAsyncCaller, ThreadAsyncCaller

_TIMEOUT_S = 300.0
_LIMIT = "limit, a process that only writes"


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (%(default)s)")
    parser.add_argument("--alone-s", type=float, default=2.0, help="seconds of steps alone (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    flags = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        figures = measure(Path(folder), flags.mib << 20, flags.repeats, flags.alone_s)
    report.publish(figures, flags.json, load_average=load, state_bytes=flags.mib << 20)
    return 1 if any(figure.met is False for figure in figures) else 0


def measure(folder: Path, size: int, repeats: int, alone_s: float) -> list[Figure]:
    """Measures everything, the ways by turns."""
    state = {f"w{n}": np.full(size // 8 // 4, n, np.float32) for n in range(8)}
    step = make_step()
    callers: dict[str, AsyncCaller] = {
        "thread": ThreadAsyncCaller(),
        "worker": PersistentAsyncCaller(),
        "idle worker": PersistentAsyncCaller(idle=True),
    }
    blocked: dict[str, list[float]] = {}
    slow: dict[str, list[SlowDown]] = {}
    took: dict[str, list[float]] = {}
    copies: list[float] = []
    ready_s = statistics.median(_ready_s(folder) for _ in range(repeats))
    ways: dict[str, Callable[[], Callable[[], bool]]] = {
        name: (lambda caller=caller: _start(caller, state, folder / "state"))  # type: ignore[misc]
        for name, caller in callers.items()
    }
    arrays = {name: jnp.asarray(array) for name, array in state.items()}
    engines = {f"Gracepoint, {name}": Engine(arrays, folder / f"engine-{name}", name) for name in ("thread", "worker")}
    ways |= {name: engine.start for name, engine in engines.items()}
    emergencies: dict[str, list[float]] = {name: [] for name in engines}
    ways["Orbax"] = _orbax(state, folder)
    plain = _PlainWriter(state, folder / "plain")
    copy_s = _copying(state)
    ways[_LIMIT] = plain.start
    for turn in range(repeats + 1):  # the first touches memory, and does not count
        alone_before = repeat(step, lambda: False, alone_s)
        # Each way comes first once: a disk is faster after a way that left it alone.
        names = deque(ways)
        names.rotate(-turn)
        for name in names:
            start = ways[name]
            gc.collect()
            if name == "worker" and turn:
                copies.append(copy_s())
            began = time.monotonic()
            ended = start()
            block_s = time.monotonic() - began
            during = repeat(step, ended, _TIMEOUT_S)
            while not ended():
                time.sleep(0.01)
            took_s = time.monotonic() - began
            alone_after = repeat(step, lambda: False, alone_s)
            if turn:
                blocked.setdefault(name, []).append(block_s)
                slow.setdefault(name, []).append(during.over(alone_before, alone_after))
                took.setdefault(name, []).append(took_s)
            alone_before = alone_after
        for name, engine in engines.items():
            emergencies[name].append(engine.emergency_s())
    with busy_cores():
        busy = {name: engine.periodic_s() for name, engine in engines.items()}
    worker_bytes, jax_loaded = _worker_memory(callers["worker"], folder)
    for caller in callers.values():
        caller.close()
    for engine in engines.values():
        engine.close()
    plain.close()
    if jax_loaded:
        raise RuntimeError("the worker process has loaded JAX")
    elsewhere = [name for name in ways if "worker" in name or name == _LIMIT]  # not written by this process
    return [
        *(
            Figure(f"{name}: a save blocks training", statistics.median(blocked[name]), "s")
            for name in ways
            if name != _LIMIT
        ),
        *(
            Figure(f"{name}: training step during the write / alone", _median(slow[name], "median"), "x")
            for name in ways
        ),
        *(Figure(f"{name}: the step's CPU time / alone", _median(slow[name], "ran"), "x") for name in elsewhere),
        *(
            Figure(f"{name}: a step waits for a core in addition", 1e3 * _median(slow[name], "waits_s"), "ms")
            for name in elsewhere
        ),
        *(
            Figure(
                f"{name}: training step during the write / during the limit's",
                statistics.median(
                    ours.median / limit.median for ours, limit in zip(slow[name], slow[_LIMIT], strict=True)
                ),
                "x",
                1.02 if "worker" in name else None,
            )
            for name in ways
            if name != _LIMIT
        ),
        *(Figure(f"{name}: write beside the step", statistics.median(took[name]), "s") for name in ways),
        *(Figure(f"{name}: emergency save", statistics.median(emergencies[name][1:]), "s") for name in engines),
        *(Figure(f"{name}: write while all cores are busy", busy[name], "s") for name in engines),
        Figure("copy within the process", statistics.median(copies), "s"),
        Figure(
            "worker: hand-over bandwidth",
            sum(array.nbytes for array in state.values()) / 2**30 / statistics.median(blocked["worker"]),
            "GiB/s",
        ),
        Figure(
            "worker: hand-over / copy",
            statistics.median(ours / copy for ours, copy in zip(blocked["worker"], copies, strict=True)),
            "x",
            1.1,
        ),
        Figure("worker: start until the first call has ended", ready_s, "s", 0.5),
        Figure("worker: own memory beyond the state", worker_bytes / 2**20, "MiB", 64, Better.LESS),
    ]


def _median(slow: list[SlowDown], field: str) -> float:
    return float(statistics.median(getattr(each, field) for each in slow))


def _start(caller: AsyncCaller, state: dict[str, Any], path: Path) -> Callable[[], bool]:
    preload = (
        (lambda: state)
        if isinstance(caller, PersistentAsyncCaller)
        else lambda: {k: v.copy() for k, v in state.items()}
    )
    caller.schedule_async_call(AsyncRequest(writing.write, (str(path),), [], preload_fn=preload))
    return caller.is_current_async_call_done


def _orbax(state: dict[str, Any], folder: Path) -> Callable[[], Callable[[], bool]]:
    import orbax.checkpoint as ocp

    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())

    def start() -> Callable[[], bool]:
        target = folder / "orbax"
        shutil.rmtree(target, ignore_errors=True)
        checkpointer.save(target, args=ocp.args.PyTreeSave(state))
        waits = threading.Thread(target=checkpointer.wait_until_finished)
        waits.start()
        return lambda: not waits.is_alive()

    return start


class _PlainWriter:
    """A process that holds as many bytes as the state has, and writes them whenever it is told to."""

    def __init__(self, state: dict[str, Any], path: Path) -> None:
        sizes = [str(array.nbytes) for array in state.values()]
        command = [sys.executable, "-m", "benchmarks.async_calls_writing", str(path), *sizes]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def start(self) -> Callable[[], bool]:
        """Lets it write once; returns what says whether it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write("write\n")
        self._process.stdin.flush()
        waits = threading.Thread(target=self._line)
        waits.start()
        return lambda: not waits.is_alive()

    def _line(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the process that only writes has ended")

    def close(self) -> None:
        """Ends it."""
        self._process.communicate(timeout=_TIMEOUT_S)


def _copying(state: dict[str, Any]) -> Callable[[], float]:
    """Returns what copies the state into memory that was touched before, and returns the seconds that it takes."""
    into = {name: np.ones_like(array) for name, array in state.items()}

    def copy_s() -> float:
        began = time.monotonic()
        for name, array in state.items():
            into[name][:] = array
        return time.monotonic() - began

    return copy_s


def _ready_s(folder: Path) -> float:
    """Returns the seconds from the start of a worker until it has run a first, empty call."""
    caller = PersistentAsyncCaller()
    began = time.monotonic()
    caller.schedule_async_call(AsyncRequest(writing.write, ({}, str(folder / "empty")), []))
    caller.is_current_async_call_done(blocking=True)
    duration = time.monotonic() - began
    caller.close()
    return duration


def _worker_memory(caller: AsyncCaller, folder: Path) -> tuple[int, bool]:
    caller.schedule_async_call(AsyncRequest(writing.write_memory, (str(folder / "memory"),), []))
    caller.is_current_async_call_done(blocking=True)
    size, jax_loaded = (folder / "memory").read_text().split()
    return int(size), jax_loaded == "1"


if __name__ == "__main__":
    sys.exit(main())
