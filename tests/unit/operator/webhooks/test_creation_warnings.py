"""What whoever creates a JobSet is warned of."""

from __future__ import annotations

import pytest

from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.resources.policy import Sidecars
from gracepoint_operator.webhooks import inject_workload
from gracepoint_operator.webhooks.release_contract import Patched, creation_warnings, release_contract
from tests.unit.operator.fakes.samples import SETTINGS, Json, jobset, pod_of, policy_spec, replicated_job


def policy(
    directory: str = "/checkpoints/{namespace}/{jobset}", needs: dict[str, float] | None = None
) -> CheckpointPolicy:
    forecasts = [
        {
            "name": name,
            "uid": f"uid-{name}",
            "drainSeconds": 0.0,
            "saveSeconds": seconds,
            "margin": 1.0,
            "time": "2026-03-01T12:00:00Z",
        }
        for name, seconds in (needs or {}).items()
    ]
    return CheckpointPolicy.of(
        {
            "apiVersion": "gracepoint.dev/v1beta1",
            "kind": "CheckpointPolicy",
            "metadata": {"name": "default", "namespace": "team"},
            "spec": policy_spec(checkpoint={"directory": directory}).to_json(),
            "status": {"forecasts": forecasts},
        }
    )


def of(body: Json, under: CheckpointPolicy) -> list[str]:
    kept = release_contract(body, under.spec)
    assert isinstance(kept, Patched)
    return creation_warnings(inject_workload(kept.object, under.name, under.spec, SETTINGS), under)


@pytest.mark.parametrize(
    ("directory", "mount", "warned"),
    [
        pytest.param("/checkpoints/{jobset}", "/checkpoints", False, id="mounted"),
        pytest.param("/checkpoints/{jobset}", "/checkpoints/", False, id="with a slash"),
        pytest.param("/data/ckpt/{jobset}", "/data", False, id="mounted above"),
        pytest.param("/data/{namespace}/ckpt", "/data/team", False, id="mounted at what a variable may be"),
        pytest.param("/data/ckpt-{jobset}/x", "/data/ckpt-llm", False, id="a variable within a name"),
        pytest.param("/checkpoints/{jobset}", "/check", True, id="a name that begins alike"),
        pytest.param("/elsewhere/{jobset}", "/checkpoints", True, id="another directory"),
    ],
)
def test_a_directory_that_no_volume_covers_is_warned_of(directory: str, mount: str, warned: bool) -> None:
    body = jobset()
    pod_of(body)["containers"][0]["volumeMounts"][0]["mountPath"] = mount
    found = of(body, policy(directory))
    assert len(found) == warned, found
    for text in found:
        assert (
            "spec.replicatedJobs[0].template.spec.template.spec.containers[train].volumeMounts: found no volume" in text
        )


def test_checkpoints_in_an_empty_dir_are_warned_of() -> None:
    body = jobset()
    pod_of(body)["volumes"] = [{"name": "checkpoints", "emptyDir": {}}]
    (found,) = of(body, policy())
    assert "found the emptyDir 'checkpoints' at /checkpoints" in found


def test_the_nearest_mount_counts() -> None:
    body = jobset()
    pod_of(body)["volumes"].append({"name": "scratch", "emptyDir": {}})
    pod_of(body)["containers"][0]["volumeMounts"].append({"name": "scratch", "mountPath": "/"})
    assert of(body, policy()) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param("/scratch", ["found no volume at /scratch"], id="a path"),
        pytest.param("file:///checkpoints/x", [], id="a URI of a file"),
        pytest.param("gs://bucket/x", [], id="an object store"),
    ],
)
def test_the_directory_that_the_container_sets_counts(value: str, words: list[str]) -> None:
    body = jobset()
    pod_of(body)["containers"][0]["env"] = [{"name": "GRACEPOINT_DIRECTORY", "value": value}]
    found = of(body, policy())
    assert len(found) == len(words)
    for text, word in zip(found, words, strict=True):
        assert word in text


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        pytest.param({}, [], id="no forecast"),
        pytest.param({"llm": 40.0}, [], id="it fits"),
        pytest.param({"llm": 90.0}, ["boundSeconds: found 60"], id="longer than evictions wait"),
        pytest.param(
            {"llm": 200.0},
            ["terminationGracePeriodSeconds: found 120, but an emergency save of the JobSet llm", "boundSeconds"],
            id="longer than the grace period, too",
        ),
        pytest.param({"llm": 40.0, "large": 200.0}, [], id="another JobSet of the policy is larger"),
        pytest.param({"large": 200.0}, [], id="only another one is known"),
    ],
)
def test_times_below_the_forecast_are_warned_of(needs: dict[str, float], words: list[str]) -> None:
    found = of(jobset(), policy(needs=needs))
    assert len(found) == len(words), found
    for text, word in zip(found, words, strict=True):
        assert word in text


