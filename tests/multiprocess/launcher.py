"""Starts real JAX processes for a test, collects what they print, and never leaves one behind.

    with Processes.start(SCRIPT, 2, arguments=[str(tmp_path)]) as processes:
        processes[0].wait_for_line("training")
        processes[0].signal(signal.SIGTERM)
        results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [77, 77]

A script finds its place in the environment (``here()`` reads it) and joins the cluster with
``here().initialize_jax()``, or leaves that to what it tests. Each process is forked off the nursery, which has
imported JAX already. It runs on the CPU backend, in a session of its own, writing into files (a full pipe never
blocks it), and dies with the test process. On a timeout every process that is left dumps the stacks of all its
threads (SIGABRT under faulthandler) before its group is killed. The report of a failed test has each process's whole
output (``outputs``), so an assertion need not show it; it is printed as well where the test itself hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gracepoint.process_group import ProcessGroup, SingleProcess
from tests import xla
from tests.multiprocess.nursery import Child, Nursery
from tests.ports import hold_coordinator_port

ROOT = Path(__file__).resolve().parents[2]
#: What this test has started, in order.
started: list[Processes] = []

_COORDINATOR, _INDEX, _COUNT = "TEST_COORDINATOR", "TEST_PROCESS_INDEX", "TEST_PROCESS_COUNT"


@dataclasses.dataclass(frozen=True)
class Here:
    """Where a script's own process stands."""

    coordinator: str
    process_index: int
    process_count: int

    def initialize_jax(self, *, heartbeat_timeout_s: int = 100, shutdown_timeout_s: int = 60) -> None:
        """Joins the JAX cluster of the test; nothing to do for a single process."""
        import jax

        if self.process_count > 1:
            jax.distributed.initialize(
                self.coordinator,
                self.process_count,
                self.process_index,
                initialization_timeout=60,
                heartbeat_timeout_seconds=heartbeat_timeout_s,
                shutdown_timeout_seconds=shutdown_timeout_s,
            )

    def gang(self, attempt: str) -> ProcessGroup:
        """The processes of the test as a group, over JAX's coordination service; joined to that before."""
        from gracepoint.multihost import JaxStore, StoreProcessGroup

        if self.process_count == 1:
            return SingleProcess()
        from jax._src import distributed

        store = JaxStore(distributed.global_state.client, f"test/{attempt}")
        return StoreProcessGroup(store, self.process_index, self.process_count)


def here() -> Here:
    """Reads what ``Processes.start`` put into the environment."""
    return Here(os.environ[_COORDINATOR], int(os.environ[_INDEX]), int(os.environ[_COUNT]))


@dataclasses.dataclass(frozen=True)
class Result:
    """How a process ended: ``code`` is negative (minus the signal's number) if a signal ended it."""

    code: int
    output: str = dataclasses.field(repr=False)
    ended_at: float  # time.monotonic()


def say(word: str, value: Any) -> None:
    """Prints what ``said`` finds, in one write: ``print`` makes several of a long line, and a log may come between."""
    sys.stdout.write(f"{word} {json.dumps(value)}\n")


def said(result: Result, word: str) -> list[Any]:
    """What a process has printed after this word, in order."""
    lines = result.output.splitlines()
    return [json.loads(line.removeprefix(f"{word} ")) for line in lines if line.startswith(f"{word} ")]


