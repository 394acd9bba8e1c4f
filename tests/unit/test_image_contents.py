"""The operator's image contains the versions that were tested, and the list of its contents says so."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from release.__main__ import write_sbom

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
#: Builds the project's wheel in the image. The tests do not need it.
NOT_TESTED = {"setuptools"}


def read(name: str) -> str:
    return (ROOT / name).read_text()


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def known_versions() -> dict[str, str]:
    """The versions of ``constraints.txt`` by name."""
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.M)}


def contained() -> dict[str, tuple[str, set[str]]]:
    """The versions of ``operator/requirements.txt`` and the hashes of their files, by name."""
    found = {}
    for entry in re.split(r"\n(?=\w)", read("operator/requirements.txt").strip()):
        if not entry.startswith("#"):
            pin = re.match(r"([\w.-]+)==([^ \\\n]+)", entry)
            assert pin, entry
            found[normal(pin[1])] = pin[2], set(re.findall(r"--hash=sha256:(\w+)", entry))
    return found


def test_the_image_contains_what_was_tested_by_hash() -> None:
    pinned = {name: version for name, (version, _) in contained().items()}
    assert all(hashes for _, hashes in contained().values())
    assert {name: version for name, version in pinned.items() if name not in NOT_TESTED} == {
        name: version for name, version in known_versions().items() if name in pinned.keys() - NOT_TESTED
    }
    extra = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]["operator"]
    assert {normal(re.split(r"[<>=~\[ ]", line)[0]) for line in extra} <= pinned.keys(), "run: make requirements"
    assert "--require-hashes" in read("operator/Dockerfile")


def test_the_list_of_contents_is_exactly_what_the_image_contains(tmp_path: Path) -> None:
    write_sbom(tmp_path / "made.json", ROOT)
    made = json.loads((tmp_path / "made.json").read_text())
    listed = {normal(each["name"]): each for each in made["components"]}
    assert len(listed) == len(made["components"])
    assert {name: each["version"] for name, each in listed.items()} == {
        name: version for name, (version, _) in contained().items()
    }
    for name, (version, hashes) in contained().items():
        assert listed[name]["purl"] == f"pkg:pypi/{name}@{version}"
        files = {value["content"] for file in listed[name]["externalReferences"] for value in file.get("hashes", [])}
        assert files == hashes, name
    own = tomllib.loads(read("pyproject.toml"))["project"]
    assert (made["metadata"]["component"]["name"], made["metadata"]["component"]["version"]) == (
        own["name"],
        own["version"],
    )
