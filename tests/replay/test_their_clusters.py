"""On a cluster that somebody else has, the replay begins with what is missing, before it changes anything."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import testcluster
from tests.replay import trace
from tests.replay.__main__ import run
from tests.testcluster import existing

FAULTS = (trace.Fault(1, 1, 1, trace.JOBSET, "drain", 15, 0),)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """The commands that reach the cluster, which has the nodes node-1 and node-2, and does what it is told."""
    done: list[Sequence[str]] = []

    def answer(argv: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        done.append(argv)
        if "node" in argv and not set(argv[argv.index("node") + 1 :]) <= {"node-1", "node-2"}:
            raise testcluster.ClusterError('nodes "node-3" not found')
        return subprocess.CompletedProcess(argv, 0, stdout="")

    monkeypatch.setattr(existing, "run", answer)
    return done


def changes(commands: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    return [argv for argv in commands if not {"get", "config"} & set(argv)]


def test_without_a_shared_folder_it_says_at_once_what_to_set(
    commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, found in ((None, "set TESTCLUSTER_SHARED_DIR"), (str(tmp_path / "no"), "found none at")):
        if variable is None:
            monkeypatch.delenv("TESTCLUSTER_SHARED_DIR", raising=False)
        else:
            monkeypatch.setenv("TESTCLUSTER_SHARED_DIR", variable)
        commands.clear()
        with pytest.raises(testcluster.NotSupported, match=found):
            run(FAULTS, say=print, folder=tmp_path, context="theirs", nodes=("node-1", "node-2"))
        assert sum("config" in argv for argv in commands) == 1, "it is not tried again"
        assert changes(commands) == []


def test_a_node_that_is_not_there_is_named_before_the_operator_is_installed(
    commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESTCLUSTER_SHARED_DIR", str(tmp_path))
    with pytest.raises(testcluster.ClusterError, match="node-3"):
        run(FAULTS, say=print, folder=tmp_path, context="theirs", nodes=("node-1", "node-3"))
    assert changes(commands) == []


def test_the_context_counts_more_than_a_cluster_that_is_kept(
    commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESTCLUSTER_ID", "kept")
    monkeypatch.delenv("TESTCLUSTER_SHARED_DIR", raising=False)
    with pytest.raises(testcluster.NotSupported, match="of theirs"):
        run(FAULTS, say=print, folder=tmp_path, context="theirs", nodes=("node-1", "node-2"))


def test_images_are_those_of_the_registry_that_the_cluster_pulls_from(
    commands: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESTCLUSTER_SHARED_DIR", str(tmp_path))
    said: list[str] = []

    def refuse(*args: object, **_: object) -> None:
        raise testcluster.NotSupported("that is enough")

    monkeypatch.setattr("demo.install.install_operator", refuse)
    with pytest.raises(testcluster.NotSupported, match="that is enough"):
        run(
            FAULTS,
            say=said.append,
            folder=tmp_path,
            context="theirs",
            nodes=("node-1", "node-2"),
            registry="registry.example.com/ours",
        )
    assert any("docker build --tag registry.example.com/ours/operator:demo" in line for line in said), said
    assert any("docker build --tag registry.example.com/ours/transformer:demo" in line for line in said), said
