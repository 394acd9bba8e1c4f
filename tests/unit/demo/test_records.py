from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo import records


class Written:
    """A run's folder as the example's processes write it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def steps(self, process: int, attempt: int, steps: range, *, loss: float = 0.5, batch: str = "aa") -> Written:
        path = self.folder / f"losses.process_{process}.attempt_{attempt}.jsonl"
        with path.open("a") as file:
            for step in steps:
                line = {"step": step, "loss": (loss + step).hex(), "batch": batch, "unix_s": float(step)}
                file.write(json.dumps(line) + "\n")
        return self

    def result(self, process: int, digest: str = "dd") -> Written:
        (self.folder / f"result.process_{process}.json").write_text(json.dumps({"digest": digest}))
        return self


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    return complete(tmp_path / "undisturbed").folder


def complete(folder: Path) -> Written:
    written = Written(folder)
    for process in (0, 1):
        written.steps(process, 0, range(1, 5)).result(process)
    return written


def compare(reference: Path, disturbed: Path) -> records.Comparison:
    return records.compare(reference, disturbed, steps=4, processes=2)


def test_two_attempts_that_together_did_the_same_are_equal(undisturbed: Path, tmp_path: Path) -> None:
    disturbed = Written(tmp_path / "disturbed")
    for process in (0, 1):
        disturbed.steps(process, 0, range(1, 3)).steps(process, 1, range(3, 5)).result(process)
    comparison = compare(undisturbed, disturbed.folder)
    assert comparison == records.Comparison(losses_equal=True, data_equal=True, parameters_equal=True, differences=())


def test_a_step_recorded_twice_alike_is_no_difference(undisturbed: Path, tmp_path: Path) -> None:
    disturbed = complete(tmp_path / "disturbed").steps(1, 1, range(2, 4))
    assert compare(undisturbed, disturbed.folder).differences == ()


def test_a_step_recorded_twice_with_other_losses_is_reported(undisturbed: Path, tmp_path: Path) -> None:
    disturbed = complete(tmp_path / "disturbed").steps(1, 1, range(2, 3), loss=0.25)
    comparison = compare(undisturbed, disturbed.folder)
    assert not comparison.losses_equal
    assert comparison.data_equal
    assert comparison.differences[0].startswith("disturbed run, process 1, step 2: the loss was recorded as [")


def test_a_step_that_is_missing_is_reported(undisturbed: Path, tmp_path: Path) -> None:
    disturbed = Written(tmp_path / "disturbed").steps(0, 0, range(1, 5)).steps(1, 0, range(1, 4))
    comparison = compare(undisturbed, disturbed.result(0).result(1).folder)
    assert comparison.differences[0] == "disturbed run, process 1, step 4: the loss was not recorded"
    assert not comparison.losses_equal
    assert not comparison.data_equal


def test_a_loss_that_differs_in_its_last_bit_is_reported(undisturbed: Path, tmp_path: Path) -> None:
    disturbed = Written(tmp_path / "disturbed").steps(0, 0, range(1, 5), loss=0.5 + 2**-50)
    disturbed.steps(1, 0, range(1, 5))
    comparison = compare(undisturbed, disturbed.result(0).result(1).folder)
    assert comparison.differences[0] == "process 0, step 1: the loss is not that of the undisturbed run"
    assert comparison.data_equal


def test_another_order_of_the_data_is_reported(undisturbed: Path, tmp_path: Path) -> None:
    disturbed = Written(tmp_path / "disturbed").steps(0, 0, range(1, 5), batch="bb").steps(1, 0, range(1, 5))
    comparison = compare(undisturbed, disturbed.result(0).result(1).folder)
    assert comparison.losses_equal
    assert not comparison.data_equal


def test_many_differences_of_a_kind_are_shortened(undisturbed: Path, tmp_path: Path) -> None:
    disturbed = Written(tmp_path / "disturbed").result(0).result(1)
    told = compare(undisturbed, disturbed.folder).differences
    assert "... and 3 more of this kind" in told
    assert len(told) == 12


@pytest.mark.parametrize(
    ("digest", "told"),
    [
        ("ee", "process 1: its shards of the final state are not those of the undisturbed run"),
        (None, "process 1 left no final digest in the disturbed run"),
    ],
    ids=["other parameters", "no final digest"],
)
def test_final_parameters_are_compared(undisturbed: Path, tmp_path: Path, digest: str | None, told: str) -> None:
    disturbed = Written(tmp_path / "disturbed").result(0)
    for process in (0, 1):
        disturbed.steps(process, 0, range(1, 5))
    if digest:
        disturbed.result(1, digest)
    comparison = compare(undisturbed, disturbed.folder)
    assert comparison.differences == (told,)
    assert not comparison.parameters_equal


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = Written(tmp_path / "run").steps(0, 0, range(1, 4)).folder
    with (folder / "losses.process_0.attempt_0.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert [step.step for step in records.read(folder)] == [1, 2, 3]
    newest = records.newest(folder)
    assert newest is not None
    assert newest.step == 3


def test_the_newest_step_is_the_last_of_the_latest_attempt(tmp_path: Path) -> None:
    folder = Written(tmp_path / "run").steps(0, 0, range(1, 200)).steps(0, 1, range(200, 202)).folder
    newest = records.newest(folder)
    assert newest is not None
    assert (newest.attempt, newest.step) == (1, 201)


def test_there_is_no_newest_step_before_the_first(tmp_path: Path) -> None:
    assert records.newest(tmp_path) is None


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "losses.everything.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="expected a name like losses"):
        records.read(tmp_path)
