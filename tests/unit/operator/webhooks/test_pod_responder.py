"""The operator becomes a responder of each pod of a gang, where the cluster has Evictions that wait for responders."""

from __future__ import annotations

import pytest

from gracepoint_operator.webhooks.injection import add_responder
from gracepoint_operator.webhooks.training_jobs import Json

OURS = {"name": "gracepoint.dev/save", "priority": 20_000}
THEIRS = {"name": "example.com/flush", "priority": 30_000}


def pod(**spec: object) -> Json:
    return {"metadata": {"name": "train-0"}, "spec": {"containers": [], **spec}}


def test_pod_gets_the_operator_beside_its_other_responders() -> None:
    assert add_responder(pod())["spec"]["evictionResponders"] == [OURS]
    assert add_responder(pod(evictionResponders=[THEIRS]))["spec"]["evictionResponders"] == [THEIRS, OURS]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(pod(evictionResponders=[{**OURS, "priority": 15_000}]), id="it is one already"),
        pytest.param(pod(schedulingGroup={"podGroupName": "gang"}), id="pod of a scheduling group"),
        pytest.param(pod(evictionResponders=[{"name": f"example.com/r{i}"} for i in range(10)]), id="no room"),
    ],
)
def test_pod_stays_as_it_is_where_no_responder_fits(given: Json) -> None:
    assert add_responder(given) == given


def test_given_pod_is_not_changed() -> None:
    given = pod(evictionResponders=[THEIRS])
    add_responder(given)
    assert given["spec"]["evictionResponders"] == [THEIRS]
