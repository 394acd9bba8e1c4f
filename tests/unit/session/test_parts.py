"""The session's small parts: stages, forecasts, leaving, run-ahead."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import jax
import jax.experimental
import jax.numpy as jnp
import pytest

from gracepoint.multihost import InMemoryStore
from gracepoint.preemption.forecast import Forecaster, Pace, figures
from gracepoint.preemption.process_exit import ProcessExit
from gracepoint.preemption.run_ahead import LIMIT, RunAhead
from gracepoint.preemption.stages import Stages, summary
from tests.unit.multihost.gangs import together


def test_stages_are_counted_from_the_notice_in_seconds() -> None:
    now_s = iter([11.0, 12.5])
    stages = Stages(10.0, lambda: next(now_s))
    assert stages.last is None
    stages.mark("frozen")
    stages.mark("agreed")
    assert json.loads(stages.to_json()) == {"frozen": 1.0, "agreed": 2.5}
    assert stages.last == "agreed"


def test_an_unknown_stage_is_an_error() -> None:
    with pytest.raises(ValueError, match="'frozzen'"):
        Stages(0.0, lambda: 0.0).mark("frozzen")


def test_the_summary_is_over_all_processes_and_leaves_out_what_not_all_reached() -> None:
    found = summary(['{"frozen": 1.0, "written": 2.0}', '{"frozen": 2.0}', '{"frozen": 6.0, "written": 1.0}'])
    assert {k: (t.p50_s, t.max_s) for k, t in found.items()} == {"frozen": (2.0, 6.0)}


def test_the_pace_is_the_median_so_that_a_save_in_between_does_not_count() -> None:
    pace = Pace()
    for now_s in (0, 1, 2, 12, 13):
        pace.passed(now_s)
        assert not pace.known
    pace.passed(14)
    assert pace.known
    assert pace.step_s == 1


@dataclasses.dataclass
class Throughput:
    streamed_bytes_per_s: float | None = None
    snapshot_bytes_per_s: float | None = None


def test_the_longest_step_is_remembered_but_for_the_first_ones_of_which_one_is_compiled() -> None:
    pace = Pace()
    for now_s in (0, 60, 61, 62, 63, 64):
        pace.passed(now_s)
    assert pace.longest_s == 1
    for now_s in (84, *range(85, 100)):
        pace.passed(now_s)
    assert (pace.step_s, pace.longest_s) == (1, 20)


def test_figures_are_known_once_the_state_and_the_pace_are_and_told_again_after_each_save() -> None:
    now_s = itertools.count(0.0)
    throughput = Throughput()
    forecaster = Forecaster(1, throughput, 1.2, lambda: next(now_s))
    for _ in range(3):
        forecaster.passed()
    forecaster.prepare(100)
    assert forecaster.news(None) is None
    for _ in range(3):
        forecaster.passed()
    known = forecaster.news(None)
    assert known is not None
    assert known == forecaster.figures()
    assert forecaster.news(None) is None
    throughput.snapshot_bytes_per_s = 100 / 3.0
    saved = forecaster.news("the measures of a save")
    assert saved is not None
    assert (saved.save_s, saved.needed_s, saved.needed_at_worst_s) == (3.0, 5.0, 6.0)


@pytest.mark.parametrize(
    ("step_s", "in_flight"), [(0.5, 2), (0.99, 2), (1.0, 1), (60.0, 1)], ids=lambda value: f"{value:g}"
)
def test_where_steps_are_long_one_is_in_flight_and_the_forecast_says_so(step_s: float, in_flight: int) -> None:
    now_s = itertools.count(0.0, step_s)
    forecaster = Forecaster(1, Throughput(None, 20.0), 1.2, lambda: next(now_s))
    forecaster.prepare(100)
    for _ in range(2 * LIMIT + 2):
        forecaster.passed()
    known = forecaster.figures()
    assert known is not None
    assert forecaster.run_ahead == in_flight
    assert known.drain_s == pytest.approx((in_flight + 1) * step_s)
    assert forecaster.situation(6, 300.0, None).drain_s == known.drain_s


def test_a_single_long_step_does_not_change_how_many_are_in_flight_and_a_change_of_pace_does() -> None:
    pace, now_s, found = Pace(), 0.0, []
    for took_s in [30.0] + [0.1] * 10 + [30.0] + [0.1] * 10 + [5.0] * 10 + [0.1] * 10:
        now_s += took_s
        pace.passed(now_s)
        found.append(pace.run_ahead)
    assert set(found[4:22]) == {LIMIT}, "an evaluation, or the first step's compilation"
    assert found[31] == 1
    assert found[-1] == LIMIT


def test_a_forecast_goes_by_emergencies_and_without_any_by_saves_in_the_background() -> None:
    assert figures(Pace(), 200, 4, Throughput(50.0, 20.0)).save_s == 4.0
    assert figures(Pace(), 200, 4, Throughput(None, 20.0)).save_s == 10.0


def test_what_the_plan_goes_by_is_what_is_known_by_now() -> None:
    now_s = itertools.count(0.0)
    forecaster = Forecaster(2, Throughput(None, 20.0), 1.5, lambda: next(now_s))
    known = forecaster.situation(7, 30.0, None)
    assert (known.step, known.left_s, known.state_bytes, known.drain_s) == (7, 30.0, None, 0.0)
    forecaster.prepare(100)
    for _ in range(2 * LIMIT + 2):
        forecaster.passed()
    known = forecaster.situation(8, 30.0, None)
    assert (known.state_bytes, known.drain_s, known.save_s) == (100, 2 * 1.0, 5.0)
    assert (known.process_count, known.margin, known.streamed_bytes_per_s) == (2, 1.5, None)


def test_a_forecast_without_any_save_assumes_a_slow_disk_for_each_process() -> None:
    assert figures(Pace(), 400_000_000, 2, Throughput()).save_s == pytest.approx(1.0 + 2.0)


class End:
    """Notes how a process would have ended."""

    def __init__(self) -> None:
        self.codes: list[tuple[int, float]] = []
        self.ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append((code, time.monotonic()))
        self.ended.set()


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("logging.shutdown", lambda: None)
    yield
    for thread in threading.enumerate():  # one that comes late must not shut the tests' own logging down
        if thread.name == "gracepoint-last-words":
            thread.join(10)
            assert not thread.is_alive()


_started: list[ProcessExit] = []


@pytest.fixture(autouse=True)
def _watch_no_longer() -> Iterator[None]:
    yield
    while _started:
        _started.pop().stop()


def leaving(
    store: InMemoryStore, service_id: int, count: int, end: End, overdue: Callable[[], None] = lambda: None
) -> ProcessExit:
    member = ProcessExit(store, service_id, count, clock=time.monotonic, on_overdue=overdue, end=end)
    member.start()
    _started.append(member)
    return member


def test_the_host_of_the_coordination_service_leaves_last() -> None:
    store, ends = InMemoryStore(), [End() for _ in range(3)]
    members = [leaving(store, i, 3, end) for i, end in enumerate(ends)]

    def leave(member: ProcessExit, after_s: float) -> None:
        member.decide(77)
        time.sleep(after_s)
        member.leave()

    together(*(functools.partial(leave, m, s) for m, s in zip(members, (0.0, 0.1, 0.2), strict=True)))
    assert [e.codes[0][0] for e in ends] == [77, 77, 77]
    assert ends[0].codes[0][1] > max(e.codes[0][1] for e in ends[1:])


def test_nobody_leaves_before_the_end_is_decided() -> None:
    end = End()
    leaving(InMemoryStore(), 1, 2, end).leave()
    assert end.codes == []


def test_the_watchdog_ends_a_process_at_its_deadline_after_saying_so() -> None:
    end, said = End(), threading.Event()
    until_s = time.monotonic() + 0.1
    leaving(InMemoryStore(), 0, 1, end, said.set).watch(lambda: until_s - time.monotonic(), 78)
    assert end.ended.wait(10)
    assert said.is_set()
    assert end.codes[0][0] == 78


def test_the_watchdog_ends_a_process_that_is_stuck_with_the_logs_lock_in_its_hand() -> None:
    end, handler = End(), logging.StreamHandler(io.StringIO())
    log = logging.getLogger("gracepoint.preemption.process_exit")
    log.addHandler(handler)
    assert handler.lock is not None
    handler.lock.acquire()
    try:
        leaving(InMemoryStore(), 1, 2, end, lambda: log.error("overdue")).watch(lambda: 0.0, 78)
        assert end.ended.wait(10)
    finally:
        handler.lock.release()
        log.removeHandler(handler)
    assert end.codes[0][0] == 78


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_watchdog_ends_a_process_though_its_last_word_fails() -> None:
    end = End()

    def fail() -> None:
        raise OSError("no word gets out")

    leaving(InMemoryStore(), 1, 2, end, fail).watch(lambda: 0.0, 78)
    assert end.ended.wait(10)
    assert end.codes[0][0] == 78


def test_the_watchdog_ends_a_process_with_the_code_that_its_last_word_decides() -> None:
    end = End()
    member: list[ProcessExit] = []

    def saved_in_the_background() -> None:
        member[0].decide(77)

    member.append(leaving(InMemoryStore(), 1, 2, end, saved_in_the_background))
    member[0].watch(lambda: 0.0, 78)
    assert end.ended.wait(10)
    assert end.codes[0][0] == 77


def test_the_watchdog_keeps_to_what_was_decided() -> None:
    end, said = End(), threading.Event()
    member = leaving(InMemoryStore(), 1, 2, end, said.set)
    member.decide(77)
    member.watch(lambda: 0.0, 78)
    assert end.ended.wait(10)
    assert end.codes[0][0] == 77
    assert not said.is_set()


def test_a_process_that_fails_by_itself_is_not_held_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gracepoint.preemption.process_exit.FAILED_S", 0.1)
    end = End()
    leaving(InMemoryStore(), 1, 2, end).hurry(1)
    assert end.ended.wait(10)
    assert end.codes[0][0] == 1


def test_a_stopped_watchdog_watches_no_more() -> None:
    end = End()
    member = leaving(InMemoryStore(), 1, 2, end)
    member.stop()
    assert "gracepoint-watchdog" not in [t.name for t in threading.enumerate()]
    member.watch(lambda: 0.0, 78)
    member.stop()
    assert end.codes == []


def test_a_cancelled_watchdog_ends_nobody() -> None:
    end = End()
    member = leaving(InMemoryStore(), 1, 2, end)
    until_s = time.monotonic() + 0.2
    member.watch(lambda: until_s - time.monotonic(), 78)
    member.cancel()
    assert not end.ended.wait(0.5)


def _share_of_time_in_the_loop(throttle: Callable[[object], None]) -> float:
    """How much of the time of 12 heavy, donated steps the host spends in the loop that dispatches them."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        w = jax.lax.fori_loop(0, 20, lambda _, w: jnp.tanh(w @ w), state["w"])
        return {"w": w, "count": state["count"] + 1}

    state = jax.block_until_ready(step({"w": jnp.ones((300, 300)), "count": jnp.zeros(())}))
    throttle(state)
    began_s = time.monotonic()
    for _ in range(12):
        state = step(state)
        throttle(state)
    looped_s = time.monotonic() - began_s
    jax.block_until_ready(state)
    assert int(state["count"]) == 13
    return looped_s / (time.monotonic() - began_s)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_steps_are_in_flight_than_are_let(limit: int) -> None:
    done = []

    def note(number: object) -> None:
        time.sleep(0.02)
        done.append(int(number))  # type: ignore[call-overload]

    def advance(number: jax.Array) -> jax.Array:
        jax.experimental.io_callback(note, None, number, ordered=True)
        return number + 1

    step, run_ahead, state = jax.jit(advance), RunAhead(), jnp.zeros((), int)
    for number in range(1, 12):
        state = step(state)
        run_ahead.throttle(state, limit)
        assert number - len(done) <= limit
    jax.block_until_ready(state)