@pytest.mark.parametrize(
    ("manager", "warned"),
    [
        pytest.param(None, False, id="not set"),
        pytest.param("jobset.sigs.k8s.io/jobset-controller", False, id="JobSet's own"),
        pytest.param("kueue.x-k8s.io/multikueue", True, id="another"),
    ],
)
def test_jobset_that_another_controller_runs_is_warned_of(manager: str | None, warned: bool) -> None:
    body = jobset()
    if manager is not None:
        body["spec"]["managedBy"] = manager
    found = [text for text in of(body, policy("gs://bucket/{jobset}")) if text.startswith("spec.managedBy")]
    assert bool(found) is warned
    assert all("Gracepoint and the policy must be there too" in text for text in found)


@pytest.mark.parametrize(
    ("rule", "warned"),
    [
        pytest.param({"action": "RestartJob"}, True, id="any Job"),
        pytest.param(
            {"action": "RestartJobAndIgnoreMaxRestarts", "targetReplicatedJobs": ["workers"]}, True, id="the gang's"
        ),
        pytest.param({"action": "RestartJob", "targetReplicatedJobs": ["reader"]}, False, id="another's"),
        pytest.param({"action": "RestartJobSet"}, False, id="the whole JobSet"),
        pytest.param({"action": "FailJobSet"}, False, id="the end"),
    ],
)
def test_rule_that_replaces_one_job_is_warned_of(rule: Json, warned: bool) -> None:
    body = jobset(failurePolicy={"rules": [{"name": "mine", **rule}]})
    found = [text for text in of(body, policy("gs://bucket/{jobset}")) if text.startswith("spec.failurePolicy")]
    assert bool(found) is warned
    assert all("Use RestartJobSet" in text for text in found)


def test_a_container_that_may_outlive_the_training_is_warned_of() -> None:
    body = jobset()
    pod_of(body)["containers"].append({"name": "logs", "image": "l"})
    (text,) = [text for text in of(body, policy()) if "containers[logs]" in text]
    assert "the pod stays on its node after the save" in text
    assert "restartPolicy: Always" in text


def test_a_container_that_the_operator_ends_is_not_warned_of() -> None:
    body, under = jobset(), policy()
    pod_of(body)["containers"].append({"name": "logs", "image": "l"})
    spec = under.spec.model_copy(update={"sidecars": Sidecars(end_with_training=True)})
    assert not [text for text in of(body, under.model_copy(update={"spec": spec})) if "containers[logs]" in text]


def test_a_native_sidecar_is_not_warned_of() -> None:
    body = jobset()
    pod_of(body)["initContainers"] = [{"name": "mesh", "image": "m", "restartPolicy": "Always"}]
    assert not [text for text in of(body, policy()) if "mesh" in text]


def test_a_rule_by_which_pods_that_never_ran_count_is_warned_of() -> None:
    rule = {"action": "Count", "onExitCodes": {"operator": "In", "values": [42]}}
    body = jobset(replicated_job(podFailurePolicy={"rules": [rule]}))
    (text,) = [text for text in of(body, policy()) if "Count" in text]
    assert text.startswith("spec.replicatedJobs[0].template.spec.podFailurePolicy.rules[3].action: found Count")
