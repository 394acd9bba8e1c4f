"""The short form of ``python -m tests.restart_budget``: each kind once, beside each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.restart_budget.control_plane import ControlPlane, missing, open_control_plane
from tests.restart_budget.kinds import INFRASTRUCTURE, PROGRAM
from tests.restart_budget.runs import Outcome, run, run_loops

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The real controllers."""
    if reason := missing():
        pytest.skip(reason)
    with open_control_plane(tmp_path_factory.mktemp("budget")) as made:
        yield made


def problems(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.kind}: {outcome.problem}" for outcome in outcomes if outcome.problem]


def test_a_restart_counts_if_and_only_if_the_program_failed_and_what_else_failed_has_a_name(
    plane: ControlPlane,
) -> None:
    outcomes = run(plane, (*INFRASTRUCTURE, *PROGRAM), 1, print)
    assert problems(outcomes) == []
    assert sum(outcome.counted for outcome in outcomes) == len(PROGRAM)


def test_a_loop_of_errors_ends_as_the_user_wrote(plane: ControlPlane) -> None:
    assert problems(run_loops(plane, print)) == []
