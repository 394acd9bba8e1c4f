"""What commands print fits the terminal, and can be copied from it."""

from __future__ import annotations

import http.server
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from gracepoint_cli import output
from gracepoint_cli.cluster import Cluster
from gracepoint_operator.kube.objects import PREEMPTIONS
from tests.command_line import command

COLUMNS = ["JOB", "POLICY", "CONNECTED", "LAST PREEMPTION"]
ROWS = [["jobset/transformer", "careful", "2 of 2", "transformer-4d36580f-1 Committed"], ["job/other", "-", "-", ""]]


def printed(monkeypatch: pytest.MonkeyPatch, width: int, *, terminal: bool = True) -> list[str]:
    made = io.StringIO()
    console = Console(file=made, width=width, force_terminal=terminal, color_system=None, highlight=False)
    monkeypatch.setattr(output, "console", lambda: console)
    monkeypatch.setattr(sys, "stdout", made)
    output.put_table(COLUMNS, ROWS)
    return [line.rstrip() for line in made.getvalue().splitlines()]


def test_a_table_that_fits_has_a_line_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 100)
    assert [line.split()[0] for line in lines] == ["JOB", "jobset/transformer", "job/other"]


def test_a_table_that_does_not_fit_has_a_line_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 40)
    assert lines[:4] == [
        "JOB               jobset/transformer",
        "POLICY            careful",
        "CONNECTED         2 of 2",
        "LAST PREEMPTION   transformer-4d36580f-1 Committed",  # whole, although the line is longer
    ]
    assert lines[4:6] == ["", "JOB               job/other"]


def test_only_the_last_column_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = printed(monkeypatch, 70)[1:3]
    assert first.split() == ["jobset/transformer", "careful", "2", "of", "2", "transformer-4d36580f-1"]
    assert second.split() == ["Committed"]


def test_a_table_for_a_program_is_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(printed(monkeypatch, 400, terminal=False)) == 3


def test_the_signals_can_be_read_in_sixty_columns() -> None:
    lines = command("signals", columns=60).out.splitlines()
    assert lines[0].split() == ["NAME", "gke-impending-termination"]
    assert {len(line) <= 60 for line in lines} == {True}


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x00\x7f\r\nall is well\tevil"


def test_nothing_that_is_printed_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.put(HOSTILE)
    output.say(HOSTILE)
    output.put_table(["NAME"], [[HOSTILE]])
    output.put_data(output.OutputFormat.JSON, {"name": HOSTILE})
    output.put_data(output.OutputFormat.YAML, {"name": HOSTILE})
    found = capsys.readouterr()
    assert {c for c in found.out + found.err if not (c.isprintable() or c == "\n")} == set()
    assert found.out.count("evil") == 4
    assert not any(line.startswith("all is well") for line in (found.out + found.err).splitlines())


def _served(body: object) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    return http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.mark.integration
def test_what_commands_read_of_the_cluster_controls_no_terminal(tmp_path: Path) -> None:
    stored = {"metadata": {"name": "x", HOSTILE: HOSTILE}, "status": {"conditions": [{"message": HOSTILE}]}}
    config = {
        "clusters": [{"name": "c", "cluster": {"server": ""}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "here",
    }
    with _served(stored) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(server.serve_forever, 0.01)
        config["clusters"] = [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}]
        (tmp_path / "config").write_text(json.dumps(config))
        try:
            with Cluster(str(tmp_path / "config")) as cluster:
                found = json.dumps(cluster.get(PREEMPTIONS, "n", "x"), ensure_ascii=False)
        finally:
            server.shutdown()
    assert found.isprintable()
    assert found.count("evil") == 3
