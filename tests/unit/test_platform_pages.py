"""What the pages about platforms tell to run is right, as far as it can be checked without the platform."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint_cli.lint.job_checks import check
from gracepoint_operator.resources import CheckpointPolicy
from tests.page_commands import blocks

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"])
#: From an empty cluster to a drill.
PLATFORMS = ("gke", "eks", "aks", "on-premises")
CHART = "charts/gracepoint"


def text(page: Path | str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command that installs the project's chart."""
    for line in blocks(text(page)):
        for command in re.split(r"&&|;", line):
            if re.match(r"\s*helm (install|upgrade)\b", command) and CHART in command:
                yield shlex.split(command)


def values_of(words: list[str]) -> list[str]:
    """Keys of the values that a command of Helm sets."""
    pairs = itertools.pairwise(words)
    return [value.partition("=")[0] for option, value in pairs if option in ("--set", "--set-string")]


def known(values: Any, key: str) -> bool:
    """True if the chart has a value of that key; an empty object takes any."""
    for part in re.split(r"(?<!\\)\.", re.sub(r"\[\d+\]", "", key)):
        if not isinstance(values, dict):
            return isinstance(values, list)  # of objects, whose fields the schema has
        if values and part not in values:
            return False
        values = values.get(part, {})
    return True


def settings() -> list[Any]:
    return [
        pytest.param(key, id=f"{page.stem}-{number}-{key}")
        for page in PAGES
        for number, words in enumerate(commands(page))
        for key in values_of(words)
    ]


@pytest.mark.parametrize("key", settings())
def test_values_that_commands_set_are_the_charts(key: str) -> None:
    assert known(yaml.safe_load(text(f"{CHART}/values.yaml")), key)


def test_a_value_that_the_chart_lacks_is_noticed() -> None:
    values = yaml.safe_load(text(f"{CHART}/values.yaml"))
    assert not known(values, "image.repo")
    assert not known(values, "images.repository")
    assert known(values, r"nodeSelector.example\.com/pool")


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_page_leads_from_an_empty_cluster_to_a_drill(name: str) -> None:
    page = text(f"docs/{name}.md")
    assert [words for words in commands(Path(f"docs/{name}.md")) if {"--set"} <= set(words)]
    steps = (
        "jobset-controller-manager",
        "helm test gracepoint",
        "gracepoint lint",
        "gracepoint doctor",
        "gracepoint drill",
    )
    places = [page.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)


def documents(name: str) -> list[Json]:
    blocks = re.findall(r"^```yaml\n(.*?)^```", text(f"docs/{name}.md"), re.S | re.M)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


def jobsets() -> list[Any]:
    return [
        pytest.param(name, body, id=f"{name}-{body['metadata']['labels']['gracepoint.dev/policy']}")
        for name in PLATFORMS
        for body in documents(name)
        if body["kind"] == "JobSet"
    ]


@pytest.mark.parametrize(("name", "body"), jobsets())
def test_jobsets_of_pages_have_no_errors_and_no_warnings(name: str, body: Json) -> None:
    policies = {one["metadata"]["name"]: one for one in documents(name) if one["kind"] == "CheckpointPolicy"}
    claims = {one["metadata"]["name"]: one for one in documents(name) if one["kind"] == "PersistentVolumeClaim"}
    policy = CheckpointPolicy.of(policies[body["metadata"]["labels"]["gracepoint.dev/policy"]])
    report = check(body, policy, claims)
    assert [finding for finding in report.findings if finding.severity.value != "info"] == []


def test_images_of_jobsets_are_what_the_pages_push() -> None:
    for name in PLATFORMS:
        pushed = re.findall(r"docker push \$REGISTRY/([\w-]+):", text(f"docs/{name}.md"))
        for body in documents(name):
            if body["kind"] == "JobSet":
                job = body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
                image = job["containers"][0]["image"].rpartition("/")[2].partition(":")[0]
                assert image in pushed, (name, image)
