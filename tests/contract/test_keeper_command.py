"""The command that the webhook gives the keeper, run as the kubelet runs it: before the trainer, with its variables."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp

import gracepoint
from gracepoint.wire import names
from gracepoint.wire.names import Env
from gracepoint_operator.webhooks.injection import inject_workload
from gracepoint_operator.webhooks.release_contract import Patched, release_contract
from tests.unit.operator.fakes.samples import SETTINGS, Json, jobset, pod_of, policy_spec


def keeper_of(directory: Path) -> Json:
    """Returns the container that the webhook adds to the pods of a JobSet whose checkpoints are below a directory."""
    policy = policy_spec(checkpoint={"directory": f"{directory}/{{jobset}}", "writer": "Keeper"})
    result = release_contract(jobset(), policy)
    assert isinstance(result, Patched), result
    (keeper,) = pod_of(inject_workload(result.object, "default", policy, SETTINGS))["initContainers"]
    found: Json = keeper
    return found


def test_the_injected_keeper_reads_ahead_what_its_process_saved(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path)
    of_this_pod = {Env.JOBSET_NAME: "train", Env.JOB_INDEX: "0", "JOB_COMPLETION_INDEX": "0"}
    constants = {each["name"]: each["value"] for each in keeper["env"] if "value" in each}
    for name, value in of_this_pod.items():  # as the kubelet puts them in
        constants = {each: text.replace(f"$({name})", value) for each, text in constants.items()}
    with gracepoint.attach(constants[Env.DIRECTORY], save_every_steps=1) as session:
        session.step(1, {"w": jnp.arange(4096.0)})
    python, *arguments = keeper["command"]
    assert python == "python3"
    command = [str(tmp_path / "socket") if each == names.KEEPER_SOCKET else each for each in arguments]
    with subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **constants, **of_this_pod},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        too_late = threading.Timer(60, process.kill)
        too_late.start()
        lines = []
        for line in process.stderr:  # until the process ends
            lines.append(line)
            if "reading ahead" in line:
                process.terminate()
        too_late.cancel()
        assert process.wait(60) == 0
    (said,) = [line for line in lines if "reading ahead what process 0 saved last" in line]
    assert int(said.rpartition("=")[2]) > 4096 * 4
