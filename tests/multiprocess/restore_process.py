"""A process of tests that restore: it does its ``ACTIONS`` in order and prints what it found.

python restore_process.py <folder> <action>[:<argument>...] ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.groups import GroupFactory
from gracepoint.checkpoint.handler_registry import ParamInfo
from gracepoint.checkpoint.handlers import SingleReplicaArrayHandler
from gracepoint.checkpoint.options import RestoreOptions, SingleReplica, SingleReplicaArrayRestoreArgs, WriteOptions
from gracepoint.checkpoint.reading import stored_arrays, stored_tree
from gracepoint.checkpoint.restoring.placement import ReplicaAgreement
from gracepoint.checkpoint.restoring.restore_tree import read_tree
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, GracepointError
from gracepoint.process_group import ProcessGroup
from tests.multiprocess.launcher import here

TIMEOUT_S = 60.0
RAW = WriteOptions(use_ocdbt=False)
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "zarr3": {"use_zarr3": True},
    "files": {"use_ocdbt": False},
    "zarr3-files": {"use_ocdbt": False, "use_zarr3": True},
}


def sharded(*spec: Any) -> NamedSharding:
    """Returns a sharding over the job's four devices: along x there are two replicas or halves."""
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y")), PartitionSpec(*spec))


def place(values: Any, where: NamedSharding) -> jax.Array:
    array = np.asarray(values)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def keys(where: NamedSharding) -> jax.Array:
    return jax.random.wrap_key_data(place(jax.random.key_data(jax.random.split(jax.random.key(5), 4)), where))


def make_state(*, turned: bool = False) -> Any:
    """Returns arrays over all processes with every kind of sharding; ``turned``: the same in others."""
    specs: list[tuple[Any, ...]] = [("x", "y"), (("x", "y"),), (None, "y"), ("y",), ()]
    rng = np.random.default_rng(0)
    values = [rng.standard_normal((8, 8)).astype(np.float32) for _ in specs]
    if turned:
        specs = specs[::-1]
    return {
        "layers": [place(value, sharded(*spec)) for value, spec in zip(values, specs, strict=True)],
        "half": place(np.arange(64).reshape(8, 8).astype(jnp.bfloat16), sharded(*specs[0])),
        "count": place(np.int32(3), sharded()),
        "keys": keys(sharded("y" if turned else "x")),
        "numpy": np.arange(5),
        "python": 7,
        "name": "a name",
    }


def replicated_state() -> Any:
    """Returns arrays that are replicated along x: a signed zero and NaNs with payloads among them."""
    special = np.asarray([0x7FC00001, 0xFF800001, 0x80000000, 1] * 4, np.uint32).view(np.float32).reshape(4, 4)
    return {
        "special": place(special, sharded("y")),
        "half": place(np.arange(16).reshape(4, 4).astype(jnp.bfloat16), sharded(None, "y")),
        "int": place(np.arange(-8, 8), sharded("y")),
        "all": place(np.arange(8.0), sharded()),
        "keys": keys(sharded("y")),
    }


