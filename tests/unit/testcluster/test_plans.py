"""What is decided without a cluster: names, addresses, requirements, reasons."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import testcluster
from tests.testcluster import cache, existing, network, providers, runs, system, wheelhouse
from tests.testcluster.existing import ExistingCluster
from tests.testcluster.images import canonical
from tests.testcluster.network import Network


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTCLUSTER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        ("operator", "docker.io/library/operator:latest"),
        ("gracepoint/operator:dev", "docker.io/gracepoint/operator:dev"),
        ("gracepoint.test/operator", "gracepoint.test/operator:latest"),
        ("localhost/a:1", "localhost/a:1"),
        ("host:5000/a", "host:5000/a:latest"),
    ],
)
def test_images_have_the_names_that_a_runtime_gives_them(tag: str, name: str) -> None:
    assert canonical(tag) == name


def test_requirements_follow_extras_that_name_the_project_itself(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        """
        [build-system]
        requires = ["setuptools>=77"]
        [project]
        name = "thing"
        dependencies = ["base"]
        [project.optional-dependencies]
        a = ["one"]
        b = ["thing[a]", "two"]
        c = ["three"]
        """
    )
    assert wheelhouse.requirements_of(pyproject, ["b"]) == ["base", "one", "setuptools>=77", "two"]


def test_machines_have_addresses_of_their_own() -> None:
    net = Network("10.213.7.0/24", "gp-x")
    addresses = [net.host_ip, *(net.node_ip(index) for index in range(network.MAX_NODES + 1))]
    assert len(set(addresses)) == len(addresses)
    assert net.host_ip == "10.213.7.1"
    assert json.loads(network.cni_config(2))["plugins"][0]["ipam"]["ranges"] == [[{"subnet": "10.244.2.0/24"}]]


def test_a_subnet_that_this_host_uses_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        stdout = json.dumps([{"dst": "default"}, {"dst": "10.213.0.0/23"}, {"dst": "10.213.2.1"}])

    monkeypatch.setattr(network, "run", lambda argv: Answer)
    assert network.free_subnet() == "10.213.3.0/24"


def test_a_record_is_found_by_its_name() -> None:
    assert runs.find("mine") is None
    record = runs.Record("mine", "abc123", 2, "10.213.0.0/24", (1, 2))
    record.save()
    assert runs.find("mine") == record
    assert runs.records() == [record]


def test_a_cluster_whose_owner_is_gone_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned = runs.Record("abandoned", "aaaaaa", 1, "10.213.0.0/24", (2**22 + 1, 7))
    abandoned.save()
    removed: list[runs.Record] = []
    monkeypatch.setattr(runs, "remove", removed.append)
    runs.sweep()
    assert removed == [abandoned]


def test_attaching_to_nothing_says_how_to_start() -> None:
    assert not testcluster.running()
    with pytest.raises(testcluster.ClusterError, match=r"python -m tests\.testcluster up"):
        testcluster.attach()


def test_an_existing_cluster_is_never_picked_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTCLUSTER_CONTEXT", raising=False)
    monkeypatch.setattr(providers, "why_not_local", lambda: "no reason")
    with pytest.raises(testcluster.ClusterError, match="cannot run here: no reason"):
        testcluster.open()


def test_what_an_existing_cluster_cannot_do_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTCLUSTER_SHARED_DIR", raising=False)
    monkeypatch.setattr(existing, "run", lambda argv: subprocess.CompletedProcess(argv, 0, stdout="their kubeconfig"))
    cluster = ExistingCluster("theirs")
    with pytest.raises(testcluster.NotSupported, match="delete the machine of node-1"):
        cluster.lose_node("node-1")
    with pytest.raises(testcluster.NotSupported, match="docker build"):
        cluster.build_image("a:1", Path("Dockerfile"), Path())
    with pytest.raises(testcluster.NotSupported, match="TESTCLUSTER_SHARED_DIR"):
        _ = cluster.shared_dir


@pytest.mark.integration
def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "buildah" else which(name))
    assert "buildah" in system.missing_packages()
    assert "buildah: not found (package buildah on Debian and Ubuntu)" in (system.why_not_local() or "")


@pytest.mark.integration
def test_programs_that_mount_are_no_need_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "mkfs.xfs" else which(name))
    assert "xfsprogs" in system.missing_mount_tools()
    assert "xfsprogs" not in system.missing_packages()


def test_a_cache_where_nodes_have_their_own_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda *names: Path("/var/lib/x", *names))
    assert "set TESTCLUSTER_CACHE" in system.cache_place().fix