def test_the_host_stays_with_its_devices_but_for_a_few_steps() -> None:
    # 12 steps of which at most LIMIT are in flight at the end. Medians: other processes use this machine too.
    throttled = statistics.median(_share_of_time_in_the_loop(RunAhead().throttle) for _ in range(3))
    free = statistics.median(_share_of_time_in_the_loop(lambda state: None) for _ in range(3))
    assert throttled > 1 - (LIMIT + 2) / 12
    assert free < 0.5, "JAX did not run ahead here, so the figure above proves nothing"


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"step": 3, "name": "x"}, id="no array at all"),
        pytest.param({"empty": jnp.zeros((0, 4))}, id="an empty array"),
        pytest.param({"key": jax.random.key(0)}, id="a PRNG key"),
        pytest.param({"scalar": jnp.zeros(())}, id="a scalar"),
        pytest.param({"b": jnp.zeros(3, bool), "h": jnp.zeros(3, jnp.bfloat16)}, id="small types"),
    ],
)
def test_states_of_every_kind_can_be_throttled(state: object) -> None:
    run_ahead = RunAhead()
    for _ in range(LIMIT + 2):
        run_ahead.throttle(state)


class Counted(dict[str, jax.Array]):
    """A container that counts how often all of it is gone through."""

    walks = 0


def _flatten_counted(node: Counted) -> tuple[list[tuple[object, jax.Array]], tuple[str, ...]]:
    Counted.walks += 1
    return [(jax.tree_util.DictKey(key), value) for key, value in node.items()], tuple(node)


jax.tree_util.register_pytree_with_keys(
    Counted, _flatten_counted, lambda keys, values: Counted(zip(keys, values, strict=True))
)


def test_a_quiet_step_does_not_go_through_all_leaves() -> None:
    run_ahead = RunAhead()
    run_ahead.throttle(Counted(a=jnp.zeros(3), b=jnp.zeros(2)))
    walks = Counted.walks
    for _ in range(5):
        run_ahead.throttle(Counted(a=jnp.zeros(3), b=jnp.zeros(2)))
    assert Counted.walks == walks
    run_ahead.throttle([Counted(c=jnp.zeros(3))])  # another form is noticed
    assert Counted.walks > walks


def test_what_is_waited_for_survives_donation() -> None:
    run_ahead = RunAhead()
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.zeros(())
    for _ in range(10):
        state = step(state)
        run_ahead.throttle(state)
    assert state == 10
