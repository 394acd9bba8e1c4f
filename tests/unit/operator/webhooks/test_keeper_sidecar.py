"""The keeper beside the training container: only if the policy asks for it, with what it needs to write checkpoints."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from gracepoint.settings import Settings
from gracepoint.wire import names
from gracepoint.wire.names import Env
from gracepoint_operator.webhooks.injection import KEEPER, inject_workload
from gracepoint_operator.webhooks.release_contract import Patched, release_contract
from tests.unit.operator.fakes.samples import SETTINGS, Json, environment, jobset, pod_of, policy_spec


def pod_with(writer: str, container: Json | None = None) -> Json:
    """Returns the pod's spec that a JobSet has after the injection."""
    policy = policy_spec(checkpoint={"directory": "/c", "writer": writer})
    body = jobset()
    pod_of(body)["containers"][0].update(container or {})
    result = release_contract(body, policy)
    assert isinstance(result, Patched), result
    return pod_of(inject_workload(result.object, "default", policy, SETTINGS))


@pytest.mark.parametrize(("writer", "value"), [("Thread", None), ("Worker", "worker"), ("Keeper", names.KEEPER_SOCKET)])
def test_the_library_learns_who_writes(writer: str, value: str | None) -> None:
    pod = pod_with(writer)
    found = environment(pod["containers"][0]).get(Env.WRITER)
    assert found == value
    assert Settings.from_environment({} if found is None else {Env.WRITER: found}).writer == value
    assert [c["name"] for c in pod.get("initContainers") or []] == ([KEEPER] if writer == "Keeper" else [])


def test_the_keeper_is_a_native_sidecar_that_shares_the_socket() -> None:
    pod = pod_with("Keeper")
    (keeper,) = pod["initContainers"]
    assert keeper["restartPolicy"] == "Always"
    module, socket, *runs = keeper["command"][2:]
    assert (module, socket) == ("gracepoint.async_calls.keeper", names.KEEPER_SOCKET)
    assert runs == ["gracepoint.session.ahead_in_keeper"], "images with another version of the library have it there"
    assert importlib.util.find_spec(runs[0]) is not None
    assert {"name": KEEPER, "emptyDir": {}} in pod["volumes"]
    mount = {"name": KEEPER, "mountPath": names.KEEPER_DIRECTORY}
    assert mount in keeper["volumeMounts"]
    assert mount in pod["containers"][0]["volumeMounts"]


def test_the_keeper_knows_directory_and_place_of_its_process() -> None:
    pod = pod_with("Keeper")
    (keeper,) = pod["initContainers"]
    mine, its = environment(pod["containers"][0]), environment(keeper)
    for name in (Env.DIRECTORY, Env.PROCESS_COUNT, Env.PROCESS_OFFSET, Env.PODS_PER_JOB):
        assert its[name] == mine[name]
    index = [v for v in keeper["env"] if v["name"] == Env.JOB_INDEX]
    assert index == [v for v in pod["containers"][0]["env"] if v["name"] == Env.JOB_INDEX] != []


def test_the_keeper_sees_what_the_trainer_writes_to() -> None:
    own: dict[str, Any] = {
        "image": "trainer:1",
        "env": [{"name": "AWS_ACCESS_KEY_ID", "value": "k"}],
        "envFrom": [{"secretRef": {"name": "bucket"}}],
        "volumeMounts": [{"name": "checkpoints", "mountPath": "/c"}],
        "securityContext": {"runAsUser": 1000},
    }
    (keeper,) = pod_with("Keeper", own)["initContainers"]
    assert {name: keeper[name] for name in ("image", "envFrom", "securityContext")} == {
        name: own[name] for name in ("image", "envFrom", "securityContext")
    }
    assert own["volumeMounts"][0] in keeper["volumeMounts"]
    assert environment(keeper)["AWS_ACCESS_KEY_ID"] == "k"
    assert Env.OPERATOR_URL not in environment(keeper)


def test_the_keeper_may_report_a_trainer_that_does_not_run() -> None:
    (keeper,) = pod_with("Keeper")["initContainers"]
    assert names.TOKEN_DIRECTORY in [mount["mountPath"] for mount in keeper["volumeMounts"]]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"cpu": "8", "memory": "64Gi"}, {"cpu": "1", "memory": "512Mi"}),
        ({"memory": "64Gi"}, {"memory": "512Mi"}),
        ({}, {"memory": "512Mi"}),
    ],
    ids=["guaranteed", "burstable", "none"],
)
def test_the_keeper_does_not_change_the_quality_of_service(limits: Json, expected: Json) -> None:
    (keeper,) = pod_with("Keeper", {"resources": {"limits": limits}})["initContainers"]
    assert keeper["resources"] == {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": expected}


def test_an_injection_that_is_repeated_changes_nothing() -> None:
    policy = policy_spec(checkpoint={"directory": "/c", "writer": "Keeper"})
    result = release_contract(jobset(), policy)
    assert isinstance(result, Patched)
    once = inject_workload(result.object, "default", policy, SETTINGS)
    again = release_contract(once, policy)
    assert isinstance(again, Patched)
    assert inject_workload(again.object, "default", policy, SETTINGS) == once
