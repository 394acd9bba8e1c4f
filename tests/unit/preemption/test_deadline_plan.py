"""What is chosen in which situation, alike in all processes."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.deadline import (
    Choice,
    Evacuation,
    NewestSnapshot,
    Situation,
    SnapshotState,
    kept_s,
    merged,
    must_choose,
    plan,
)
from tests.unit.preemption.fakes.deadline_scenarios import SCENARIOS, STEP, Scenario


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: f"{s.state_gb:g}GB-{s.left_s:g}s-{s.behind}-{s.choice}")
def test_the_choice_is_the_tables(scenario: Scenario) -> None:
    found = plan(scenario.situation())
    assert (found.choice, found.steps_lost) == (scenario.choice, scenario.lost), found.reason
    assert found.step == STEP - scenario.lost


def test_the_table_has_every_choice_and_every_state_of_a_snapshot() -> None:
    assert {s.choice for s in SCENARIOS} == set(Choice)
    assert {s.snapshot for s in SCENARIOS} == {None, *SnapshotState}


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        (SCENARIOS[0], "step 1000 needs 4.6 s to drain and save, 27.0 s are left"),
        (
            SCENARIOS[8],
            "and the save of step 990, in progress, needs another 16.0 s: there is no time for both, 27.0 s are left",
        ),
        (
            SCENARIOS[11],
            "step 1000 needs 40.6 s to drain and save, the save of step 975, in progress, needs another 4.0 s, 27",
        ),
        (SCENARIOS[20], "the snapshot of step 990, whose save failed, 4.0 s"),
        (
            Scenario(160, 4, 27, 0.2, None, None, 0, Choice.EVACUATE, 0, 12),
            "step 1000 needs 40.6 s to drain and save, sending it to 2 snapshot servers 12.6 s, 27.0 s are left",
        ),
        (SCENARIOS[2], "nothing older can be had in time, 27.0 s are left; tried anyway"),
    ],
)
def test_the_reason_has_the_figures_that_it_was_chosen_by(scenario: Scenario, words: str) -> None:
    assert words in plan(scenario.situation()).reason


def test_older_step_without_margin_beats_a_current_one_that_cannot_fit() -> None:
    under_way = Scenario(160, 4, 27, 0.2, 25, SnapshotState.WRITING, 0.35, Choice.PROMOTE, 25)  # another 26 s
    held = Scenario(100, 4, 27, 10, 10, SnapshotState.HELD, 0.5, Choice.PROMOTE, 10)  # 25 s once more
    for scenario in (under_way, held):
        found = plan(scenario.situation())
        assert (found.choice, found.step, found.steps_lost) == (Choice.PROMOTE, STEP - scenario.lost, scenario.lost)
        assert "which fits without margin" in found.reason


def test_save_with_nothing_on_disk_is_not_expected_sooner_than_elapsed() -> None:
    usual = Scenario(16, 4, 27, 0.2, 10, SnapshotState.WRITING, 0, Choice.FINISH_IN_FLIGHT, 0).situation()
    assert usual.snapshot is not None
    stuck = dataclasses.replace(usual, snapshot=dataclasses.replace(usual.snapshot, elapsed_s=600.0))
    assert (usual.finish_s, stuck.finish_s) == (4.0, 600.0)
    assert plan(usual).choice is Choice.FINISH_IN_FLIGHT
    assert plan(stuck).choice is Choice.CANCEL_AND_SAVE


def exactly(
    left_s: float,
    *,
    save_s: float = 8,
    finish_s: float | None = None,
    rewrite_s: float | None = None,
    send_s: float | None = None,
) -> Situation:
    """Four seconds to drain, a margin of 2. Half of a save under way is done; ``rewrite_s`` is of a held snapshot."""
    found = None
    if finish_s is not None:
        found = NewestSnapshot(step=990, state=SnapshotState.WRITING, done_bytes=8, left_bytes=8, elapsed_s=0.0)
        rewrite_s = 2 * finish_s
    elif rewrite_s is not None:
        found = NewestSnapshot(step=990, state=SnapshotState.HELD, done_bytes=8, left_bytes=8, elapsed_s=0.0)
    return Situation(
        step=STEP,
        left_s=left_s,
        state_bytes=16,
        process_count=1,
        drain_s=4.0,
        streamed_bytes_per_s=16 / save_s,
        snapshot_bytes_per_s=None if rewrite_s is None else 16 / rewrite_s,
        snapshot=found,
        margin=2.0,
        evacuation=None if send_s is None else Evacuation(part_bytes=8, copies=2, bytes_per_s=16 / send_s),
    )


@pytest.mark.parametrize(
    ("now", "choice", "words"),
    [
        pytest.param(exactly(24, finish_s=4), Choice.FINISH_IN_FLIGHT, "time for both", id="both, with the margin"),
        pytest.param(exactly(24, finish_s=6), Choice.CANCEL_AND_SAVE, "no time for both", id="the current step"),
        pytest.param(exactly(16, finish_s=6, save_s=10), Choice.FINISH_IN_FLIGHT, "is safe", id="both, without it"),
        pytest.param(exactly(18, finish_s=9, save_s=9), Choice.FINISH_IN_FLIGHT, "is safe", id="the one under way"),
        pytest.param(exactly(18, finish_s=10), Choice.CANCEL_AND_SAVE, "without margin", id="neither is safe"),
        pytest.param(exactly(12, finish_s=6), Choice.PROMOTE, "another 6.0 s, 12.0 s are left", id="an older one"),
        pytest.param(exactly(24), Choice.SAVE_NOW, "drain and save, 24.0 s", id="no other save, with the margin"),
        pytest.param(exactly(12), Choice.SAVE_NOW, "without margin", id="no other save, without it"),
        pytest.param(exactly(20, rewrite_s=10), Choice.PROMOTE, "whose save failed", id="a held one, with the margin"),
        pytest.param(exactly(10, rewrite_s=10), Choice.PROMOTE, "without margin", id="a held one, without it"),
        pytest.param(exactly(20, save_s=20, send_s=6), Choice.EVACUATE, "10.0 s, 20.0 s", id="memory, with the margin"),
        pytest.param(exactly(10, save_s=20, send_s=6), Choice.EVACUATE, "without margin", id="memory, without it"),
        pytest.param(exactly(20, save_s=20, finish_s=6, send_s=6), Choice.EVACUATE, "another", id="memory, not older"),
        pytest.param(exactly(12, send_s=6), Choice.SAVE_NOW, "without margin", id="storage, if neither is safe"),
    ],
)
def test_what_needs_exactly_the_time_left_fits(now: Situation, choice: Choice, words: str) -> None:
    found = plan(now)
    assert found.choice is choice, found.reason
    assert words in found.reason


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        pytest.param(exactly(25, save_s=40, finish_s=10, send_s=6), 9, id="for the save under way, beside the sending"),
        pytest.param(exactly(17, save_s=40, finish_s=6, send_s=6), 1, id="until that is committed"),
        pytest.param(exactly(37, save_s=20, rewrite_s=10, send_s=6), 21, id="for a held snapshot, with the margin"),
        pytest.param(exactly(36, save_s=20, rewrite_s=10, send_s=6), 0, id="nothing, as both do not fit"),
        pytest.param(exactly(60, save_s=20, send_s=6), 41, id="for the current step"),
        pytest.param(exactly(60, save_s=20), 0, id="nothing, as nothing is sent"),
    ],
)
def test_evacuation_leaves_time_for_what_is_done_if_it_fails(now: Situation, kept: float) -> None:
    assert kept_s(now, begun_s=1.0) == kept


@pytest.mark.parametrize(
    ("streamed", "from_snapshot", "save_s", "rewrite_s"),
    [(8.0, 2.0, 2.0, 8.0), (8.0, None, 2.0, 2.0), (None, 2.0, 8.0, 8.0)],
)
def test_each_way_is_predicted_by_its_own_rate_or_else_the_other(
    streamed: float | None, from_snapshot: float | None, save_s: float, rewrite_s: float
) -> None:
    now = dataclasses.replace(exactly(24), streamed_bytes_per_s=streamed, snapshot_bytes_per_s=from_snapshot)
    assert (now.save_s, now.rewrite_s) == (save_s, rewrite_s)


@pytest.mark.parametrize(
    ("state", "done", "left", "finish_s"),
    [
        pytest.param(SnapshotState.HELD, 8, 8, 0.0, id="no save is under way"),
        pytest.param(SnapshotState.WRITING, 0, 0, 0.0, id="it has nothing to write"),
        pytest.param(SnapshotState.WRITING, 0, 1, 8.0, id="it has one byte to write"),
        pytest.param(SnapshotState.WRITING, 12, 4, 2.0, id="a quarter is left"),
    ],
)
def test_save_in_progress_ends_when_the_rest_is_written(
    state: SnapshotState, done: int, left: int, finish_s: float
) -> None:
    found = NewestSnapshot(step=990, state=state, done_bytes=done, left_bytes=left, elapsed_s=3.0)
    assert dataclasses.replace(exactly(24), snapshot=found).finish_s == finish_s


def test_unknown_state_is_predicted_to_take_no_time() -> None:
    assert dataclasses.replace(exactly(24), state_bytes=None).save_s == 0.0


@pytest.mark.parametrize("state", [None, *SnapshotState])
def test_there_is_a_choice_while_a_snapshot_could_be_saved(state: SnapshotState | None) -> None:
    found = None if state is None else snapshot(state)
    assert must_choose(found) == (state in (SnapshotState.WRITING, SnapshotState.HELD))


seconds = st.floats(0, 1e4)
rates = st.none() | st.floats(1e3, 1e12)
snapshots = st.none() | st.builds(
    NewestSnapshot,
    step=st.integers(0, STEP),
    state=st.sampled_from(SnapshotState),
    done_bytes=st.integers(0, 10**12),
    left_bytes=st.integers(0, 10**12),
    elapsed_s=seconds,
)
situations = st.builds(
    Situation,
    step=st.just(STEP),
    left_s=st.floats(-10, 1e4) | st.just(math.inf),
    state_bytes=st.none() | st.integers(0, 10**13),
    process_count=st.integers(1, 4096),
    drain_s=seconds,
    streamed_bytes_per_s=rates,
    snapshot_bytes_per_s=rates,
    snapshot=snapshots,
    margin=st.floats(1.0, 3.0),
    evacuation=st.none()
    | st.builds(Evacuation, part_bytes=st.integers(0, 10**13), copies=st.integers(1, 2), bytes_per_s=rates),
)


@given(situations)
def test_no_step_is_lost_where_there_is_time_for_drain_and_save(now: Situation) -> None:
    if now.margin * (now.drain_s + now.save_s) <= now.left_s:
        assert plan(now).steps_lost == 0
        assert plan(now).choice is not Choice.IMPOSSIBLE


@given(situations)
def test_a_choice_can_be_followed(now: Situation) -> None:
    found = plan(now)
    state = None if now.snapshot is None else now.snapshot.state
    if found.choice in (Choice.FINISH_IN_FLIGHT, Choice.CANCEL_AND_SAVE):
        assert state is SnapshotState.WRITING
    if found.choice is Choice.SAVE_NOW:
        assert state is not SnapshotState.WRITING or now.state_bytes is None
    if found.choice is Choice.EVACUATE:
        assert now.evacuation is not None
        assert now.evacuation.send_s <= max(now.left_s - now.drain_s, now.save_s)
    if found.choice is Choice.PROMOTE:
        assert state in (SnapshotState.WRITING, SnapshotState.HELD)
        assert now.snapshot is not None
        assert found.step == now.snapshot.step
        assert found.steps_lost == STEP - found.step > 0
    else:
        assert found.step == STEP


@given(situations)
def test_stopped_save_leaves_the_current_step_time_to_spare(now: Situation) -> None:
    if plan(now).choice is Choice.CANCEL_AND_SAVE:
        assert now.drain_s + now.save_s <= now.left_s


@given(situations)
def test_a_situation_comes_through_the_store_as_it_was(now: Situation) -> None:
    assert Situation.from_json(now.to_json()) == now


@given(st.lists(situations, min_size=1, max_size=4), snapshots)
def test_all_processes_choose_alike_by_the_worst_known_figure(
    found: list[Situation], snapshot: NewestSnapshot | None
) -> None:
    alike = [dataclasses.replace(s, snapshot=snapshot, process_count=len(found)) for s in found]
    together = merged(alike)
    assert together == merged([Situation.from_json(s.to_json()) for s in alike])
    assert together.left_s == min(s.left_s for s in alike)
    assert together.drain_s == max(s.drain_s for s in alike)
    assert together.margin == max(s.margin for s in alike)


def test_step_is_sent_to_memory_only_if_all_processes_can_and_as_fast_as_the_slowest() -> None:
    quick, slow = (exactly(24, send_s=send_s) for send_s in (2.0, 9.0))
    assert merged([quick, slow]).evacuation == slow.evacuation
    assert merged([quick, exactly(24)]).evacuation is None


def test_a_step_whose_own_save_is_too_slow_goes_to_memory() -> None:
    slow = Scenario(1000, 1, 27, 0.2, 0, SnapshotState.WRITING, 0.01, Choice.EVACUATE, 0, sends=2).situation()
    assert plan(slow).choice is Choice.EVACUATE
    assert plan(dataclasses.replace(slow, left_s=2000.0)).choice is Choice.FINISH_IN_FLIGHT


def test_link_that_was_never_measured_is_assumed_to_be_slow() -> None:
    assert Evacuation(part_bytes=300_000_000, copies=2, bytes_per_s=None).send_s == 7.0


def snapshot(state: SnapshotState, done: int = 5, step: int = 990) -> NewestSnapshot:
    return NewestSnapshot(step=step, state=state, done_bytes=done, left_bytes=10 - done, elapsed_s=1.0)


def with_snapshots(*found: NewestSnapshot | None) -> Situation:
    now = SCENARIOS[0].situation()
    return merged([dataclasses.replace(now, snapshot=each) for each in found])


def test_running_save_is_as_far_as_its_slowest_process() -> None:
    assert with_snapshots(snapshot(SnapshotState.WRITING, 9), snapshot(SnapshotState.WRITING, 2)).snapshot == snapshot(
        SnapshotState.WRITING, 2
    )


@pytest.mark.parametrize("state", [SnapshotState.COMMITTED, SnapshotState.HELD])
def test_what_one_process_knows_of_a_saves_end_holds_for_all(state: SnapshotState) -> None:
    assert with_snapshots(snapshot(SnapshotState.WRITING), snapshot(state)).snapshot == snapshot(state)


@pytest.mark.parametrize("other", [None, snapshot(SnapshotState.WRITING, step=980)])
def test_a_snapshot_that_not_all_processes_have_is_not_saved_in_place_of_the_current_step(
    other: NewestSnapshot | None,
) -> None:
    found = with_snapshots(other, snapshot(SnapshotState.WRITING)).snapshot
    assert found == dataclasses.replace(snapshot(SnapshotState.WRITING), state=SnapshotState.GONE)
