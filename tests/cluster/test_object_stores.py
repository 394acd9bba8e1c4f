"""A job with its checkpoints in an object store loses its node, and goes on from the very step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo import install, nodes
from demo.object_store import ObjectStore, run_store
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster.conftest import NAMESPACE, training_policy, training_run
from tests.testcluster.api import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MIDDLE = 20


@pytest.fixture(params=[pytest.param("gs", marks=pytest.mark.variant), "s3"])
def store(request: pytest.FixtureRequest, installed: Cluster) -> ObjectStore:
    made = run_store(installed, request.param, NAMESPACE)
    training_policy(installed, made.name, made.change_policy)
    return made


@pytest.fixture
def run(store: ObjectStore, installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    made = training_run(installed, images, f"on-{store.scheme}", store.name)
    yield made
    made.delete()


def test_a_tainted_node_costs_no_step(store: ObjectStore, run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start(store.change_jobset)
    node = run.wait_for_trainers(MIDDLE)[0].node
    nodes.taint(run.cluster, node)
    status = run.wait_for_phase(Phase.COMMITTED)["status"]
    run.wait_for_end(timeout_s=200)
    assert run.compare(undisturbed).differences == ()
    assert (status["stepsLost"], run.look().restarts_counted) == (0, 0)
    resumed = run.wait_for_record("restoredStep", lambda status: "restoredStep" in status)
    assert resumed["status"]["restoredStep"] == status["step"] >= MIDDLE
    assert list(run.checkpoints.iterdir()) == []  # nothing went to the volume
