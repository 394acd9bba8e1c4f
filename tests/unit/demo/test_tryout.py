"""What ``make try`` advises: commands that exist, on what it has made."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from demo import tryout
from tests.command_line import command
from tests.unit.demo.fakes.answers import Answers


class TwoNodes(Answers):
    """A cluster that stays."""

    kubeconfig = Path("/somewhere/kubeconfig")

    @property
    def nodes(self) -> tuple[str, ...]:
        return ("node-1", "node-2")


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")  # where kubectl is not built
    found = [shlex.split(line, comments=True) for line in tryout.advice(TwoNodes(tmp_path)) if line.startswith("  ")]
    assert len(found) == 9
    return found


def test_the_commands_of_the_advice_exist(lines: list[list[str]]) -> None:
    named = [line[2] for line in lines if line[:2] == ["kubectl", "gracepoint"]]
    assert named == ["status", "doctor", "drill", "timeline"]
    for name in named:
        assert command(name, "--help").code == 0


def test_the_shell_is_led_to_the_cluster(lines: list[list[str]]) -> None:
    assert lines[0][:2] == ["export", "KUBECONFIG=/somewhere/kubeconfig"]
    assert lines[0][2].endswith(":$PATH")
    assert {line[2] for line in lines if line[1] in ("drain", "uncordon")} == {"node-1"}


def test_pages_use_the_same_names(lines: list[list[str]]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "quickstart.md").read_text()
    (drill,) = [line for line in lines if line[2] == "drill"]
    assert " ".join(drill) in page
