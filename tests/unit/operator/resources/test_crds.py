"""The CRDs are the models, everywhere the project keeps them, in a form that the API server takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from gracepoint.wire.messages import Phase
from gracepoint_operator.resources.__main__ import FOLDERS, PAGE, documents
from gracepoint_operator.resources.base import structural
from gracepoint_operator.resources.crds import definitions, put_into
from gracepoint_operator.resources.preemption import RECORD_ONLY

ROOT = Path(__file__).parents[4]
CRDS = definitions()


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_copy_of_the_crds_is_what_the_models_say(folder: Path) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / folder).iterdir()}
    assert kept == documents(), "run: python -m gracepoint_operator.resources --write ."


def test_the_page_for_users_has_every_field_of_the_models() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert put_into(page) == page, "run: python -m gracepoint_operator.resources --write ."


def test_a_page_without_the_marks_is_not_written_over() -> None:
    with pytest.raises(ValueError, match="nothing to renew"):
        put_into("# My page\n")


def _schema(name: str) -> dict[str, Any]:
    version: dict[str, Any] = CRDS[f"{name}.gracepoint.dev.yaml"]["spec"]["versions"][0]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def _nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from _nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from _nodes(schema["items"], f"{path}[]")


ALL_NODES = [
    pytest.param(node, id=f"{name.split('.')[0]}{path}")
    for name in CRDS
    for path, node in _nodes(_schema(name.split(".")[0]))
]


@pytest.mark.parametrize("node", ALL_NODES)
def test_every_field_has_a_type_and_a_bound(node: dict[str, Any]) -> None:
    assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}
    if node["type"] == "array":
        assert "maxItems" in node
    if node["type"] == "string" and node.get("format") != "date-time" and "description" in node:
        assert "maxLength" in node or "enum" in node


@pytest.mark.parametrize("name", ["checkpointpolicies", "preemptions"])
def test_lists_that_several_writers_share_are_distinguished_by_a_required_key(name: str) -> None:
    shared = {
        path: node["x-kubernetes-list-map-keys"]
        for path, node in _nodes(_schema(name))
        if node.get("x-kubernetes-list-type") == "map"
    }
    expected = {".status.conditions": ["type"]}
    if name == "preemptions":
        expected |= {".status.timings": ["stage"], ".status.replicas": ["name"], ".spec.requests": ["uid"]}
    else:
        expected |= {".status.forecasts": ["uid"], ".status.goodput": ["uid"], ".status.replicas": ["name"]}
        expected |= {".status.waits": ["uid"], ".status.snapshots": ["uid"], ".status.troubles": ["uid", "trouble"]}
    assert shared == expected
    for path, node in _nodes(_schema(name)):
        if path in shared:
            assert shared[path][0] in node["items"]["required"]


def test_phases_are_those_of_the_wire() -> None:
    phase = _schema("preemptions")["properties"]["status"]["properties"]["phase"]
    assert phase["enum"] == [*(str(p) for p in Phase), "Adopted", "Superseded"]  # the last two are requests'


def test_only_what_later_signals_may_move_can_be_changed_in_a_preemption() -> None:
    spec = _schema("preemptions")["properties"]["spec"]
    fixed = {
        name
        for name, field in spec["properties"].items()
        if any(r["rule"] == "self == oldSelf" for r in field.get("x-kubernetes-validations", []))
    }
    movable = {"cause", "signal", "confidence", "cancelable", "nodes", "pods", "deadline"}
    movable |= {"evictionAttemptedAt", "requests", "moves"}
    of_requests = {"deadlineSeconds", "retracted"}
    assert set(spec["properties"]) - fixed == movable | of_requests
    stays = [rule["rule"] for rule in spec["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
    kept = {*spec["required"], *RECORD_ONLY, *(name for name in fixed if f"oldSelf.{name})" in "".join(stays))}
    assert fixed <= kept, "a rule on an optional field does not see its removal"


@pytest.mark.parametrize("name", CRDS)
def test_columns_point_to_fields_that_exist(name: str) -> None:
    version = CRDS[name]["spec"]["versions"][0]
    paths = {path for path, _ in _nodes(version["schema"]["openAPIV3Schema"])}
    for column in version["additionalPrinterColumns"]:
        path = column["jsonPath"].split("[?", 1)[0]
        assert path in paths or path == ".metadata.creationTimestamp", column


def test_crds_stay_when_the_chart_is_uninstalled() -> None:
    for crd in CRDS.values():
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_a_stored_object_of_defaults_fits_its_own_schema() -> None:
    import jsonschema  # which takes more than a second for its grammars: not in every process that collects tests

    spec = _schema("checkpointpolicies")["properties"]["spec"]
    jsonschema.validate({"checkpoint": {"directory": "/c"}}, spec)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"checkpoint": {"directory": "/c", "keepLast": 0}}, spec)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"checkpoint": {"directory": "/c", "tolerateFailuresSeconds": -1}}, spec)


def test_model_without_structural_schema_is_refused_by_field() -> None:
    class Union(BaseModel):
        field: int | str

    class Free(BaseModel):
        field: dict[str, int]

    with pytest.raises(ValueError, match=r"Union\.field: expected 'one type or null', found a union of 2"):
        structural(Union)
    with pytest.raises(ValueError, match=r"Free\.field: 'additionalProperties' has no place"):
        structural(Free)


def test_no_description_has_the_indentation_of_the_code() -> None:
    """Python 3.13 and newer take it out of docstrings, and older ones do not: all must write the same definitions."""
    text = json.dumps(CRDS)
    assert '"description"' in text
    assert re.findall(r"\\n +", text) == []
