"""What developers run agrees: versions, checks, hooks, the hosted workflow, the changelog."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import gracepoint
from release.__main__ import REPEATED, write_version

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def targets() -> dict[str, list[str]]:
    """The Makefile's targets and what they need."""
    return {name: needs.split() for name, needs in re.findall(r"^([a-z-]+):(?!=)([^=#\n]*)", read("Makefile"), re.M)}


def test_the_package_the_library_the_chart_and_the_changelog_name_one_version() -> None:
    version = project()["project"]["version"]
    chart = yaml.safe_load(read("charts/gracepoint/Chart.yaml"))
    assert gracepoint.__version__ == version, "run: make generate"
    assert (chart["version"], chart["appVersion"]) == (version, version), "run: make generate"
    released = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.M)
    assert released[0] == version


def test_library_and_chart_take_their_version_from_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "7.8.9"\n')
    for name in REPEATED:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(read(name))
    write_version(tmp_path)
    code, chart = ((tmp_path / name).read_text() for name in REPEATED)
    assert '__version__ = "7.8.9"\n' in code
    assert re.findall(r"^(?:v|appV)ersion: (.*)", chart, re.M) == ["7.8.9", "7.8.9"]
    assert (code, chart) != tuple(map(read, REPEATED))


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
        if found.name.lower() in pinned and "Requires-Python" in found.metadata
        if not SpecifierSet(needed := found.metadata["Requires-Python"]).contains(oldest)
    }
    assert not too_new, f"expected versions that Python {oldest} can have, as `make env` installs them there"


def test_hooks_before_a_commit_run_ruff_on_the_commits_files_alone() -> None:
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    assert [hook["entry"].split()[:2] for hook in hooks] == [[".venv/bin/ruff", "check"], [".venv/bin/ruff", "format"]]
    assert all("pass_filenames" not in hook and "--force-exclude" in hook["entry"] for hook in hooks)


@pytest.mark.integration
def test_help_shows_eight_commands_and_help_all_the_others() -> None:
    def shown(target: str) -> list[str]:
        argv = ["make", "--no-print-directory", target]
        return subprocess.run(
            argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()

    *lines, rest = shown("help")
    every_day = ["env", "check", "test", "test-unit", "test-cluster", "demo", "try", "docs"]
    assert ([line.split()[0] for line in lines], "make help-all" in rest) == (every_day, True)
    listed = [line.split()[0] for line in shown("help-all") if line.startswith("  ")]
    assert sorted(listed) == sorted(targets())


def workflow(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(read(f".github/workflows/{name}.yaml"))
    return loaded


def workflow_steps() -> Iterator[dict[str, Any]]:
    for name in ("checks", "release"):
        for job in workflow(name)["jobs"].values():
            yield from job.get("steps", [])


def test_hosted_workflows_run_targets_that_exist_and_need_no_root() -> None:
    named = {name for step in workflow_steps() for name in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))}
    assert {"check", "test-unit", "test-contract", "test-cluster", "release"} <= named
    for target in named:
        assert not {"parts", "system"} & set(targets()[target]), target


def test_hosted_workflows_name_each_action_by_its_commit() -> None:
    """A tag can be moved. What uploads to PyPI is a branch, as its authors want it."""
    used = [step["uses"] for step in workflow_steps() if "uses" in step]
    assert {action for action in used if not re.search(r"@[0-9a-f]{40}$", action)} == {
        "pypa/gh-action-pypi-publish@release/v1"
    }


def test_hosted_checks_run_on_the_oldest_and_the_newest_python_that_is_claimed() -> None:
    claimed = re.findall(r":: Python :: (3\.\d+)$", "\n".join(project()["project"]["classifiers"]), re.M)
    assert project()["project"]["requires-python"] == f">={claimed[0]}"
    assert workflow("checks")["jobs"]["checks"]["strategy"]["matrix"]["python"] == [claimed[0], claimed[-1]]


def test_the_environment_has_every_dependency_group() -> None:
    groups = project()["dependency-groups"]
    assert [entry["include-group"] for entry in groups["dev"]] == [name for name in groups if name != "dev"]
    assert "--group dev" in read("Makefile")


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