def assert_same_here(found: Any, expected: Any) -> None:
    """Compares this process's shards bit for bit, and all shardings."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    assert structures[0] == structures[1]
    for (path, leaf), other in zip(
        jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(expected), strict=True
    ):
        where = jax.tree_util.keystr(path)
        if not isinstance(other, jax.Array):
            assert type(leaf) is type(other), where
            assert np.array_equal(leaf, other), where
            continue
        assert leaf.sharding == other.sharding, where
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        for a, b in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes(), where


class Job:
    """What the actions of one process share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        joined = GroupFactory().join(timeout_s=TIMEOUT_S)
        self.gang: ProcessGroup = joined.gang
        self.attempt = joined.attempt
        self.engine = StepCheckpointer(
            Layout(storage_path(root)), gang=self.gang, attempt=self.attempt, settings=SaveSettings(RAW)
        )
        self._calls = 0

    def deadline(self) -> Deadline:
        return Deadline.after(TIMEOUT_S, time.monotonic)

    def together(self) -> ReplicaAgreement:
        self._calls += 1
        return ReplicaAgreement(self.gang, f"test/{self.attempt}/{self._calls}")

    def save(self, step: str) -> None:
        state = make_state() | {"replicated": replicated_state()}
        values = {"rows": [self.gang.process_index * 10 + i for i in range(2)], "fixed": self.gang.process_index}
        self.engine.save(
            int(step), state, values, deadline=Deadline.after(TIMEOUT_S, time.monotonic), on_stage=lambda stage: None
        )

    def restore(self, step: str, how: str) -> None:
        """Restores in the same shardings or in others, in whatever number of processes these are.

        Where ``how`` says so, what is replicated is read by one replica, and the rest by all.
        """
        like = make_state(turned=how == "turned") | {"replicated": replicated_state()}
        found = self.engine.restore(
            like,
            timeout_s=TIMEOUT_S,
            restore_args={"replicated": SingleReplicaArrayRestoreArgs()} if how == "by-one-replica" else None,
            reshard={"rows": split_rows, "fixed": lambda values, index, count: list(values)},
        )
        assert found is not None
        assert found.step == int(step)
        assert_same_here(found.state, like)
        print(f"restored {step} {how} with {found.host_state}", flush=True)

    def restore_by_one_replica(self, step: str, primary: str) -> None:
        opened: list[str] = []

        def noted(path: StoragePath, *rest: Any) -> None:
            opened.append(str(path))
            read_checked(path, *rest)

        setattr(stored_arrays, "read_checked", noted)  # noqa: B010 - it is imported there
        like = {"replicated": replicated_state()}
        args = jax.tree.map(lambda leaf: SingleReplicaArrayRestoreArgs(sharding=leaf.sharding), like)
        try:
            found = read_tree(
                storage_path(self.root / step),
                like,
                args,
                options=RestoreOptions(partial_restore=True, single_replica=SingleReplica(0, int(primary))),
                deadline=self.deadline(),
                together=self.together(),
            )
        finally:
            setattr(stored_arrays, "read_checked", read_checked)  # noqa: B010
        assert_same_here(found, like)
        chunks = [path for path in opened if "/default/replicated." in path]
        assert len(set(chunks)) == len(chunks)
        print(f"replica {primary} gave all; read {'some' if chunks else 'nothing'} here", flush=True)

    def damaged_for_one(self, step: str, what: str, process: str) -> None:
        """One process finds damage: all say so, and none waits for the devices of the others."""
        module = stored_arrays if what == "chunk" else stored_tree

        def damaged(path: StoragePath, *rest: Any) -> None:
            raise CheckpointCorrupt(f"{path} is damaged")

        if self.gang.process_index == int(process):
            setattr(module, "read_checked", damaged)  # noqa: B010 - of either module
        like = {"replicated": replicated_state()}
        args = jax.tree.map(lambda leaf: SingleReplicaArrayRestoreArgs(sharding=leaf.sharding), like)
        try:
            read_tree(
                storage_path(self.root / step),
                like,
                args,
                options=RestoreOptions(partial_restore=True),
                deadline=self.deadline(),
                together=self.together(),
            )
        except GracepointError as error:
            print(f"{what} damaged: {type(error).__name__}: {error}", flush=True)
        finally:
            setattr(module, "read_checked", read_checked)  # noqa: B010

    def handler(self) -> None:
        """Arrays go through the single-replica handler, which finds the other processes itself."""
        handler = SingleReplicaArrayHandler(options=RAW)
        state = replicated_state()
        folder = self.root / "by-handler"
        infos = [ParamInfo(name, folder) for name in state]
        for future in handler.serialize(list(state.values()), infos):
            future.result(timeout=TIMEOUT_S)
        self.gang.barrier("serialized", timeout_s=TIMEOUT_S)
        args = [SingleReplicaArrayRestoreArgs(sharding=leaf.sharding) for leaf in state.values()]
        assert_same_here(handler.deserialize(infos, args), list(state.values()))
        print("the handler restored them", flush=True)

    def orbax_save(self, *options: str) -> None:
        import orbax.checkpoint as ocp

        for form in FORMS:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**FORMS[form])) as checkpointer:
                checkpointer.save(self.root / f"orbax-{form}", make_state())

    def restore_orbax(self, how: str) -> None:
        for form in FORMS:
            like = make_state(turned=how == "turned")
            found = read_tree(storage_path(self.root / f"orbax-{form}"), like, deadline=self.deadline())
            assert_same_here(found, like)
        print(f"restored Orbax's {how}", flush=True)

    def orbax_restore(self, step: str, how: str) -> None:
        """Orbax restores what we saved, in whatever number of processes these are."""
        import orbax.checkpoint as ocp

        like = make_state(turned=how == "turned") | {"replicated": replicated_state()}
        args = ocp.checkpoint_utils.construct_restore_args(like)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            folder = self.root / step / "default"
            found = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(like, restore_args=args))
        assert_same_here(found, like)
        print(f"Orbax restored {step} {how}", flush=True)


def split_rows(values: Any, process_index: int, process_count: int) -> Any:
    """Deals the rows of all out again."""
    rows = [row for value in values for row in value]
    return rows[process_index::process_count]


ACTIONS: dict[str, Callable[..., None]] = {
    "save": Job.save,
    "restore": Job.restore,
    "one-replica": Job.restore_by_one_replica,
    "damaged-for": Job.damaged_for_one,
    "handler": Job.handler,
    "orbax-save": Job.orbax_save,
    "restore-orbax": Job.restore_orbax,
    "orbax-restore": Job.orbax_restore,
}


def main(root: str, *actions: str) -> None:
    here().initialize_jax(shutdown_timeout_s=10)
    job = Job(Path(root))
    for action in actions:
        verb, *arguments = action.split(":")
        ACTIONS[verb](job, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
    if here().process_count > 1:
        jax.distributed.shutdown()
