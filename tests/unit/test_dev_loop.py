"""What developers run agrees: versions, checks, hooks, the hosted workflow, the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import gracepoint

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def targets() -> dict[str, list[str]]:
    """The Makefile's targets and what they need."""
    return {name: needs.split() for name, needs in re.findall(r"^([a-z-]+):([^=#\n]*)", read("Makefile"), re.M)}


def test_the_package_the_library_the_chart_and_the_changelog_name_one_version() -> None:
    version = project()["project"]["version"]
    chart = yaml.safe_load(read("charts/gracepoint/Chart.yaml"))
    assert gracepoint.__version__ == version
    assert (chart["version"], chart["appVersion"]) == (version, version)
    released = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.M)
    assert released[0] == version


def test_images_and_charts_that_pages_name_with_a_version_have_this_one() -> None:
    version = project()["project"]["version"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "charts").rglob("README.md")]
    for page in pages:
        named = re.findall(
            r"gracepoint-operator:v?(\d[\w.]*)|image\.tag=v?(\d[\w.]*)", page.read_text(encoding="utf-8")
        )
        assert {tag for pair in named for tag in pair if tag} <= {version}, page


def test_pinned_versions_run_on_the_oldest_python_that_is_promised() -> None:
    oldest = project()["project"]["requires-python"].removeprefix(">=") + ".0"
    pinned = {name.lower() for name in re.findall(r"^([\w.-]+)==", read("constraints.txt"), re.M)}
    too_new = {
        f"{found.name} {found.version} needs Python {needed}"
        for found in metadata.distributions()
        if found.name.lower() in pinned and (needed := found.metadata["Requires-Python"])
        if not SpecifierSet(needed).contains(oldest)
    }
    assert not too_new, f"expected versions that Python {oldest} can have, as `make env` installs them there"


def test_the_hooks_before_a_commit_are_the_checks_of_make_check() -> None:
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [f"make {check}" for check in targets()["check"]]
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks} == {("system", False)}


def test_the_hosted_workflow_runs_targets_that_exist_and_need_no_root() -> None:
    jobs = yaml.safe_load(read(".github/workflows/checks.yaml"))["jobs"]
    steps = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = [step.removeprefix("make ") for step in steps]
    assert {"check", "test-unit", "test-contract"} <= set(named)
    for target in named:
        assert not {"parts", "system"} & set(targets()[target]), target


def test_changelog_fragments_have_a_kind_with_a_heading() -> None:
    kinds = {kind["directory"] for kind in project()["tool"]["towncrier"]["type"]}
    for fragment in (ROOT / "changelog.d").iterdir():
        if fragment.name != "README.md":
            assert re.fullmatch(rf"\+[a-z0-9-]+\.({'|'.join(kinds)})\.md", fragment.name), fragment.name


@pytest.mark.integration
def test_no_link_is_part_of_the_source() -> None:
    """A link to an environment or a cache elsewhere would replace those of everybody who takes the change."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a checkout of git")
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000 ")] == []
