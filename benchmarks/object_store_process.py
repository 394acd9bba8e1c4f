"""One process of ``benchmarks.object_store``: joins the others, saves and restores, and prints what that took.

    object_store_process.py SETTINGS

Its last line is a ``Measured`` in JSON. The engines take turns in every repeat, and all processes begin each turn
together. What a turn has saved is deleted after it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import checkpoint_engines
from benchmarks.checkpoint_engines import GRACEPOINT, ORBAX, ORBAX_PLAIN, Engine, Gracepoint, Orbax
from benchmarks.checkpoint_process import Together, forget_peak, large_state, resident_bytes
from gracepoint.checkpoint.groups import GroupFactory
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import GracepointError
from tests.multiprocess.launcher import here

MEASURED = "measured "
_TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        root: URI of the checkpoints.
        engines: In the order in which they take turns.
        state_bytes: Of all processes together.
        repeats: Saves of each engine, and restores.
        restores: Whether to restore.
    """

    root: str
    engines: list[str]
    state_bytes: int
    repeats: int
    restores: bool


@dataclasses.dataclass
class Measured:
    """What one process measured: seconds of each turn, by engine.

    Attributes:
        committed_s: From the call of the save until it was committed. Only saves that succeeded.
        failed: Messages of saves that failed.
        restore_s: Seconds of each restore.
        extra_bytes: Largest resident memory above what there was before, with what stays reserved.
        bytes: What all processes save together, each replica once.
    """

    committed_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)
    restore_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    extra_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes: int = 0


class _InBucket(Gracepoint):
    def __init__(self, root: str, joined: Any) -> None:
        self._place = root
        super().__init__(root, joined)  # type: ignore[arg-type]


class _OrbaxInBucket(Orbax):
    def __init__(self, root: str, *, use_compression: bool) -> None:
        self._place = root
        super().__init__(Path(), use_compression=use_compression)

    def folder(self, step: int) -> Any:
        return f"{self._place}/{step}"


def main(settings: Settings) -> None:
    here().initialize_jax()
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    joined = GroupFactory().join(timeout_s=_TIMEOUT_S)
    together = Together(joined)
    state = large_state(settings.state_bytes)
    measured = Measured(bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)))
    reserved_bytes = {}
    engines: dict[str, Engine] = {}
    for name in settings.engines:
        before_bytes = resident_bytes()
        place = f"{settings.root}/{_folder(name)}"
        is_ours = name == GRACEPOINT
        engines[name] = _InBucket(place, joined) if is_ours else _OrbaxInBucket(place, use_compression=name == ORBAX)
        engines[name].prepare(state)
        reserved_bytes[name] = resident_bytes() - before_bytes
        measured.committed_s[name], measured.restore_s[name], measured.extra_bytes[name] = [], [], 0
    negate = jax.jit(jnp.negative, donate_argnums=0)
    for step in range(1, settings.repeats + 1):
        for name, engine in engines.items():
            state = jax.block_until_ready(jax.tree.map(lambda x: negate(x) if isinstance(x, jax.Array) else x, state))
            before_bytes = resident_bytes()
            forget_peak()

            def save(engine: Engine = engine, step: int = step, state: Any = state) -> None:
                engine.save(step, state)
                engine.wait()

            try:
                measured.committed_s[name].append(together.timed(save))
            except (GracepointError, OSError, ValueError) as error:
                measured.failed.append(f"{name}, save {step}: {error}")
            above_bytes = max(0, resident_bytes(peak=True) - before_bytes)
            measured.extra_bytes[name] = max(measured.extra_bytes[name], reserved_bytes[name] + above_bytes)
        if settings.restores:
            for name, engine in engines.items():

                def restore(engine: Engine = engine, step: int = step, like: Any = state) -> None:
                    jax.block_until_ready(engine.restore(step, like))

                measured.restore_s[name].append(together.timed(restore))
        # As a store's client that outlives stalled requests.
        together.first(functools.partial(_delete, settings.root, list(engines), step))
    print(MEASURED + json.dumps(dataclasses.asdict(measured)), flush=True)
    together.meet()


def _delete(root: str, names: list[str], step: int) -> None:
    for name in names:
        storage_path(f"{root}/{_folder(name)}/{step}").delete_folder()


def _folder(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


assert {GRACEPOINT, ORBAX, ORBAX_PLAIN} == set(checkpoint_engines.NAMES)

if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
