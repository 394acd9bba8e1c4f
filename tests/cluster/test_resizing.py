"""A person gives a job fewer and more processes while it is suspended: it goes on, and uses each sample once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo import install
from demo.forms import JOB, JOBSET
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster import elastic_run
from tests.testcluster import features
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

#: Beside the controllers of others, as it takes minutes. It needs none of them.
pytestmark = [pytest.mark.cluster, pytest.mark.controllers, pytest.mark.timeout(900)]

FORMS = [pytest.param(JOB, id="Job")]
if "ElasticJobSet" in features.of_jobset():  # others have one size for ever
    FORMS.append(pytest.param(JOBSET, id="JobSet"))
#: The numbers of processes, and the step by which the next one is given.
STAGES = ((2, 20), (1, 60), (3, elastic_run.STEPS))


@pytest.fixture(params=FORMS)
def run(request: pytest.FixtureRequest, installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    made = elastic_run.elastic_run(installed, images, f"resized-{request.param.kind.lower()}", request.param)
    yield made
    made.delete()


def test_a_resized_workload_uses_each_sample_once(run: TrainingRun) -> None:
    run.start(elastic_run.training_elastically(run))
    for epoch, (processes, step) in enumerate(STAGES[:-1]):
        elastic_run.wait_for_size(run, processes, step)
        elastic_run.suspend(run, True)
        record = run.wait_for_phase(Phase.COMMITTED, epoch=epoch, timeout_s=120)
        assert (record["spec"]["cause"], record["status"]["stepsLost"]) == ("Suspension", 0)
        wait_until("the pods to go", lambda: not alive(run), timeout_s=90, every_s=0.5)
        elastic_run.resize(run, STAGES[epoch + 1][0])
        elastic_run.suspend(run, False)
    run.wait_for_end(timeout_s=300)
    assert elastic_run.sizes(run) == [processes for processes, _ in STAGES]
    elastic_run.used_once(run)
    assert run.look().restarts_counted == 0


def alive(run: TrainingRun) -> bool:
    return any(pod.phase in ("Pending", "Running") for pod in run.look().pods)
