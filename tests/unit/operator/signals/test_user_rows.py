"""Users' own rows: read strictly, refused by the path of the wrong field; those in the docs are good."""

from __future__ import annotations

import copy
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint_operator import signals
from gracepoint_operator.__main__ import main
from gracepoint_operator.signals import BUILT_IN, On, Row, UserRowsError, catalogue, read_user_rows
from gracepoint_operator.signals.rows import Cause
from tests.unit.operator.fakes import objects

PAGE = Path(__file__).parents[4] / "docs" / "signals.md"
READY_MADE = yaml.safe_load((PAGE.parents[1] / "examples" / "signals.yaml").read_text())["signals"]["rows"]
GOOD: dict[str, Any] = {
    "name": "racks",
    "provider": "us",
    "match": {"label": {"key": "example.com/rack", "values": ["closing"]}},
    "cause": "Maintenance",
    "confidence": "likely",
    "cancelable": True,
}


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "signals.json"
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_no_rows_are_none(tmp_path: Path) -> None:
    assert read_user_rows(written(tmp_path)) == ()


@pytest.mark.parametrize("row", READY_MADE, ids=lambda row: row["name"])
def test_a_ready_made_row_can_be_used(tmp_path: Path, row: dict[str, Any]) -> None:
    (read,) = read_user_rows(written(tmp_path, row))
    assert read.name == row["name"]


def test_all_ready_made_rows_can_be_used_together(tmp_path: Path) -> None:
    assert len(read_user_rows(written(tmp_path, *READY_MADE))) == len(READY_MADE) > 10


def ready_made(name: str) -> Row:
    return Row.model_validate(next(row for row in READY_MADE if row["name"] == name))


