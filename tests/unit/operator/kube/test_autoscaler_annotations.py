"""The annotations by which pods are protected: the operator takes away only what it has set."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gracepoint_operator.kube.objects import changes

KARPENTER, AUTOSCALER = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
NOTE = "gracepoint.dev/protected-by"
BOTH = {KARPENTER: "true", AUTOSCALER: "false", NOTE: f"{AUTOSCALER},{KARPENTER}"}


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        pytest.param({}, BOTH, id="none there"),
        pytest.param(BOTH, {}, id="protected already"),
        pytest.param({KARPENTER: "false"}, {AUTOSCALER: "false", NOTE: AUTOSCALER}, id="one is the user's"),
        pytest.param({KARPENTER: "true", AUTOSCALER: "true"}, {}, id="both are the user's"),
        pytest.param({KARPENTER: "true", NOTE: f"{AUTOSCALER},{KARPENTER}"}, BOTH, id="somebody took one away"),
    ],
)
def test_protection_adds_what_is_missing(present: Mapping[str, str], expected: Mapping[str, str]) -> None:
    made = {**present, **changes(present, protect=True)}
    assert made == {**present, **expected}


@pytest.mark.parametrize(
    ("present", "left"),
    [
        pytest.param({}, {}, id="none there"),
        pytest.param(BOTH, {}, id="the operator's"),
        pytest.param({KARPENTER: "true"}, {KARPENTER: "true"}, id="the user's"),
        pytest.param({KARPENTER: "true", AUTOSCALER: "false", NOTE: AUTOSCALER}, {KARPENTER: "true"}, id="one of each"),
        pytest.param({"app": "x", NOTE: "app"}, {"app": "x"}, id="note that names something else"),
    ],
)
def test_end_of_protection_leaves_what_users_set(present: Mapping[str, str], left: Mapping[str, str]) -> None:
    made = {**present, **changes(present, protect=False)}
    assert {key: value for key, value in made.items() if value is not None} == left
