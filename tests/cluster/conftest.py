"""One cluster for all cluster tests, with Gracepoint on it as a user installs it.

The cluster is one that is made for the tests, unless ``GRACEPOINT_CONTEXT`` names the context of another, or
``GRACEPOINT_CLUSTER`` one that ``python -m tests.testcluster up`` has left running. Tests leave it as they found
it: nodes untainted and schedulable, the operator running.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator

import pytest

from demo import install
from demo.training import TrainingRun, apply_policy
from tests import testcluster
from tests.testcluster.api import Cluster

NAMESPACE = "gracepoint-test"
POLICY = "transformer"
#: Enough for a disturbance in the middle of training, few enough to be quick.
STEPS = 150
#: Part of every run's name, as a cluster that is used again holds the folders of earlier runs.
MARK = secrets.token_hex(2)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real cluster with two nodes and JobSet."""
    if name := os.environ.get("GRACEPOINT_CLUSTER"):
        yield testcluster.attach(name)
        return
    if not os.environ.get("GRACEPOINT_CONTEXT") and (reason := testcluster.why_not_local()):
        pytest.skip(f"no local cluster on this machine: {reason}")
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
    install.make_namespace(cluster, NAMESPACE)
    apply_policy(cluster, POLICY, namespace=NAMESPACE)
    return cluster


@pytest.fixture(scope="session")
def undisturbed(installed: Cluster, images: install.Images) -> TrainingRun:
    """A run that nobody disturbed, to completion: what all others are held against."""
    run = TrainingRun(installed, f"undisturbed-{MARK}", namespace=NAMESPACE, image=images.trainer, steps=STEPS)
    run.start()
    run.wait_for_end(timeout_s=300)
    return run


@pytest.fixture
def run(request: pytest.FixtureRequest, installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    """A run of its own for each test, deleted at its end."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:30].strip("-")
    run = TrainingRun(installed, f"{name}-{MARK}", namespace=NAMESPACE, image=images.trainer, steps=STEPS)
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
