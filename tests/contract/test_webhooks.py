"""The webhooks' port as the API server and as everybody else meets it, over real TLS."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import jsonpatch
import pytest

from gracepoint.wire import names
from gracepoint.wire.names import Env
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.objects import LABEL_JOB_NAME
from gracepoint_operator.webhooks.routes import PATH_EVICTIONS, PATH_PODS, path_of
from gracepoint_operator.workloads import JOBSETS
from tests.contract.fakes.evictions import evict, review
from tests.contract.fakes.replicas import WEBHOOK_TOKEN, Replica
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.waiting import until


@pytest.fixture
def replica(start: Callable[..., Replica], api: MemoryApi) -> Replica:
    return start(api)


def test_an_eviction_that_anybody_reports_changes_nothing_and_is_counted(replica: Replica) -> None:
    secret = path_of(PATH_EVICTIONS, WEBHOOK_TOKEN)
    for path, port in (
        (PATH_EVICTIONS, replica.server.webhook_port),
        (PATH_EVICTIONS, replica.server.https_port),
        (secret, replica.server.https_port),
    ):
        assert evict(replica, path, port=port)[0] == 404
    assert not replica.core.cache.preemptions.records
    assert 'gracepoint_webhook_requests_refused_total{reason="unknown_path"} 1.0' in replica.metrics()


def test_eviction_from_the_api_server_is_held_and_notified(replica: Replica) -> None:
    status, said = evict(replica, path_of(PATH_EVICTIONS, WEBHOOK_TOKEN), port=replica.server.webhook_port)
    assert (status, json.loads(said)["response"]["status"]["code"]) == (200, 429)
    until(lambda: replica.api.of(kinds.PREEMPTIONS), "the Preemption")


@pytest.mark.parametrize("kind", ["JobSet", "Job"])
def test_a_pod_gets_the_size_that_its_workload_has_now(replica: Replica, kind: str) -> None:
    old = {Env.PROCESS_COUNT: "4", Env.PROCESS_OFFSET: "0", Env.PODS_PER_JOB: "4"}
    environment = {**old, Env.MIN_PROCESSES: "2", Env.OPERATOR_URL: "https://o:443"}
    container = {"name": "train", "env": [{"name": name, "value": value} for name, value in environment.items()]}
    labels = {names.LABEL_POLICY: "default"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    job = {"parallelism": 3, "completions": 3, "template": template}
    metadata = {"name": "resized", "namespace": objects.NAMESPACE, "uid": "u-resized"}
    if kind == "JobSet":
        members = [{"name": "workers", "replicas": 1, "template": {"spec": job}}]
        replica.api.add(JOBSETS, {"kind": kind, "metadata": metadata, "spec": {"replicatedJobs": members}})
        labels |= {names.JOBSET_LABEL_NAME: "resized", names.JOBSET_LABEL_REPLICATED_JOB: "workers"}
    else:
        replica.api.add(kinds.JOBS, {"kind": kind, "metadata": metadata, "spec": job})
        labels |= {LABEL_JOB_NAME: "resized"}
    pod = {"kind": "Pod", "metadata": {"name": "p", "labels": labels}, "spec": {"containers": [container]}}
    status, said = review(replica, path_of(PATH_PODS, WEBHOOK_TOKEN), pod, port=replica.server.webhook_port)
    assert status == 200
    made = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(json.loads(said)["response"]["patch"])))
    found = {variable["name"]: variable["value"] for variable in made["spec"]["containers"][0]["env"]}
    assert {name: found[name] for name in old} == {
        Env.PROCESS_COUNT: "3",
        Env.PROCESS_OFFSET: "0",
        Env.PODS_PER_JOB: "3",
    }
