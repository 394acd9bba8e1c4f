"""JobSets with JobSet's own features: the label alone brings them under Gracepoint, and nothing of theirs changes."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint_operator.webhooks import ContractViolation, release_contract
from tests.unit.operator.fakes.samples import POLICY, Json, injected, jobset, pod_of, policy_spec, replicated_job


def named_rule(action: str, **more: Any) -> Json:
    return {"failurePolicy": {"maxRestarts": 3, "rules": [{"name": "own", "action": action, **more}]}}


def with_annotation(key: str, value: str) -> Json:
    body = jobset()
    body["metadata"]["annotations"] = {key: value}
    return body


def with_reason() -> Json:
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}]
    body = jobset(replicated_job(podFailurePolicy={"rules": rules}))
    body["spec"] |= named_rule("FailJobSet", onJobFailureReasons=["PodFailurePolicy"])
    return body


FEATURES = {
    "parallel jobs": jobset(replicated_job("workers", 2, 4), replicated_job("driver", 1)),
    "coordinator": jobset(coordinator={"replicatedJob": "workers", "jobIndex": 0, "podIndex": 0}),
    "network": jobset(network={"enableDNSHostnames": True, "subdomain": "some", "publishNotReadyAddresses": True}),
    "success policy": jobset(
        replicated_job("driver", 1),
        replicated_job("workers"),
        successPolicy={"operator": "All", "targetReplicatedJobs": ["driver"]},
    ),
    "startup order": jobset(
        replicated_job("driver", 1), replicated_job("workers"), startupPolicy={"startupPolicyOrder": "InOrder"}
    ),
    "clean-up": jobset(ttlSecondsAfterFinished=30),
    "suspended": jobset(suspend=True),
    "restarts": jobset(failurePolicy={"maxRestarts": 3}),
    "a rule for failures": jobset(**named_rule("FailJobSet", targetReplicatedJobs=["workers"])),
    "a rule that restarts one Job": jobset(**named_rule("RestartJob")),
    "a rule for a reason": with_reason(),
    "exclusive placement": with_annotation("alpha.jobset.sigs.k8s.io/exclusive-topology", "rack"),
    "a topology of a queue": with_annotation("kueue.x-k8s.io/podset-required-topology", "rack"),
}


def kept(theirs: Any, made: Any) -> bool:
    """Whether everything that its user wrote is still there. Lists may have more items, in the same order."""
    if isinstance(theirs, dict):
        return isinstance(made, dict) and all(key in made and kept(value, made[key]) for key, value in theirs.items())
    if isinstance(theirs, list):
        rest = iter(made)
        return all(any(kept(item, other) for other in rest) for item in theirs)
    return bool(theirs == made)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_label_is_all_that_a_feature_of_jobset_needs(feature: str) -> None:
    body = FEATURES[feature]
    assert kept(body, injected(body))


def test_a_change_of_what_a_user_wrote_would_be_noticed() -> None:
    body = jobset(suspend=True)
    assert not kept(body, jobset(suspend=False))
    assert not kept({"rules": [1, 2]}, {"rules": [2, 1]})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(jobset(replicated_job(backoffLimit=10)), "backoffLimit", id="pods that are replaced one by one"),
        pytest.param(jobset(failurePolicy={"restartStrategy": "InPlaceRestart"}), "restartStrategy", id="in place"),
        pytest.param(
            jobset(
                replicated_job("data", 1),
                {**replicated_job(), "dependsOn": [{"name": "data", "status": "Complete"}]},
            ),
            "spec.training.replicatedJobs",
            id="an initializer that is not named as one",
        ),
    ],
)
def test_what_a_gang_cannot_have_is_refused_with_what_to_do(body: Json, words: str) -> None:
    result = release_contract(body, POLICY)
    assert isinstance(result, ContractViolation)
    assert words in result.message


def test_an_initializer_is_no_part_of_the_gang_under_its_policy() -> None:
    body = jobset(
        replicated_job("data", 1), {**replicated_job(), "dependsOn": [{"name": "data", "status": "Complete"}]}
    )
    made = injected(body, policy_spec(training={"replicatedJobs": ["workers"]}))
    assert kept(body, made)
    assert pod_of(made) == pod_of(body), "the initializer's pods are not touched"