class Process:
    """One started process; ``output`` may be read at any time."""

    def __init__(self, child: Child, log: Path) -> None:
        self._child = child
        self._log = log
        self._ended_at: float | None = None
        self._kept: str | None = None

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._kept is None else self._kept

    def keep_output(self) -> None:
        """Makes ``output`` outlive the file."""
        self._kept = self.output

    @property
    def running(self) -> bool:
        if self._child.poll() is not None and self._ended_at is None:
            self._ended_at = time.monotonic()
        return self._ended_at is None

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self._child.poll()
        if code is None:
            return "running"
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def signal(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def wait_for_line(self, text: str, timeout_s: float = 60) -> str:
        """Returns the first line that contains ``text``; fails if the process ends before it prints one."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = self.running  # before reading, so that the last words are not missed
            for line in self.output.splitlines():
                if text in line:
                    return line
            if not running or time.monotonic() > deadline:
                raise AssertionError(f"no line with {text!r} within {timeout_s} s ({self.end}):\n{self.output}")
            time.sleep(0.005)

    def wait(self, timeout_s: float) -> Result:
        """Waits for it to end, whatever the others do; fails on a timeout."""
        _wait_until_ended(self, timeout_s)
        assert not self.running, f"still ran after {timeout_s} s:\n{self.output}"
        return self.result()

    def result(self) -> Result:
        assert not self.running
        assert self._ended_at is not None
        assert self._child.returncode is not None
        return Result(self._child.returncode, self.output, self._ended_at)

    def dump_stacks(self) -> None:
        if self.running:
            self._child.send_signal(signal.SIGABRT)

    def kill_group(self) -> None:
        self._child.kill_group()


class Processes:
    """The processes of one test.

    Attributes:
        closed: The ``with`` block is left: all have ended.
    """

    def __init__(self, processes: list[Process], port: socket.socket, logs: tempfile.TemporaryDirectory[str]) -> None:
        self.closed = False
        self._processes = processes
        self._port = port
        self._logs = logs

    @classmethod
    def start(
        cls,
        script: Path,
        count: int,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        environments: Sequence[Mapping[str, str]] | None = None,
        devices: int = 2,
        off: Nursery | None = None,
    ) -> Processes:
        """Starts ``count`` processes of ``script`` with ``devices`` CPU devices each.

        Args:
            script: A Python file, run as ``__main__`` with the repository's root on its path.
            count: How many.
            arguments: Its ``sys.argv[1:]``, the same for all.
            environment: Set in all processes.
            environments: Set in each process, by index.
            devices: ``jax.local_device_count()`` of each.
            off: The nursery that they are forked off, if not the one of all tests.
        """
        port = hold_coordinator_port()
        logs = tempfile.TemporaryDirectory(prefix="gracepoint-test-")
        processes = cls([], port, logs)
        started.append(processes)
        with contextlib.ExitStack() as if_one_fails:
            if_one_fails.enter_context(processes)
            for index in range(count):
                log = Path(logs.name) / f"{index}.log"
                log.touch()
                own = {
                    **_inherited(),
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {xla.FLAGS}",
                    _COORDINATOR: f"127.0.0.1:{port.getsockname()[1]}",
                    _INDEX: str(index),
                    _COUNT: str(count),
                    **(environment or {}),
                    **(environments[index] if environments else {}),
                }
                processes._processes.append(Process((off or nursery()).fork(script, arguments, own, log), log))
            if_one_fails.pop_all()
        return processes

    def __getitem__(self, index: int) -> Process:
        return self._processes[index]

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill_group()
            process.keep_output()
        self.closed = True
        self._port.close()
        self._logs.cleanup()

    def wait_for_any_line(self, indices: Sequence[int], text: str, timeout_s: float = 60) -> int:
        """Returns which of these processes is the first to print a line that contains ``text``."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for index in indices:
                if text in self[index].output:
                    return index
            time.sleep(0.05)
        raise AssertionError(f"none of {indices} printed {text!r} within {timeout_s} s:\n{self.output()}")

    def output(self) -> str:
        """What all have printed, each under its own heading."""
        return "\n".join(f"--- process {i}\n{p.output}" for i, p in enumerate(self._processes))

    def dump_stacks(self) -> None:
        """Lets those that still run print the stacks of their threads, and end. Waits a few seconds at most."""
        for process in self._processes:
            process.dump_stacks()
        for process in self._processes:
            _wait_until_ended(process, 3)

    def wait(self, timeout_s: float) -> list[Result]:
        """Waits for all to end; on a timeout dumps stacks, kills them and fails with all output."""
        deadline = time.monotonic() + timeout_s
        while any(running := [p.running for p in self._processes]):  # each notes when it ended
            if time.monotonic() > deadline:
                left = [i for i, runs in enumerate(running) if runs]
                self.dump_stacks()
                raise AssertionError(f"processes {left} still ran after {timeout_s} s:\n{self.output()}")
            time.sleep(0.005)
        return [p.result() for p in self._processes]


@functools.cache
def nursery() -> Nursery:
    """Returns the test process's one nursery."""
    return new_nursery()


def new_nursery(under: Sequence[str] = ()) -> Nursery:
    """Returns a nursery of the caller's own, to be closed by it; ``under`` as ``Nursery`` takes it."""
    return Nursery(_inherited(), under)


def close_nursery() -> None:
    """Ends the nursery, if there is one."""
    if nursery.cache_info().currsize:
        nursery().close()
        nursery.cache_clear()


def _inherited() -> dict[str, str]:
    """What all processes have of the environment of the tests."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("GRACEPOINT_", "JAX_", "XLA_")) and "proxy" not in k.lower()
    }
    return {**kept, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def _wait_until_ended(process: Process, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while process.running and time.monotonic() < deadline:
        time.sleep(0.01)
