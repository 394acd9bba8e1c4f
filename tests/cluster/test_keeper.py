"""Trainers are killed with all their containers while a keeper writes their save: the save becomes a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import psutil
import pytest

from demo import install, nodes
from demo.training import TrainingRun
from tests.cluster.conftest import training_policy, training_run
from tests.cluster.machine import processes_of
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

POLICY = "keeper"
EARLY, PERIODIC = 10, 30
HANDED_OVER = "is handed over to the worker process"


@pytest.fixture(params=[pytest.param("periodic", marks=pytest.mark.variant), "emergency"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(kind: str, installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    every = PERIODIC if kind == "periodic" else 0
    training_policy(
        installed,
        f"{POLICY}-{kind}",
        lambda spec: spec["checkpoint"].update(writer="Keeper", everySteps=every),
    )
    made = training_run(installed, images, f"kept-{kind}", f"{POLICY}-{kind}", pace=0.3)
    yield made
    for process in processes_of(made, "gracepoint.async_calls"):
        with contextlib.suppress(psutil.Error):
            process.resume()
    made.delete()


def test_a_save_survives_the_containers_of_its_trainers(kind: str, run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    pods = run.wait_for_trainers(EARLY)
    workers = processes_of(run, "gracepoint.async_calls ")
    assert len(workers) == len(pods)
    for worker in workers:
        worker.suspend()  # so that the save is under way when the trainers die
    if kind == "emergency":
        nodes.taint(run.cluster, pods[0].node, nodes.SCALE_DOWN_TAINT)  # a minute to live
    wait_for(f"both trainers of {run.name} to hand a save over", lambda: all(handed(run, pod.name) for pod in pods))
    trainers = processes_of(run, "train.py")
    assert len(trainers) == len(pods)
    assert steps(run) == []
    for trainer in trainers:
        trainer.kill()
    psutil.wait_procs(trainers, timeout=30)
    for worker in workers:
        worker.resume()
    wait_for(f"a checkpoint of {run.name}", lambda: steps(run) != [])
    saved = steps(run)[0]
    if kind == "emergency":
        nodes.untaint(run.cluster, pods[0].node, nodes.SCALE_DOWN_TAINT["key"])
    run.wait_for_end(timeout_s=300)
    # Killed trainers did not write down their last steps. Everything that was written down is equal.
    differences = run.compare(undisturbed, most=run.steps * len(pods)).differences
    assert [found for found in differences if not found.endswith("was not recorded")] == []
    assert (saved == PERIODIC) if kind == "periodic" else (saved >= EARLY)
    assert not any(worker.is_running() for worker in workers)


def handed(run: TrainingRun, pod: str) -> bool:
    logs = run.cluster.kubectl("logs", pod, f"--namespace={run.namespace}", "--container=trainer")
    return HANDED_OVER in logs.stdout


def steps(run: TrainingRun) -> list[int]:
    """The committed steps of a run."""
    return sorted(int(path.name) for path in run.checkpoints.iterdir() if path.name.isdigit())


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    wait_until(what, condition, timeout_s=120)
