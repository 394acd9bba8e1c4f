"""What is generated from the chart is the newest: the README's table of values, and the plain manifests."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.__main__ import NAME, NAMESPACE, main, rows, with_table
from tests.chart.conftest import Helm
from tests.chart.helm import CHART, OLDEST_KUBERNETES
from tests.chart.objects import Json, of_kind, one


def test_the_readme_has_the_newest_table_of_values() -> None:
    readme = (CHART / "README.md").read_text()
    assert with_table(readme) == readme, "run: make generate"


def test_the_table_says_of_every_value_what_it_is() -> None:
    """By its own comment in values.yaml, or by that of its group."""
    said = {name: about for name, _, _, about in rows()}
    silent = [name for name, about in said.items() if not about and not said.get(name.rpartition(".")[0])]
    assert silent == []


def test_values_and_schema_have_the_same_names() -> None:
    schema: Any = json.loads((CHART / "values.schema.json").read_text())

    def names(level: Json, before: str = "") -> set[str]:
        found = set()
        for key, inner in level.get("properties", {}).items():
            found |= {before + key} | names(inner, f"{before}{key}.")
        return found

    documented = {name for name, *_ in rows()}
    leaves = {name for name, allowed, *_ in rows() if allowed}
    inside = tuple(f"{name}." for name in leaves)  # fields of Kubernetes' own, as in a security context
    assert {name for name in names(schema) if not name.startswith(inside)} == documented


@pytest.fixture
def manifests(tmp_path: Path, helm: Helm) -> Path:
    """Written twice, as after a change of a value."""
    for tag in ("v1", "v2"):
        main(["manifests", f"--folder={tmp_path}", "--set", f"image.tag={tag}", "--set=replicas=3"])
    return tmp_path


def test_plain_manifests_are_what_helm_makes_of_the_chart(manifests: Path, helm: Helm) -> None:
    token = (manifests / "admission-token").read_text()
    assert len(token) >= 32
    assert stat.S_IMODE((manifests / "admission-token").stat().st_mode) == 0o600
    settings = ("--set", f"admission.token={token}", "--set", "image.tag=v2", "--set", "replicas=3")
    place = ("--namespace", NAMESPACE, "--kube-version", OLDEST_KUBERNETES)
    done = helm("template", NAME, str(CHART), *place, *settings)
    wanted = [document for document in yaml.safe_load_all(done.stdout) if document]
    namespace, *found = yaml.safe_load_all((manifests / "gracepoint.yaml").read_text())
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", NAMESPACE)
    (test,) = of_kind(wanted, "Pod")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert [each for each in found if each] == [each for each in wanted if each != test]
    assert one(found, "Deployment")["spec"]["replicas"] == 3


def test_a_value_that_does_not_exist_is_refused(tmp_path: Path, helm: Helm) -> None:
    with pytest.raises(SystemExit, match="replica"):
        main(["manifests", f"--folder={tmp_path}", "--set", "replica=3"])
    with pytest.raises(SystemExit):
        main(["values", "--set", "replica=3"])
