"""One cluster for all tests of Gracepoint, with it on there as a user installs it.

The cluster is one that is made for the tests, unless ``TESTCLUSTER_CONTEXT`` names the context of another, or
``TESTCLUSTER_ID`` one that ``python -m tests.testcluster up`` has left running. Tests leave it as they found
it: nodes untainted and schedulable, the operator running. They come one after another. Where there are several
workers, each has a cluster of this kind, for the files in ``APART`` or for all others. One of them has the tests of the
cluster itself before, which have a cluster of their own (``test_harness``).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from demo import install
from demo.forms import JOBSET, Form
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from tests import testcluster, xla
from tests.cluster import operator
from tests.testcluster import features
from tests.testcluster.api import Cluster

_KEPT = "TESTCLUSTER_ID"
NAMESPACE = "gracepoint-test"
POLICY = "transformer"
#: Enough for a disturbance in the middle of training, few enough to be quick.
STEPS = 80
#: A model that compiles in seconds, as what is held of a run does not depend on its size; and steps of a length that
#: leaves time to disturb it also on a fast machine.
FLAGS = {"width": 64, "layers": 1, "pace": 0.1}
ENVIRONMENT = {"XLA_FLAGS": xla.FLAGS}
#: Part of every run's name, as a cluster that is used again holds the folders of earlier runs.
MARK = secrets.token_hex(2)


HARNESS = "test_harness.py"
#: What the JobSet that is chosen does not have is left out.
collect_ignore = [] if "InPlaceRestart" in features.of_jobset() else ["test_in_place.py"]
#: Files that have a cluster of their own, by the number of workers. One more worker has the others. All take about as
#: long. A run that nobody disturbed is made once on each cluster where others are held against it.
APART: Mapping[int, Sequence[frozenset[str]]] = {
    1: (),
    2: (
        frozenset(
            {
                HARNESS,
                "test_chart_life.py",
                "test_contract.py",
                "test_core_signals.py",
                "test_epochs.py",
                "test_eviction_hold.py",
                "test_injection.py",
                "test_placement.py",
                "test_record.py",
                "test_resources.py",
                "test_signals.py",
                "test_snapshots.py",
                "test_throttle.py",
            }
        ),
    ),
    3: (
        frozenset(
            {
                HARNESS,
                "test_contract.py",
                "test_core_signals.py",
                "test_epochs.py",
                "test_injection.py",
                "test_signals.py",
                "test_snapshots.py",
                "test_throttle.py",
            }
        ),
        frozenset(
            {
                "test_channel_trust.py",
                "test_cli.py",
                "test_deadline.py",
                "test_eviction_hold.py",
                "test_policy.py",
                "test_preemptions.py",
                "test_stalls.py",
                "test_workloads.py",
            }
        ),
    ),
}


class OneClusterEach(LoadScopeScheduling):  # type: ignore[misc]  # which has no types
    """Tests that share a cluster go to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0].rpartition("/")[2]
        apart = APART[min(self.numnodes, max(APART))]
        return next((f"apart {number}" for number, files in enumerate(apart) if file in files), "the others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The harness comes first, as its cluster is gone after it."""
    items.sort(key=lambda item: item.path.name != HARNESS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneClusterEach | None:
    return OneClusterEach(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real cluster with two nodes and JobSet."""
    if name := os.environ.get(_KEPT):
        yield testcluster.attach(name)
        return
    if not os.environ.get("TESTCLUSTER_CONTEXT") and (reason := testcluster.why_not()):
        pytest.skip(f"no cluster on this machine: {reason}")
    with testcluster.open(nodes=2) as running:
        yield running


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> install.Images:
    """The operator's and the example trainer's images, from their Dockerfiles, on every node."""
    return install.build_images(cluster, print)


@pytest.fixture(scope="session")
def installed(cluster: Cluster, images: install.Images) -> Cluster:
    """The cluster with the operator installed from the chart, and a policy in the tests' namespace."""
    install.install_operator(cluster, images.operator)
    if os.environ.get(_KEPT):
        operator.renew(cluster)  # of an older build, under the same name
    install.make_namespace(cluster, NAMESPACE)
    programs = cluster.shared_dir / "programs"
    programs.mkdir(exist_ok=True)
    programs.chmod(0o777)  # trainers are not root
    training_policy(cluster, POLICY)
    return cluster


def training_policy(
    cluster: Cluster,
    name: str,
    change: Callable[[Json], None] = lambda spec: None,
    *,
    namespace: str = NAMESPACE,
) -> None:
    """Applies a policy of runs. Their programs are kept together: only the first start of the first run compiles."""

    def keep_programs(spec: Json) -> None:
        spec["compilationCache"] = {"enabled": True, "directory": "/shared/programs"}
        change(spec)

    apply_policy(cluster, name, namespace=namespace, change=keep_programs)


def training_run(
    cluster: Cluster,
    images: install.Images,
    name: str,
    policy: str | None = POLICY,
    *,
    steps: int = STEPS,
    pace: float = FLAGS["pace"],
    environment: Mapping[str, str] = ENVIRONMENT,
    form: Form = JOBSET,
) -> TrainingRun:
    """A run in the tests' namespace; not started. ``pace``: seconds of a step at least."""
    return TrainingRun(
        cluster,
        f"{name}-{MARK}",
        namespace=NAMESPACE,
        image=images.trainer,
        steps=steps,
        policy=policy,
        flags={**FLAGS, "pace": pace},
        environment=environment,
        form=form,
    )


@pytest.fixture(scope="session")
def undisturbed(installed: Cluster, images: install.Images) -> TrainingRun:
    """A run that nobody disturbed, to completion: what all others are held against."""
    run = training_run(installed, images, "undisturbed")
    run.start()
    run.wait_for_end(timeout_s=300)
    return run


@pytest.fixture
def run(request: pytest.FixtureRequest, installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    """A run of its own for each test, deleted at its end."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[:30].strip("-")
    run = training_run(installed, images, name)
    yield run
    run.delete()


@pytest.fixture(autouse=True)
def nodes_as_they_were(request: pytest.FixtureRequest) -> Iterator[None]:
    """Takes taints and cordons away after a test, whatever became of it."""
    yield
    if "installed" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("installed")
        for node in cluster.nodes:
            cluster.kubectl("patch", "node", node, "--type=merge", "--patch", json.dumps(_CLEAN))


_CLEAN = {"spec": {"taints": None, "unschedulable": None}}
