"""Users' rows of the disruption catalogue, from the values to the file that the operator reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint_operator.signals import read_user_rows
from tests.chart.conftest import Helm
from tests.chart.objects import of_kind, one

READY_MADE = Path(__file__).parents[2] / "examples" / "signals.yaml"


def values(folder: Path, rows: list[Any]) -> Path:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump({"signals": {"rows": rows}}))
    return path


def test_the_ready_made_rows_reach_the_operator_as_they_are(template: Helm, tmp_path: Path) -> None:
    rows = yaml.safe_load(READY_MADE.read_text())["signals"]["rows"]
    done = template("--values", str(values(tmp_path, rows)))
    assert done.returncode == 0, done.stderr
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    config = next(o for o in of_kind(objects, "ConfigMap") if o["metadata"]["name"].endswith("-signals"))
    pod = one(objects, "Deployment")["spec"]["template"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["signals"]["configMap"]["name"] == config["metadata"]["name"]
    file = tmp_path / "signals.json"
    file.write_text(config["data"]["signals.json"])
    assert json.loads(file.read_text()) == {"rows": rows}
    assert [row.name for row in read_user_rows(file)] == [row["name"] for row in rows]

    # The rows are read at the operator's start: with others, its pods are replaced.
    fewer = template("--values", str(values(tmp_path, rows[1:])))
    other = one([document for document in yaml.safe_load_all(fewer.stdout) if document], "Deployment")
    assert other["spec"]["template"]["metadata"]["annotations"] != pod["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"provder": "x"}, "provder", id="an unknown field"),
        pytest.param({"match": {"taint": {"key": "a", "efect": "NoExecute"}}}, "efect", id="... further down"),
        pytest.param({"confidence": "maybe"}, "confidence", id="a wrong value"),
    ],
)
def test_helm_refuses_a_row_that_cannot_be_right(
    template: Helm, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    row = {"name": "a", "provider": "us", "match": {"label": {"key": "a"}}, "cause": "Drain", "confidence": "sure"}
    done = template("--values", str(values(tmp_path, [row | {"cancelable": True} | change])))
    assert done.returncode != 0
    assert said in done.stderr
    assert "signals" in done.stderr
