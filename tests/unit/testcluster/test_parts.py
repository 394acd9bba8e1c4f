"""The Go parts: versions and keys come from go.mod and nowhere else."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.testcluster import parts
from tests.testcluster.api import ClusterError
from tests.testcluster.parts import PARTS


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTCLUSTER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_part_says_its_version_and_locks_its_dependencies(part: parts.Part) -> None:
    if part.module:
        assert part.version.count(".") >= 2
        assert f"{part.module} {part.version}" in (part.source / "go.sum").read_text()
    assert part.version in part.built.name


def test_the_staging_modules_have_the_version_of_kubernetes() -> None:
    text = (parts.part("kubernetes").source / "go.mod").read_text()
    version = parts.part("kubernetes").version.replace("v1.", "v0.")
    replaced = [line.split()[-1] for line in text.splitlines() if " => " in line]
    assert len(replaced) > 25
    assert set(replaced) == {version}


def test_a_changed_lock_file_is_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MODULES", tmp_path)
    shutil.copytree(Path(parts.__file__).parent / "parts" / "etcd", tmp_path / "etcd")
    before = parts.part("etcd").built
    with (tmp_path / "etcd" / "go.sum").open("a") as file:
        file.write("\n")
    assert parts.part("etcd").built != before


def test_what_is_not_built_is_said_with_the_command_that_builds_it() -> None:
    with pytest.raises(ClusterError, match=r"etcd is not built; run: python -m tests\.testcluster build"):
        parts.program("etcd")
    assert [part.name for part in parts.missing(("etcd",))] == ["etcd"]


def test_no_go_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ClusterError, match="Go is needed"):
        parts.build(("etcd",))


@pytest.mark.integration  # chmod
def test_clusters_that_start_at_once_copy_the_manifests_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    (source / "config" / "default").mkdir(parents=True)
    (source / "config" / "default" / "one.yaml").write_text("kind: Service")
    (source / "config" / "default" / "one.yaml").chmod(0o400)
    monkeypatch.setattr(parts, "module_folder", lambda name: source)
    parts.part("jobset").built.mkdir()
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda _: parts.manifests("jobset", "config"), range(8)))
    assert set(copies) == {parts.part("jobset").built / "config"}
    (copies[0] / "default" / "one.yaml").write_text("may be changed")
