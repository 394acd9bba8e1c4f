"""Which features the cluster's tests switch on, by the versions that are chosen."""

from __future__ import annotations

import pytest

from tests.testcluster import features

PLACE, RULES = "InPlaceRestart", "ContainerRestartRules"


@pytest.mark.parametrize(
    ("jobset", "of_jobset", "of_kubernetes"),
    [
        pytest.param("", (), (), id="the usual one"),
        pytest.param("0.12", (PLACE, "ElasticJobSet"), (RULES,), id="the newest"),
        pytest.param("/mirror/jobset.yaml", (), (), id="manifests for kind"),
    ],
)
def test_features_follow_the_chosen_jobset(
    jobset: str, of_jobset: tuple[str, ...], of_kubernetes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTCLUSTER_JOBSET", jobset)
    assert features.of_jobset() == of_jobset
    assert features.of_kubernetes() == of_kubernetes


@pytest.mark.parametrize("kubernetes", ["1.30", "1.37"])
def test_a_kubernetes_without_the_feature_or_with_it_on_is_left_alone(
    kubernetes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTCLUSTER_JOBSET", "0.12")
    monkeypatch.setenv("TESTCLUSTER_KUBERNETES", kubernetes)
    assert features.of_kubernetes() == ()


@pytest.mark.parametrize(
    ("kubernetes", "jobset", "can"),
    [
        pytest.param("", "0.12", False, id="the usual Kubernetes"),
        pytest.param("1.37", "", False, id="the usual JobSet"),
        pytest.param("1.37", "0.12", True, id="the newest of both"),
    ],
)
def test_all_containers_restart_only_where_both_versions_can(
    kubernetes: str, jobset: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTCLUSTER_KUBERNETES", kubernetes)
    monkeypatch.setenv("TESTCLUSTER_JOBSET", jobset)
    assert features.restarts_all_containers() is can
