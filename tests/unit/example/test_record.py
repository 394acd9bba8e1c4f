from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import record


class Loss(float):
    """A loss of a device that is ready when the test says so."""

    ready = True

    def is_ready(self) -> bool:
        return self.ready


def lines(folder: Path, name: str = "losses.process_0.attempt_0.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_losses_are_written_bit_for_bit_with_their_step_and_batch(tmp_path: Path) -> None:
    losses = record.Losses(tmp_path, 0)
    losses.add(1, Loss(0.1), "aa")
    (line,) = lines(tmp_path)
    losses.close()
    assert (line["step"], line["batch"]) == (1, "aa")
    assert float.fromhex(line["loss"]) == 0.1


def test_unready_loss_is_not_waited_for_and_keeps_its_place(tmp_path: Path) -> None:
    losses = record.Losses(tmp_path, 0)
    late = Loss(1.0)
    late.ready = False
    losses.add(1, late, "aa")
    losses.add(2, Loss(2.0), "bb")
    assert lines(tmp_path) == []
    late.ready = True
    losses.write_ready()
    losses.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_closing_gives_up_on_a_missing_loss_and_names_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = record.Losses(tmp_path, 0)
    never = Loss(1.0)
    never.ready = False
    losses.add(41, never, "aa")
    losses.close(timeout_s=0.01)
    assert "not recorded: steps [41]" in capsys.readouterr().out


def test_each_attempt_of_each_process_writes_its_own_file(tmp_path: Path) -> None:
    for process in (0, 0, 1):
        record.Losses(tmp_path, process).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "losses.process_0.attempt_0.jsonl",
        "losses.process_0.attempt_1.jsonl",
        "losses.process_1.attempt_0.jsonl",
    ]


def test_progress_is_reported_for_each_step_that_is_written(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    losses = record.Losses(tmp_path, 0, on_step=lambda step, loss: told.append((step, loss)))
    losses.add(3, Loss(0.5), "aa")
    losses.close()
    assert told == [(3, 0.5)]


def test_a_result_replaces_an_older_one_and_leaves_no_partial_file(tmp_path: Path) -> None:
    for step in (1, 2):
        record.write_result(tmp_path, 1, {"step": step})
    assert [path.name for path in tmp_path.iterdir()] == ["result.process_1.json"]
    assert json.loads((tmp_path / "result.process_1.json").read_text()) == {"step": 2}
