"""One process of the recorded run: saves, is killed, salvages, and marks in the recording what it was told.

    crash_process.py FORMAT ROOT ATTEMPT ACTION...

FORMAT is ``files`` (one for each chunk), ``direct`` (the same, past the page cache however small they are) or
``ocdbt``, ``parts`` (the manifest is in parts), or ``path``: there all saves go to ``ROOT/model``, each with ``force``
over the one before.
Actions: ``background:STEP``, ``save:STEP``, ``die-before-commit:STEP`` (as soon as all parts are durable) and
``restore:STEP``; with a path, ``background``, ``save``, ``die-before-commit``.
Marks: ``begun STEP``, ``durable STEP PROCESS`` and ``committed STEP``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint import AsyncCheckpointer
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.saving import operation, planner
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage import posix
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from tests.multiprocess.launcher import here
from tests.multiprocess.strace import mark

TIMEOUT_S = 60.0


def make_state(step: int) -> Any:
    """Returns the state of ``step`` over all devices: an array cut over them, a replicated one and a number."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def place(values: Any, *spec: Any) -> jax.Array:
        return jax.make_array_from_callback(
            values.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: values[index]
        )

    return {
        "w": place(np.arange(8, dtype=np.float32) + step, "x"),
        "b": place(np.full(3, step, jnp.bfloat16)),
        "n": step,
    }


def main(form: str, root: str, attempt: str, *actions: str) -> None:
    place = here()
    place.initialize_jax(shutdown_timeout_s=5)
    gang = place.gang(attempt)
    if form == "path":
        with AsyncCheckpointer(gang=gang, timeout_s=TIMEOUT_S) as checkpointer:
            for action in actions:
                verb, step = action.split(":")
                replace(checkpointer, Path(root, "model"), verb, int(step))
        return
    options = WriteOptions(use_ocdbt=form == "ocdbt")
    if form == "parts":
        planner.MANY_CHUNKS = 1
    if form == "direct":
        assert posix.PosixPath(str(root)).has_direct_io()
        posix._SMALL_BYTES = 0
    engine = StepCheckpointer(
        Layout(storage_path(root)),
        gang=gang,
        attempt=attempt,
        retention=Retention(keep_last=1),
        settings=SaveSettings(options),
    )
    for action in actions:
        verb, step = action.split(":")
        ACTIONS[verb](engine, int(step))
        print(f"{action} done", flush=True)
    engine.close(TIMEOUT_S)


def replace(checkpointer: AsyncCheckpointer, path: Path, verb: str, step: int) -> None:
    mark(f"begun {step}")
    commit = operation.SaveOperation._commit

    def durable(*arguments: Any) -> None:
        operation.SaveOperation._commit = commit  # type: ignore[method-assign]
        mark(f"durable {step} {here().process_index}")
        if verb == "die-before-commit":
            die(step)
        commit(*arguments)

    operation.SaveOperation._commit = durable  # type: ignore[assignment, method-assign]
    if verb == "background":
        checkpointer.save(path, make_state(step), force=True)
        checkpointer.wait_until_finished()
    else:
        checkpointer.save_and_wait(path, make_state(step), force=True)
    mark(f"committed {step}")


def die(step: int) -> None:
    """Ends all processes once all parts are durable. Process 0 is the last: JAX ends the others when it is gone."""
    place, beside = here(), Path(sys.argv[2]).parent  # of the recorded files
    if place.process_index > 0:
        (beside / f"dies-{step}-{place.process_index}").write_text(f"{os.getpid()}\n")
        time.sleep(TIMEOUT_S)
        raise TimeoutError(f"process 0 did not end this process within {TIMEOUT_S:g} s")
    until_s = time.monotonic() + TIMEOUT_S
    for other in range(1, place.process_count):
        file = beside / f"dies-{step}-{other}"
        while not (file.exists() and file.read_text().endswith("\n")):
            if time.monotonic() > until_s:
                raise TimeoutError(f"the part of process {other} was not durable within {TIMEOUT_S:g} s")
            time.sleep(0.01)
        os.kill(int(file.read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def do_background(engine: StepCheckpointer, step: int) -> None:
    mark(f"begun {step}")
    engine.save_in_background(step, make_state(step), {})
    engine.executor.wait_until_finished(TIMEOUT_S)
    mark(f"committed {step}")


def do_save(engine: StepCheckpointer, step: int, *, dying: bool = False) -> None:
    def on_stage(stage: str) -> None:
        if stage == "durable":
            mark(f"durable {step} {here().process_index}")
            if dying:
                die(step)

    mark(f"begun {step}")
    engine.save(step, make_state(step), {}, deadline=Deadline.after(TIMEOUT_S, time.monotonic), on_stage=on_stage)
    mark(f"committed {step}")


def do_die_before_commit(engine: StepCheckpointer, step: int) -> None:
    do_save(engine, step, dying=True)


def do_restore(engine: StepCheckpointer, step: int) -> None:
    restored = engine.restore(make_state(0), timeout_s=TIMEOUT_S)
    assert restored is not None
    assert restored.step == step
    mark(f"committed {step}")


ACTIONS = {
    "background": do_background,
    "save": do_save,
    "die-before-commit": do_die_before_commit,
    "restore": do_restore,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
    jax.distributed.shutdown()
