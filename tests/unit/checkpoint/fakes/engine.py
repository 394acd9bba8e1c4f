"""What the tests of the checkpoint engine share: states of every kind on four devices, gangs of threads.

A gang of threads is real (``StoreProcessGroup``), with one engine a thread. Arrays are local to each of its
"processes". Arrays over several processes are in tests/multiprocess.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gracepoint.checkpoint import HandlerRegistry, Restored, Saved, WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.options import DEFAULT_OPTIONS
from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.saving.schedule import SaveSchedule
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.process_group import ProcessGroup, SingleProcess
from tests.jax_settings import mesh_of_states

Result = TypeVar("Result")
State = Any


class Moments(NamedTuple):
    mu: Any
    nu: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    w: Any
    b: Any


def sharding(*spec: Sequence[str] | str | None) -> NamedSharding:
    """Returns a sharding over a 2 x 2 mesh with axes x and y (``jax_settings.mesh_of_states``)."""
    return NamedSharding(mesh_of_states(), PartitionSpec(*spec))


def small_state(value: float = 1.0) -> State:
    """Returns a sharded array, a replicated one and a number."""
    return {
        "w": jax.device_put(jnp.arange(16.0).reshape(4, 4) * value, sharding("x", "y")),
        "b": jax.device_put(jnp.full(8, value, jnp.bfloat16), sharding()),
        "count": 7,
    }


def not_computed() -> State:
    """A state that two devices have failed to compute, as they do when another process of a collective dies."""

    def fail(*_: Any) -> Any:
        raise OSError("connection reset by peer")

    places = PartitionSpec("x")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    part = jax.ShapeDtypeStruct((2,), "float32")
    step = jax.jit(
        jax.shard_map(lambda x: jax.pure_callback(fail, part, x), mesh=mesh, in_specs=places, out_specs=places)
    )
    return {"w": step(jax.device_put(jnp.ones(4), NamedSharding(mesh, places)))}


def rich_state() -> State:
    """Returns leaves of every kind, dtype, sharding and container that is supported."""
    return {
        "params": Params(
            w=jax.device_put(jnp.arange(64.0).reshape(8, 8) / 3, sharding("x", "y")),
            b=jax.device_put(jnp.arange(8, dtype=jnp.bfloat16) / 7, sharding(("x", "y"))),
        ),
        "moments": Moments(
            mu=[jax.device_put(jnp.arange(6.0).reshape(2, 3), sharding("y"))], nu=(jnp.arange(3), jnp.zeros(3))
        ),
        "dotted.key": {"slashed/key": jnp.ones((2, 2), jnp.float16)},
        "numbered": {5: jax.device_put(jnp.ones(4), sharding())},
        "bool": jax.device_put(jnp.arange(4) % 2 == 0, sharding("x")),
        "int8": jnp.arange(-2, 2, dtype=jnp.int8),
        "uint32": jnp.asarray(2**32 - 1, jnp.uint32),
        "int4": jnp.arange(-8, 8, dtype=jnp.int4),
        "float8": jnp.asarray([0.5, -2], jnp.float8_e4m3fn),
        "complex": jnp.asarray([1 + 2j]),
        "scalar": jnp.asarray(-0.0, jnp.float32),
        "weak": jnp.asarray(0.1),
        "not a number": jnp.asarray([jnp.nan, jnp.inf]),
        "numpy": np.arange(5, dtype=np.int64),
        "python": [3, 2.5, True],
        "key": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), sharding("x")),
        "rbg": jax.random.key(3, impl="rbg"),
        "nothing": {"none": None, "dict": {}, "list": [], "tuple": ()},
    }


def bits(leaf: Any) -> tuple[Any, ...]:
    """Returns type, dtype, shape and bytes of a leaf, so that equality is bitwise."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return ("key", str(jax.random.key_impl(leaf)), *bits(jax.random.key_data(leaf)))
        return ("jax", str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
    array = np.asarray(leaf)
    return (type(leaf).__name__, str(array.dtype), array.shape, array.tobytes())


def assert_same(found: State, expected: State) -> None:
    """Fails with the leaf's path if two states differ in structure or in a bit."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    assert structures[0] == structures[1]
    expected_leaves = dict(jax.tree_util.tree_flatten_with_path(expected)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        assert bits(leaf) == bits(expected_leaves[path]), jax.tree_util.keystr(path)


def engine(
    root: Path | str,
    gang: ProcessGroup | None = None,
    *,
    attempt: str = "job-0-a",
    save_every_steps: int = 0,
    save_every_s: float = 0.0,
    hastens: bool = False,
    keep_last: int = 3,
    keep_every_steps: int = 0,
    keep_for_s: float = 0.0,
    options: WriteOptions | None = None,
    host_memory_limit_bytes: int | None = None,
    handlers: HandlerRegistry | None = None,
    remember_throughput: bool = False,
    memory: MemorySettings | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> StepCheckpointer:
    """Returns a checkpointer of the steps below ``root``."""
    made = StepCheckpointer(
        Layout(storage_path(root)),
        gang=gang or SingleProcess(),
        attempt=attempt,
        schedule=SaveSchedule(save_every_steps, save_every_s, hastens),
        retention=Retention(keep_last, keep_every_steps, keep_for_s),
        settings=SaveSettings(options or DEFAULT_OPTIONS, host_memory_limit_bytes, handlers),
        memory=memory,
        clock=clock,
    )
    if remember_throughput:
        made.remember_throughput()
    return made


def save(
    checkpointer: StepCheckpointer,
    step: int,
    state: State,
    host_state: dict[str, Any] | None = None,
    *,
    timeout_s: float = 30.0,
    deadline: Deadline | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    note: str | None = None,
) -> Saved:
    """Saves as in an emergency; ``timeout_s`` counts where there is no ``deadline``."""
    deadline = deadline or Deadline.after(timeout_s, time.monotonic)
    return checkpointer.save(step, state, host_state or {}, deadline=deadline, on_stage=on_stage, note=note)


def restore(
    root: Path | str, like: State, *, attempt: str = "job-1-b", gang: ProcessGroup | None = None
) -> Restored | None:
    """Restores in a new engine, as the next start does."""
    checkpointer = engine(root, gang, attempt=attempt)
    restored = checkpointer.restore(like, timeout_s=300)
    checkpointer.close(300)
    return restored


def in_gang(count: int, function: Callable[[ProcessGroup], Result]) -> list[Result]:
    """Runs ``function`` in one thread for each process of a gang; raises the first one's error, if any."""
    outcomes = outcomes_in_gang(count, function)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def outcomes_in_gang(count: int, function: Callable[[ProcessGroup], Result]) -> list[Result | BaseException]:
    """Runs ``function`` in one thread for each process of a gang; returns results and errors by process."""
    store = InMemoryStore()
    outcomes: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            outcomes[index] = function(StoreProcessGroup(store, index, count))
        except BaseException as error:  # noqa: BLE001 - an outcome like any other
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a process of the gang hangs"
    return outcomes


def chunk_files(root: Path, step: int, leaf: str) -> Sequence[Path]:
    """Returns the chunk files of a leaf of a committed step."""
    return sorted(p for p in (root / str(step) / "default" / leaf).iterdir() if p.name != ".zarray")


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
