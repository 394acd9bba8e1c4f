"""The commands as a user calls them, without a cluster."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from gracepoint import checkpoint
from gracepoint.version import __version__
from gracepoint_cli.__main__ import completions
from gracepoint_operator.signals import BUILT_IN
from tests.command_line import command
from tests.object_stores.servers import Bucket

COMMANDS = ["status", "goodput", "drill", "timeline", "checkpoints", "lint", "signals", "doctor"]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for name in ("_GRACEPOINT_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
        monkeypatch.setenv(name, "")  # so that what completion sets is undone


def test_help_names_every_command_and_the_exit_codes() -> None:
    done = command("--help")
    assert done.code == 0
    assert [name for name in COMMANDS if name not in done.out] == []
    assert "Exit codes" in done.out


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [60, 120])
def test_every_command_has_help_that_fits(name: str, width: int) -> None:
    done = command(name, "--help", columns=width)
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= width
    assert [line for line in done.out.splitlines() if "<bool>" in line and "--help" not in line] == []


def test_the_version_is_that_of_the_library() -> None:
    assert command("--version").out.strip() == f"gracepoint {__version__}"


def test_no_kubeconfig_is_said_with_what_to_do() -> None:
    done = command("status")
    assert done.code == 3
    assert "found no kubeconfig" in done.err
    assert "--kubeconfig" in done.err


def test_a_name_that_is_no_file_needs_a_cluster() -> None:
    done = command("lint", "jobset")
    assert (done.code, "there is no file 'jobset', and no cluster" in done.err) == (3, True), done


def test_an_unknown_context_is_named_with_those_there_are(tmp_path: Path) -> None:
    config = {"contexts": [{"name": "here", "context": {}}], "current-context": "here"}
    (tmp_path / "config").write_text(json.dumps(config))
    done = command("status", "--kubeconfig", tmp_path / "config", "--context", "there")
    assert done.code == 3
    assert "no context 'there'" in done.err
    assert "here" in done.err


def test_signals_are_all_listed_or_one_in_full() -> None:
    listed = command("signals", "-o", "json").json
    assert [row["name"] for row in listed] == [row.name for row in BUILT_IN]
    one = command("signals", BUILT_IN[0].name)
    assert "\\n" not in one.out  # it has several lines
    assert BUILT_IN[0].about[:40] in one.out


def test_yaml_says_what_json_says() -> None:
    assert yaml.safe_load(command("signals", "-o", "yaml").out) == command("signals", "-o", "json").json


def test_several_files_and_stdin_are_checked_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{name}.yaml" for name in ("good", "other")]
    for file in files:
        file.write_text(yaml.safe_dump(job(file.stem)))
    monkeypatch.setattr(sys, "stdin", io.StringIO(yaml.safe_dump(job("piped"))))
    done = command("lint", "--offline", "-o", "json", *files, "-", files[0])
    assert [report["name"] for report in done.json] == ["good", "other", "piped"]
    done = command("lint", "--offline", files[0], tmp_path / "missing.yaml")
    assert (done.code, "missing.yaml: No such file" in done.err) == (3, True), done


def job(name: str) -> dict[str, Any]:
    container = {"name": "main", "image": "image"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["status", "--request-timeout", "soon"], "expected a time as 30, 10s", id="no time"),
        pytest.param(["frobnicate"], "No such command", id="no such command"),
        pytest.param(["status", "train"], "extra argument", id="an argument too many"),
        pytest.param(["drill"], "Missing argument 'JOB'", id="no job"),
        pytest.param(["drill", "pod/x"], "expected NAME or one of jobset/NAME", id="no kind of a job"),
        pytest.param(["doctor", "pod/x"], "expected NAME or one of jobset/NAME", id="doctor of a pod"),
        pytest.param(["lint", "pod/x"], "expected NAME or one of jobset/NAME", id="lint of a pod"),
        pytest.param(["timeline"], "Missing argument 'PREEMPTION'", id="no Preemption"),
        pytest.param(["timeline", "x", "--html", "/"], "is a directory", id="a page in the place of a folder"),
        pytest.param(["signals", "gke-impending"], "Did you mean gke-impending-termination", id="a row by half"),
        pytest.param(["signals", "--provider", "moon"], "Karpenter; Kubernetes; Kueue;", id="no provider"),
        pytest.param(["signals", "--node", "x", "node-not-ready"], "expected one of them", id="a row of a node"),
    ],
)
def test_a_wrong_argument_ends_with_two_and_says_what_is_right(arguments: list[str], words: str) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert words in " ".join(done.err.replace("│", " ").split()), done.err


@pytest.mark.parametrize(
    ("before", "incomplete", "expected"),
    [
        pytest.param([], "st", ["status"], id="a command"),
        pytest.param(["checkpoints"], "", ["ls", "show", "verify"], id="commands of a group"),
        pytest.param(["status"], "--all", ["--all-namespaces"], id="an option"),
        pytest.param(["drill"], "x", [], id="names without a cluster"),
    ],
)
def test_words_are_completed(before: list[str], incomplete: str, expected: list[str]) -> None:
    assert completions(before, incomplete) == expected


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """Two checkpoints."""
    root = tmp_path / "steps"
    for step in (3, 12):
        checkpoint.save(root / str(step), {"w": np.arange(step * 8.0), "name": "x"})
    return root


def test_checkpoints_are_listed_newest_first(steps: Path) -> None:
    listed = command("checkpoints", "ls", steps, "-o", "json").json
    assert [Path(row["path"]).name for row in listed] == ["12", "3"]
    assert {row["by"] for row in listed} == {"Gracepoint"}
    table = command("checkpoints", "ls", f"file://{steps}")
    assert (table.code, table.out.split()[0]) == (0, "STEP")


def test_a_checkpoint_is_shown_leaf_by_leaf(steps: Path) -> None:
    leaves = {leaf["name"]: leaf for leaf in command("checkpoints", "show", steps / "3", "-o", "json").json["leaves"]}
    assert (leaves["w"]["shape"], leaves["w"]["dtype"]) == ([24], "float64")
    assert "96" in command("checkpoints", "show", steps).out  # the newest


def test_damage_ends_with_one_and_is_named(steps: Path) -> None:
    assert command("checkpoints", "verify", steps).code == 0
    wide = command("checkpoints", "verify", steps, "-o", "wide")
    assert [str(steps / step) in wide.out for step in ("3", "12")] == [True, True]
    victim = max((file for file in (steps / "12").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    done = command("checkpoints", "verify", steps, "-o", "json")
    assert done.code == 1
    assert [(Path(item["path"]).name, item["ok"]) for item in done.json] == [("12", False), ("3", True)]


@pytest.mark.parametrize("name", ["ls", "show", "verify"])
def test_a_folder_without_checkpoints_is_named(name: str, tmp_path: Path) -> None:
    done = command("checkpoints", name, tmp_path)
    assert done.code == 3
    assert "found no complete checkpoint" in done.err


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = command("checkpoints", "ls", tmp_path / "none")
    assert (done.code, "there is nothing of that name" in done.err) == (3, True), done


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        pytest.param("ftp://x/y", "ftp:// is not known", id="a store that is not known"),
        pytest.param("gs://", "expected gs://bucket/name", id="no bucket"),
        pytest.param("s3:/bucket/run", "expected a path, file:///PATH, gs://BUCKET/PATH", id="one slash"),
        pytest.param("", "expected a path", id="nothing"),
    ],
)
def test_a_location_that_is_none_is_a_wrong_argument(uri: str, words: str) -> None:
    done = command("checkpoints", "ls", uri)
    assert (done.code, words in done.err) == (2, True), done


def test_checkpoints_in_a_bucket_are_listed_shown_and_verified(bucket: Bucket) -> None:
    run = f"{bucket.uri}/runs/llm"
    for step in (3, 12):
        checkpoint.save(f"{run}/{step}", {"w": np.arange(step * 8.0)})
    listed = command("checkpoints", "ls", run, "-o", "json").json
    assert [(row["path"], row["by"]) for row in listed] == [(f"{run}/{step}", "Gracepoint") for step in (12, 3)]
    assert command("checkpoints", "show", run, "-o", "json").json["leaves"][0]["shape"] == [96]
    verified = command("checkpoints", "verify", f"{run}/3")
    assert (verified.code, f"{run}/3" in verified.out) == (0, True), verified


@pytest.mark.parametrize("name", ["ls", "show", "verify"])
def test_a_bucket_that_does_not_exist_is_named(name: str, bucket: Bucket) -> None:
    done = command("checkpoints", name, f"{bucket.scheme}://not-{bucket.name}/runs")
    assert (done.code, "The bucket does not exist" in done.err) == (3, True), done
