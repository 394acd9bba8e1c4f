"""A process of a test: it restores from a bucket, where replicas take turns, and prints what it reads itself.

python turns_process.py <URI of the bucket>
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.groups import GroupFactory
from gracepoint.checkpoint.options import RestoreOptions
from gracepoint.checkpoint.reading import stored_arrays
from gracepoint.checkpoint.restoring import readers
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, GracepointError
from tests.multiprocess.launcher import here
from tests.multiprocess.restore_process import RAW, TIMEOUT_S, assert_same_here, place, replicated_state, sharded


def main(uri: str) -> None:
    here().initialize_jax(shutdown_timeout_s=10)
    readers.LEAST_BYTES = readers.WORTH_BYTES = 0
    joined = GroupFactory().join(timeout_s=TIMEOUT_S)
    engine = StepCheckpointer(
        Layout(storage_path(f"{uri}/run")), gang=joined.gang, attempt=joined.attempt, settings=SaveSettings(RAW)
    )
    state = {"replicated": replicated_state(), "sharded": place(np.arange(8.0), sharded("x"))}
    engine.save(3, state, {}, deadline=Deadline.after(TIMEOUT_S, time.monotonic), on_stage=lambda stage: None)
    read: list[str] = []
    is_damaged = False

    def noted(path: StoragePath, *rest: Any) -> None:
        read.append(str(path).rpartition("/default/")[2])
        if is_damaged:
            raise CheckpointCorrupt(f"{path} is damaged")
        read_checked(path, *rest)

    setattr(stored_arrays, "read_checked", noted)  # noqa: B010 - it is imported there
    for options in (RestoreOptions(), RestoreOptions(read_once=False)):
        found = engine.restore(state, timeout_s=TIMEOUT_S, options=options)
        assert found is not None
        assert_same_here(found.state, state)
        print(f"read once {options.read_once}: {json.dumps(sorted(read))}", flush=True)
        read.clear()
    is_damaged = jax.process_index() == 1
    try:
        engine.restore(state, timeout_s=TIMEOUT_S)
    except GracepointError as error:
        print(f"damaged: {type(error).__name__}: {error}", flush=True)
    engine.close(TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
    jax.distributed.shutdown()
