"""The limit on gangs that are told of what is not sure, with more gangs on one node than may be told in a minute.

No kubelet belongs to the node, so that its pods never start and nobody answers: it is about who is told at all. Last in
its part of the tests, as others that come within the minute would have to wait.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

import pytest

from demo import nodes
from demo.install import Images
from demo.snapshot import Json
from gracepoint.wire.names import API_VERSION, GROUP, JOBSET_LABEL_NAME
from gracepoint_operator.decisions.decide import DEFAULT_LIKELY_GANGS_PER_MINUTE as LIMIT
from gracepoint_operator.decisions.decide import WINDOW_S
from tests.cluster.asking import RESOURCE, schedule
from tests.cluster.conftest import MARK, NAMESPACE, POLICY
from tests.cluster.small import JOBSETS, SLEEP, container, get, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NODE = f"crowded-{MARK}"
KEEP_OFF = {"key": "example.com/crowded", "effect": "NoSchedule"}
#: For good: nobody speaks for the node, and that is not what this is about.
TOLERATIONS = [{"operator": "Exists"}]


@pytest.fixture
def gangs(installed: Cluster, images: Images) -> Iterator[list[str]]:
    """Names of the JobSets, which have a pod each on the node."""
    train = container("train", images.trainer, SLEEP)
    workers = replicated_job("workers", train, nodeName=NODE, tolerations=TOLERATIONS)
    bodies = [jobset(f"crowd{number:02}", workers, policy=POLICY) for number in range(LIMIT + 3)]
    names = [body["metadata"]["name"] for body in bodies]
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"taints": [KEEP_OFF]}}
    everything = {"apiVersion": "v1", "kind": "List", "items": [node, *bodies]}
    gone = ("--ignore-not-found", "--wait=false")
    selector = f"--selector={JOBSET_LABEL_NAME} in ({','.join(names)})"
    try:
        installed.kubectl("create", "-f", "-", stdin=json.dumps(everything), timeout_s=90)
        wait_until("their pods", lambda: len(get(installed, "pods", selector)["items"]) == len(names), timeout_s=60)
        yield names
    finally:
        installed.kubectl("delete", JOBSETS, *names, f"--namespace={NAMESPACE}", *gone)
        installed.kubectl("delete", "node", NODE, *gone)
        forced = ("--force", "--grace-period=0", *gone)  # nobody is there to end them
        installed.kubectl("delete", "pod", selector, f"--namespace={NAMESPACE}", *forced)


def told(cluster: Cluster, gangs: list[str]) -> dict[str, Json]:
    """The Preemptions of these gangs, by their JobSets; of what somebody asked for only what became of it."""
    found = get(cluster, RESOURCE)["items"]
    return {item["spec"]["jobSet"]["name"]: item for item in found if item["spec"]["jobSet"]["name"] in gangs}


def test_limited_gangs_get_uncertain_notices_and_certain_ones_never_wait(installed: Cluster, gangs: list[str]) -> None:
    schedule(installed, 1500, NODE)
    wait_until(
        f"{LIMIT} gangs to be told",
        lambda: len(told(installed, gangs)) >= LIMIT,
        timeout_s=WINDOW_S + 30,
        every_s=0.5,
        hint=lambda: str(sorted(told(installed, gangs))),
    )

    # A request is told at once, by replicas that have long seen the rest.
    waiting = sorted(set(gangs) - told(installed, gangs).keys())[0]
    asked = {"jobSet": {"name": waiting}, "deadlineSeconds": 600}
    metadata = {"name": f"asked-{MARK}", "namespace": NAMESPACE}
    request = {"apiVersion": f"{GROUP}/{API_VERSION}", "kind": "PreemptionRequest", "metadata": metadata, "spec": asked}
    installed.kubectl("create", "-f", "-", stdin=json.dumps(request))
    wait_until("the one that was asked for", lambda: waiting in told(installed, gangs), timeout_s=30, every_s=0.5)
    records = told(installed, gangs)
    assert records.pop(waiting)["spec"]["cause"] == "Requested"
    assert {record["spec"]["confidence"] for record in records.values()} == {"likely"}
    times = sorted(record["metadata"]["creationTimestamp"] for record in records.values())
    at = [datetime.datetime.fromisoformat(time).timestamp() for time in times]
    pairs = zip(at[:-LIMIT], at[LIMIT:], strict=True)
    assert all(later - earlier > WINDOW_S - 2 for earlier, later in pairs), [time - at[0] for time in at]

    # The others need not wait for what is sure.
    nodes.taint(installed, NODE)
    wait_until("all to be told", lambda: told(installed, gangs).keys() == {*gangs}, timeout_s=30, every_s=0.5)
