"""The label of a TrainJob goes on to its JobSet."""

from __future__ import annotations

import base64
import json
from typing import Any, cast

import jsonpatch
import pytest

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.webhooks.routes import AdmissionRequest, mutate_trainjob

Json = dict[str, Any]


def trainjob(own: Json, **spec: Any) -> Json:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "llm", "namespace": "team", "labels": own},
        "spec": {"runtimeRef": {"name": "jax"}, **spec},
    }


async def admitted(body: Json) -> Json:
    review = await mutate_trainjob(AdmissionRequest("1", "team", body), cast(Any, None))
    response = review["response"]
    assert response["allowed"]
    patch = json.loads(base64.b64decode(response["patch"])) if "patch" in response else []
    made: Json = jsonpatch.apply_patch(body, patch)
    return made


@pytest.mark.parametrize(
    ("body", "labels"),
    [
        pytest.param(trainjob({LABEL_POLICY: "p"}), {LABEL_POLICY: "p"}, id="none yet"),
        pytest.param(trainjob({LABEL_POLICY: "p"}, labels={"a": "b"}), {"a": "b", LABEL_POLICY: "p"}, id="others"),
        pytest.param(trainjob({LABEL_POLICY: "p"}, labels={LABEL_POLICY: "q"}), {LABEL_POLICY: "q"}, id="set already"),
        pytest.param(trainjob({}), None, id="without the label"),
    ],
)
async def test_the_label_goes_into_the_labels_for_the_jobset(body: Json, labels: Json | None) -> None:
    assert (await admitted(body))["spec"].get("labels") == labels


@pytest.mark.parametrize("spec", [pytest.param("text", id="no object"), pytest.param({"labels": 3}, id="odd labels")])
async def test_what_cannot_be_read_is_left_to_the_api_server(spec: Any) -> None:
    body = trainjob({LABEL_POLICY: "p"}) | {"spec": spec}
    assert await admitted(body) == body
