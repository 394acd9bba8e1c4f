"""The trace of a process: a file that viewers of traces open, and nothing where none is asked for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint import machine, trace


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    trace.end()


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)


def written(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.trace.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def named(folder: Path) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in written(folder)["traceEvents"]}


def test_spans_of_all_threads_stand_in_one_file(tmp_path: Path) -> None:
    trace.begin(tmp_path / "new", "pod-0")
    trace.tell(index=3, job="llm")

    def work() -> None:
        with trace.span("inner", step=7):
            pass

    with trace.span("outer"):
        thread = threading.Thread(target=work, name="reader")
        thread.start()
        thread.join(60)
    trace.ended("before", 2.0, began_unix_s=1000.0)
    trace.moment("there")
    trace.write()
    events = named(tmp_path / "new")
    inner, outer = events["inner"], events["outer"]
    assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1000
    assert inner["args"] == {"step": 7}
    assert inner["tid"] != outer["tid"]
    assert (events["before"]["ts"], events["before"]["dur"]) == (1000_000_000, 2_000_000)
    assert events["there"]["ph"] == "i"
    assert {event["pid"] for event in events.values()} == {3}
    assert events["process_name"]["args"] == {"name": "pod-0"}
    assert written(tmp_path / "new")["otherData"]["job"] == "llm"


def test_a_span_that_ends_with_an_error_is_in_the_trace(tmp_path: Path) -> None:
    trace.begin(tmp_path, "pod-0")
    with pytest.raises(ZeroDivisionError), trace.span("divides"):
        raise ZeroDivisionError
    trace.end()
    assert "divides" in named(tmp_path)


def test_without_a_trace_nothing_is_kept(tmp_path: Path) -> None:
    with trace.span("outer"):
        trace.moment("there")
        trace.ended("before", 1.0)
        trace.tell(job="llm")
    trace.write()
    trace.end()
    trace.begin(tmp_path, "pod-0")
    trace.end()
    assert list(named(tmp_path)) == ["process_name"]


def test_events_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_EVENTS", 2)
    trace.begin(tmp_path, "pod-0")
    for number in range(5):
        trace.moment(str(number))
    trace.end()
    assert [name for name in named(tmp_path) if name.isdigit()] == ["0", "1"]
    assert written(tmp_path)["otherData"]["events_left_out"] == 3


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    trace.begin(tmp_path / "file", "pod-0")
    trace.write()
    trace.end()
    assert caplog.text.count("the trace cannot be written") == 1


def test_a_session_reports_where_the_time_of_its_start_went(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path / "run", trace=str(tmp_path / "trace"), save_every_steps=1) as session:
        jax.clear_caches()
        state, _ = session.restore(like={"w": jnp.arange(4.0)})
        state = jax.jit(lambda state: {"w": state["w"] * 3}, donate_argnums=0)(state)
        session.step(1, state)
        told = written(tmp_path / "trace")["otherData"]
        assert told["programs_compiled"] > 0
        assert told["programs_found"] == 0
    events = named(tmp_path / "trace")
    for name in ("before attach: Python, imports", "claim of the directory", "restore", "list the steps", "trains"):
        assert name in events, sorted(events)
    assert events["compile or load jit(<lambda>)"]["dur"] > 0


def test_a_process_knows_its_age(tmp_path: Path) -> None:
    first, second = machine.process_age_s(), machine.process_age_s()
    assert first is not None
    assert second is not None
    assert 0 < first <= second < 24 * 3600


@pytest.mark.parametrize(
    "stat",
    [
        pytest.param(None, id="no proc"),
        pytest.param("1 (a b) S", id="other fields"),
        pytest.param("1 (python) S " + " ".join(["0"] * 30), id="a sandbox that does not tell"),
    ],
)
def test_an_age_that_the_system_does_not_report_is_not_known(tmp_path: Path, stat: str | None) -> None:
    if stat is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/stat").write_text(stat)
    assert machine.process_age_s(tmp_path) is None
