"""The four walks of the data, traced while the real code runs: ``python -m tests.walks``.

The rule:

* A walk has *stations*: the function where the data comes in, those where it is kept or changes its form, and the one
  where it leaves. ``WALKS`` names them. The walk ends at the first call of the last station.
* A module is *passed* if it has a frame on a call path from the first station to a station. A call path goes on where
  a call is handed to another task or thread: a callback or task is scheduled, an event is set, a thread is started,
  work is submitted to a pool. A station's calls count until a later station is called: what is done with the data
  beside its way, such as writing it to the API server, is another walk.
* ``SHARED`` names what every room uses: the wire's names and messages, errors, logs and metrics. It is never passed.

So a module that only answers a question on the way is not passed: it can be read later, and the data's way is
understood without it. How many modules have any call on the way is printed beside it.

Each walk has a scenario: a node is tainted while a pod is subscribed; a small state is saved periodically; it is
restored; the primary process reports that its save is committed. The API server is in memory, everything else is real.
A scenario runs once before it is traced, so that imports and compilation do not count.

Threads: the trace is called in every thread that starts while it is installed. It keeps its path in a context variable,
which tasks and threads inherit; what it collects is only added to until ``ended`` is set, and read after that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import dataclasses
import inspect
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kopf
import trustme

from gracepoint.wire.messages import Phase
from gracepoint.wire.names import PATH_REPORT
from gracepoint_operator.kube import kinds
from gracepoint_operator.watches import handlers
from tests import accelerators, xla
from tests.contract.fakes.replicas import Replica, bound_cluster, replicas
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.replica import report
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "gracepoint": ROOT / "sidecar" / "gracepoint",
    "gracepoint_operator": ROOT / "operator" / "gracepoint_operator",
}
SHARED = ("gracepoint.wire", "gracepoint.errors", "gracepoint_operator.observability")
_WAIT_S = 30.0
#: A periodic task can take the data along; the call path then begins there, and the scenario is played again.
_PLAYS = 3
_QUIET_S = 0.5  # ten times as long as a replica waits here between two writes of one object
_RUNS_CALLBACKS = asyncio.Handle._run.__code__

CallPath = tuple[str, ...]
_path: contextvars.ContextVar[CallPath | None] = contextvars.ContextVar("path", default=None)


@dataclasses.dataclass(frozen=True)
class Walk:
    """One way of the data.

    Attributes:
        name: Where from and where to.
        stations: Qualified names of functions, in the order in which the data comes to them.
        play: Runs the scenario once. It gives the control back just before the data comes in.
    """

    name: str
    stations: tuple[str, ...]
    play: Callable[[], contextlib.AbstractContextManager[Callable[[], None]]]


class Trace:
    """Records one walk; made by ``traced``.

    Attributes:
        passed: Modules that are passed, in order, with the number of stations to whose call paths they belong.
        beside: All modules that had a call on the way, also those that are not passed.
        missing: Stations that nobody has called yet.
        armed: False until the data comes in; calls before that do not count.
        ended: Set at the last station.
    """

    def __init__(self, stations: Sequence[str]) -> None:
        self.passed: dict[str, set[str]] = {}
        self.beside: set[str] = set()
        self.missing = list(stations)
        self.armed = False
        self.ended = threading.Event()
        self._stations = tuple(stations)
        self._at = 0  # the station that the data has come to

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """What ``sys.setprofile`` calls."""
        if event != "call" or not self.armed or self.ended.is_set() or (module := module_of(frame.f_code)) is None:
            return
        station = f"{module}.{frame.f_code.co_qualname}"
        if _path.get() is None:
            if station != self._stations[0]:
                return
            _path.set(())
        if not _is_shared(module):
            self.beside.add(module)
        if station in self._stations[self._at :]:
            self._at = self._stations.index(station)
            if station in self.missing:
                self.missing.remove(station)
            for passed in path_to(frame):
                self.passed.setdefault(passed, set()).add(station)
            if station == self._stations[-1]:
                self.ended.set()


def module_of(code: CodeType) -> str | None:
    """The dotted name of the module that the code stands in; None for code of others and for what runs at import."""
    if code not in _modules:
        _modules[code] = None if code.co_name == "<module>" else _module_at(code.co_filename)
    return _modules[code]


_modules: dict[CodeType, str | None] = {}


def _module_at(file: str) -> str | None:
    for package, folder in PACKAGES.items():
        if file.startswith(f"{folder}/"):
            parts = [package, *Path(file).relative_to(folder).with_suffix("").parts]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return None


def _is_shared(module: str) -> bool:
    return any(module == shared or module.startswith(f"{shared}.") for shared in SHARED)


def path_to(frame: FrameType | None) -> CallPath:
    """Modules of the call path to a frame, outermost first, each once.

    In an event loop it begins at the callback: who runs the loop did not hand the data on.
    """
    stack = []
    while frame is not None and frame.f_code is not _RUNS_CALLBACKS:
        module = module_of(frame.f_code)
        if module is not None and not _is_shared(module):
            stack.append(module)
        frame = frame.f_back
    return tuple(dict.fromkeys((*(_path.get() or ()), *reversed(stack))))


@contextlib.contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Calls ``trace`` in this thread and in all that start meanwhile, and hands the call path on with each handover."""

    def handed_on(context: contextvars.Context) -> contextvars.Context:
        if _path.get() is not None:
            with contextlib.suppress(RuntimeError):  # entered: a task that schedules itself is on its own path already
                context.run(_path.set, path_to(inspect.currentframe()))
        return context

    loop, start, submit = asyncio.BaseEventLoop, threading.Thread.start, ThreadPoolExecutor.submit
    soon, threadsafe = loop.call_soon, loop.call_soon_threadsafe

    # A task that waits is woken by call_soon with the task's own context.
    def call_soon(self: Any, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        return soon(self, callback, *args, context=handed_on(context or contextvars.copy_context()))

    def call_soon_threadsafe(
        self: Any, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return threadsafe(self, callback, *args, context=handed_on(context or contextvars.copy_context()))

    def start_thread(thread: threading.Thread) -> None:
        run, context = thread.run, handed_on(contextvars.copy_context())
        thread.run = lambda: context.run(run)  # type: ignore[method-assign]
        start(thread)

    def submit_work(pool: ThreadPoolExecutor, work: Any, /, *args: Any, **named: Any) -> Future[Any]:
        return submit(pool, handed_on(contextvars.copy_context()).run, work, *args, **named)

    patches: list[tuple[Any, str, Any]] = [
        (loop, "call_soon", call_soon),
        (loop, "call_soon_threadsafe", call_soon_threadsafe),
        (threading.Thread, "start", start_thread),
        (ThreadPoolExecutor, "submit", submit_work),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, function in patches:
        setattr(owner, name, function)
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        for owner, name, function in before:
            setattr(owner, name, function)


def walked(walk: Walk) -> Trace:
    """Plays the walk's scenario and traces it.

    Raises:
        AssertionError: A station was not reached, for example because a function has another name now.
    """
    with walk.play() as bring:
        bring()
    for _ in range(_PLAYS):
        trace = Trace(walk.stations)
        contextvars.copy_context().run(_play, walk, trace)
        if not trace.missing:
            return trace
    raise AssertionError(
        f"{walk.name}: found no call of {', '.join(trace.missing)} within {_WAIT_S:.0f} s and before the last "
        f"station, expected one. If a function was renamed, give its new name in WALKS"
    )


def _play(walk: Walk, trace: Trace) -> None:
    with traced(trace), walk.play() as bring:
        trace.armed = True
        bring()
        trace.ended.wait(_WAIT_S)


@contextlib.contextmanager
def _tainted_node() -> Iterator[Callable[[], None]]:
    with _replica() as replica:
        registry = kopf.OperatorRegistry()
        handlers.watch_all(registry, replica.core)
        see: Any
        (see,) = (h.fn for h in registry._watching.get_all_handlers() if h.id == "see-nodes")
        stream = replica.stream()
        stream.next()
        node = replica.api.add(kinds.NODES, objects.node("node-1", taints=[objects.taint()]))

        def bring() -> None:
            # The handler never awaits, so its first step is its last.
            with contextlib.suppress(StopIteration):
                see(event={"type": "MODIFIED", "object": node}).send(None)
            stream.notice()

        yield bring
        stream.close()


@contextlib.contextmanager
def _reported_commit() -> Iterator[Callable[[], None]]:
    with _replica() as replica:
        stream = replica.stream()
        stream.next()
        replica.taint()
        stream.notice()
        _wait_for_writes(replica)
        yield lambda: replica.post("token-0", PATH_REPORT, report(Phase.COMMITTED))
        stream.close()


def _wait_for_writes(replica: Replica) -> None:
    """Waits until the preemption is recorded and no call of the API has come for a while.

    A write that is under way would take the report along, on a call path that begins at the notice.
    """
    calls, changed_s = 0, time.monotonic()

    def is_quiet() -> bool:
        nonlocal calls, changed_s
        if len(replica.api.calls) != calls:
            calls, changed_s = len(replica.api.calls), time.monotonic()
        recorded = any(body.get("status", {}).get("phase") for body in replica.api.of(kinds.PREEMPTIONS))
        return recorded and time.monotonic() > changed_s + _QUIET_S

    until(is_quiet, "the preemption to be recorded, and the writes to end")


@contextlib.contextmanager
def _replica() -> Iterator[Replica]:
    with tempfile.TemporaryDirectory() as folder, replicas(trustme.CA(), Path(folder)) as start:
        yield start(bound_cluster())


@contextlib.contextmanager
def _periodic_save() -> Iterator[Callable[[], None]]:
    import gracepoint

    with tempfile.TemporaryDirectory() as folder, gracepoint.attach(folder, save_every_steps=4) as session:
        for step in range(1, 4):
            session.step(step, _state(step))
        yield lambda: session.step(4, _state(4))


@contextlib.contextmanager
def _restored_state() -> Iterator[Callable[[], None]]:
    import gracepoint

    with tempfile.TemporaryDirectory() as folder:
        with gracepoint.attach(folder, save_every_steps=1) as session:
            session.step(1, _state(1))
        with gracepoint.attach(folder) as session:
            yield lambda: session.restore(like=_state(0)) and None


def _state(step: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    # Sharded, so that a leaf is more than one chunk where there is more than one device.
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    weights = jax.device_put(jnp.full((1024, 256), float(step), jnp.float32), sharding)
    return {"weights": weights, "step": jnp.int32(step)}


WALKS = (
    Walk(
        "event -> socket",
        (
            "gracepoint_operator.watches.handlers._watch.<locals>.see",
            "gracepoint_operator.cache.cluster_cache.ClusterCache.store",
            "gracepoint_operator.decisions.decide.decide",
            "gracepoint_operator.decisions.preemption_spec.begun",
            "gracepoint_operator.cache.preemption_store.PreemptionStore.put",
            "gracepoint_operator.channel.subscribers.Subscriber.send",
            "gracepoint_operator.channel.routes._write",
        ),
        _tainted_node,
    ),
    Walk(
        "state -> disk",
        (
            "gracepoint.session.session.Session.step",
            "gracepoint.checkpoint.transfer.host_snapshot.Transfer._copy",
            "gracepoint.checkpoint.storage.direct_io.write_file",
        ),
        _periodic_save,
    ),
    Walk(
        "disk -> state",
        (
            "gracepoint.session.session.Session.restore",
            "gracepoint.checkpoint.reading.stored_tree.open_tree",
            "gracepoint.checkpoint.reading.array_source.ChunkFiles.read",
            "gracepoint.checkpoint.loading.leaves.placement.OnDevices.put",
        ),
        _restored_state,
    ),
    Walk(
        "report -> status",
        (
            "gracepoint_operator.channel.routes.Channel._report",
            "gracepoint_operator.decisions.statuses.preemption_status.reported",
            "gracepoint_operator.cache.preemption_store.PreemptionStore.put",
            "gracepoint_operator.kube.client.KubeClient.merge_status",
        ),
        _reported_commit,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the walks."""
    parser = argparse.ArgumentParser(prog="python -m tests.walks", description="Traces the four walks of the data.")
    parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", accelerators.jax_platforms())
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
    os.environ.setdefault("XLA_FLAGS", xla.FLAGS)
    for walk in WALKS:
        trace = walked(walk)
        print(f"{walk.name}: passes {len(trace.passed)} modules; {len(trace.beside)} have a call")
        for module, stations in trace.passed.items():
            print(f"    {module} ({len(stations)} of {len(walk.stations)} stations)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