@pytest.mark.parametrize(
    ("name", "on", "body"),
    [
        ("nvsentinel-state", On.NODE, objects.node(labels={"dgxc.nvidia.com/nvsentinel-state": "draining"})),
        ("nvsentinel-xid", On.NODE, objects.node(conditions=[objects.condition("SysLogsXIDError", reason="Xid79")])),
        ("coreweave-pending", On.NODE, objects.node(labels={"node.coreweave.cloud/pending-state": "reboot"})),
        ("medik8s-drain", On.NODE, objects.node(taints=[objects.taint("medik8s.io/drain")])),
        ("npd-kernel-deadlock", On.NODE, objects.node(conditions=[objects.condition("KernelDeadlock")])),
        (
            "eks-accelerated-hardware",
            On.NODE,
            objects.node(conditions=[objects.condition("AcceleratedHardwareReady", "False", reason="NvidiaXID95")]),
        ),
        ("kep5683-drain", On.NODE, objects.node(conditions=[objects.condition("DrainInProgress")])),
        (
            "karpenter-drifted",
            On.NODE_CLAIM,
            objects.node_claim(expire_after="Never", conditions=[objects.condition("Drifted", reason="AMIDrift")]),
        ),
        (
            "reservation-end",
            On.NODE,
            objects.node(labels={"example.com/reserved-until": f"{objects.NOW + 600:.0f}"}),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_ready_made_row_matches_what_its_vendor_writes(name: str, on: On, body: objects.Body) -> None:
    marks = signals.marks([ready_made(name), *BUILT_IN], on, body)
    assert [mark.row.name for mark in marks] == [name]


@pytest.mark.parametrize("state", ["drain-succeeded", "drain-failed", "remediating", "remediation-failed"])
def test_what_nvsentinel_does_after_the_drain_is_no_signal(state: str) -> None:
    body = objects.node(labels={"dgxc.nvidia.com/nvsentinel-state": state})
    assert signals.marks([ready_made("nvsentinel-state")], On.NODE, body) == ()


def changed(path: str, value: Any) -> dict[str, Any]:
    row = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    at = row
    for parent in parents:
        at = at.setdefault(parent, {})
    if value is None:
        del at[last]
    else:
        at[last] = value
    return row


@pytest.mark.parametrize(
    ("row", "said"),
    [
        pytest.param(changed("provder", "x"), r"signals\.rows\[1\]\.provder: Extra inputs", id="an unknown field"),
        pytest.param(changed("name", None), r"signals\.rows\[1\]\.name: Field required", id="a missing one"),
        pytest.param(
            changed("match.label.key", 3),
            r"signals\.rows\[1\]\.match\.label\.key: .*string.*\(found '3'\)",
            id="a type",
        ),
        pytest.param(
            changed("match", {"taint": {"key": "a", "efect": "NoExecute"}}),
            r"signals\.rows\[1\]\.match\.taint\.efect: Extra inputs",
            id="an unknown field below",
        ),
        pytest.param(
            changed("match.annotation", {"key": "a"}),
            r"signals\.rows\[1\]\.match: .*exactly one of taint.*label.*annotation",
            id="two matches",
        ),
        pytest.param(changed("match", {}), r"signals\.rows\[1\]\.match: .*found none", id="no match"),
        pytest.param(
            changed("match", {"kind": "Pod", "taint": {"key": "a"}}),
            r"match: .*only Nodes and Devices have taints",
            id="a pod's taint",
        ),
        pytest.param(
            changed("match", {"taint": {"value": "a"}}), r"match\.taint: .*a key or an effect", id="any taint"
        ),
        pytest.param(changed("cause", "Gremlins"), r"signals\.rows\[1\]\.cause: .*'Maintenance'", id="a cause"),
        pytest.param(changed("confidence", "maybe"), r"signals\.rows\[1\]\.confidence: .*'likely'", id="a confidence"),
        pytest.param(
            changed("deadline", {"afterSeconds": -1}), r"rows\[1\]\.deadline\.afterSeconds: .*greater", id="a time past"
        ),
        pytest.param(
            changed("deadline", {"time": {"format": "JSON"}}), r"rows\[1\]\.deadline\.time: .*jsonFields", id="JSON"
        ),
        pytest.param(
            changed("deadline", {"time": {"format": "Duration"}}),
            r"rows\[1\]\.deadline\.time: .*since",
            id="since what",
        ),
        pytest.param(changed("limit", True), r"signals\.rows\[1\]: .*deadline\.time", id="a limit without a time"),
        pytest.param(changed("name", "gke-active-maintenance"), r"rows\[1\]\.name: .*built-in", id="a built-in name"),
        pytest.param(changed("name", "first"), r"rows\[0\]\.name: .*another row", id="a name twice"),
    ],
)
def test_a_wrong_row_is_refused_with_the_fields_path(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(UserRowsError, match=said):
        read_user_rows(written(tmp_path, GOOD | {"name": "first"}, row))


@pytest.mark.parametrize("text", ["", "rows: []", '{"rows": {}}', '{"lines": []}'])
def test_what_is_no_list_of_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "signals.json"
    path.write_text(text)
    with pytest.raises(UserRowsError, match="signals"):
        read_user_rows(path)


def test_the_operator_does_not_start_with_a_wrong_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tls, kubeconfig = tmp_path / "tls", tmp_path / "kubeconfig"
    path = written(tmp_path, changed("cause", "Gremlins"))
    arguments = ["--service-url", "https://x.y.svc:443", "--tls-directory", str(tls), "--signals", str(path)]
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        assert main([*arguments, "--kubeconfig", str(kubeconfig)]) == 1
    finally:
        root.handlers[:], root.level = before
    assert "signals.rows[0].cause" in capsys.readouterr().err


def test_a_row_of_ones_own_comes_before_the_built_in_ones(tmp_path: Path) -> None:
    mine = changed("match", {"label": {"key": "cloud.google.com/active-node-maintenance"}})
    rows = (*read_user_rows(written(tmp_path, mine)), *BUILT_IN)
    node = objects.node(labels={"cloud.google.com/active-node-maintenance": "ONGOING"})
    assert [mark.row.name for mark in signals.marks(rows, On.NODE, node)] == ["racks"]


def test_the_page_for_users_has_the_catalogue_as_it_is() -> None:
    text = PAGE.read_text()
    assert catalogue.put_into(text) == text, "run: make generate"


PLAIN = {"name": "mine", "provider": "us", "cause": "Maintenance", "confidence": "sure", "cancelable": True}
LABEL = PLAIN | {"match": {"label": {"key": "k"}}}
TAINT = PLAIN | {"match": {"taint": {"key": "k"}}}
CONDITION = PLAIN | {"match": {"condition": {"type": "T"}}}
FIELD = PLAIN | {"match": {"field": {"path": "spec.a"}}}
TIMED = LABEL | {"deadline": {"time": {"format": "Seconds", "since": "status.startTime"}}}
JSON_TIME = LABEL | {"deadline": {"time": {"format": "JSON", "jsonFields": ["a"]}}}


@pytest.mark.parametrize(
    ("row", "path", "value"),
    [
        (LABEL, "name", "other"),
        (LABEL, "provider", "them"),
        (LABEL, "match.kind", "Pod"),
        (LABEL, "match.label.key", "other"),
        (LABEL, "match.label.values", ["v"]),
        (LABEL, "match.label.without", "COMPLETE"),
        (LABEL, "match", {"annotation": {"key": "k"}}),
        (TAINT, "match.taint.value", "v"),
        (TAINT, "match.taint.effect", "NoExecute"),
        (PLAIN | {"match": {"taint": {"effect": "NoExecute"}}}, "match.taint.value", "v"),
        (CONDITION, "match.condition.type", "U"),
        (CONDITION, "match.condition.status", "False"),
        (CONDITION, "match.condition.reasons", ["R"]),
        (CONDITION, "match.condition.message", "m"),
        (FIELD, "match.field.path", "spec.b"),
        (FIELD, "match.field.values", ["v"]),
        (FIELD, "match.withLabel", {"key": "l"}),
        (FIELD | {"match": {"field": {"path": "spec.a"}, "withLabel": {"key": "l"}}}, "match.withLabel.values", ["v"]),
        (FIELD, "match.unlessCondition", {"type": "T"}),
        (LABEL, "cause", "Drain"),
        (LABEL, "confidence", "likely"),
        (LABEL, "cancelable", False),
        (TAINT, "tolerable", True),
        (TIMED, "limit", True),
        (LABEL, "about", "words"),
        (LABEL, "deadline.row", "node-shutdown"),
        (LABEL, "deadline.afterSeconds", 5),
        (LABEL, "deadline.graceCapSeconds", 5),
        (TAINT, "deadline.tolerated", True),
        (LABEL, "deadline.time", {"format": "RFC3339"}),
        (TIMED, "deadline.time.since", "status.other"),
        (TIMED, "deadline.time.minus", ["status.used"]),
        (TIMED, "deadline.time.format", "Duration"),
        (JSON_TIME, "deadline.time.jsonFields", ["b"]),
    ],
)
def test_the_list_of_rows_shows_every_field(row: dict[str, Any], path: str, value: object) -> None:
    other = copy.deepcopy(row)
    *parents, last = path.split(".")
    place = functools.reduce(lambda part, name: part.setdefault(name, {}), parents, other)
    place[last] = value
    assert catalogue.listing([Row.model_validate(row)]) != catalogue.listing([Row.model_validate(other)])


def test_every_field_of_a_row_is_tried_with_the_list() -> None:
    marks = test_the_list_of_rows_shows_every_field.pytestmark
    tried = {name for _, path, _ in marks[0].args[1] for name in path.split(".")} | {"annotation"}
    assert {name for model in _models(Row) for name in _aliases(model)} == tried


def test_the_page_for_users_names_every_field_and_cause() -> None:
    text = PAGE.read_text()
    fields = {name for model in _models(Row) for name in _aliases(model)}
    missing = {name for name in fields if not re.search(rf"`[^`]*\b{name}\b[^`]*`", text)}
    assert missing == set()
    assert {cause for cause in Cause if f"{cause}," not in text and f", {cause} |" not in text} == set()


def _aliases(model: type[Any]) -> set[str]:
    return {info.alias or name for name, info in model.model_fields.items()}


def _models(model: type[Any]) -> list[type[Any]]:
    from pydantic import BaseModel

    found: list[type[Any]] = [model]
    for info in model.model_fields.values():
        for part in getattr(info.annotation, "__args__", (info.annotation,)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += _models(part)
    return found
