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
#: The sections of the page that leads from an empty cluster to a drill, and the manifests of each.
PLATFORMS = {
    "GKE": ("gke-tpu", "gke-gpu"),
    "EKS": ("eks",),
    "AKS": ("aks",),
    "Your own machines, with Kueue": ("on-premises", "on-premises-job"),
}
LAST = "Install and run the first job"
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


def section(title: str) -> str:
    """The part of the page about platforms that has this title."""
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text("docs/platforms.md"), re.S | re.M)
    return str(found)


@pytest.mark.parametrize("title", PLATFORMS)
def test_a_section_leads_from_an_empty_cluster_to_a_drill(title: str) -> None:
    page = section(title) + section(LAST)
    steps = (
        "docker push $REGISTRY/trainer:$TAG",
        "> job.yaml",
        "-n jobset-system rollout status deployment/jobset-controller-manager",
        "helm test gracepoint",
        "gracepoint lint job.yaml",
        "gracepoint doctor",
        "gracepoint drill",
    )
    places = [page.find(step) for step in steps]
    assert -1 not in places
    assert places == sorted(places)
    for variable in ("REGISTRY", "TAG", "LABEL", "POOL"):
        assert re.search(rf"^(.* )?{variable}=", section(title), re.M), f"{title} uses ${variable} without setting it"


def test_every_manifest_of_a_platform_is_used_by_its_section() -> None:
    files = {path.stem for path in ROOT.glob("examples/platforms/*.yaml")}
    assert files == {name for names in PLATFORMS.values() for name in names}
    for title, names in PLATFORMS.items():
        assert all(f"{name}.yaml" in section(title) for name in names)


def documents(title: str) -> list[Json]:
    return [body for name in PLATFORMS[title] for body in yaml.safe_load_all(text(f"examples/platforms/{name}.yaml"))]


def jobsets() -> list[Any]:
    return [
        pytest.param(title, body, id=f"{title}-{body['metadata']['labels']['gracepoint.dev/policy']}")
        for title in PLATFORMS
        for body in documents(title)
        if body["kind"] == "JobSet"
    ]


@pytest.mark.parametrize(("title", "body"), jobsets())
def test_jobsets_of_platforms_have_no_errors_and_no_warnings(title: str, body: Json) -> None:
    policies = {one["metadata"]["name"]: one for one in documents(title) if one["kind"] == "CheckpointPolicy"}
    claims = {one["metadata"]["name"]: one for one in documents(title) if one["kind"] == "PersistentVolumeClaim"}
    policy = CheckpointPolicy.of(policies[body["metadata"]["labels"]["gracepoint.dev/policy"]])
    report = check(body, policy, claims)
    assert [finding for finding in report.findings if finding.severity.value != "info"] == []


def test_what_commands_replace_in_a_manifest_is_there() -> None:
    for names, replaced in re.findall(
        r"sed \"(.*?)\"[\\\s]*examples/platforms/([\w-]+)\.yaml", text("docs/platforms.md")
    ):
        for found in re.findall(r"s#([^#]+)#", names):
            assert found in text(f"examples/platforms/{replaced}.yaml"), (replaced, found)


def test_the_image_that_manifests_name_is_the_one_that_commands_replace() -> None:
    for title in PLATFORMS:
        for body in documents(title):
            if body["kind"] == "JobSet":
                job = body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
                assert job["containers"][0]["image"] == "registry.example/trainer:1"
                assert "s#registry.example/trainer:1#$REGISTRY/trainer:$TAG#" in section(title)
