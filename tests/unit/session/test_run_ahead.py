"""How many steps the host may dispatch before the devices have run them."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import pytest

from gracepoint.preemption.forecast import LIMIT
from gracepoint.session.sync_points import RunAhead

pytestmark = pytest.mark.integration


def _share_of_time_in_the_loop(throttle: Callable[[object], object]) -> float:
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


class Node:
    """A container of arrays and containers that counts how often one of them is gone through."""

    walks = 0

    def __init__(self, children: Iterable[object]) -> None:
        self.children = tuple(children)

    def flattened(self) -> tuple[tuple[object, ...], None]:
        Node.walks += 1
        return self.children, None

    def with_keys(self) -> tuple[list[tuple[object, object]], None]:
        return [(jax.tree_util.DictKey(key), child) for key, child in enumerate(self.flattened()[0])], None


class Keyless(Node):
    """Has no keys, as nodes of ``jax.tree_util.register_pytree_node``."""


class Closed(Node):
    """Has keys, and none of them can be looked up."""


class Misleading(Node):
    """Has keys, and what is found there is no child."""

    def __getitem__(self, key: int) -> str:
        return "no child"


def rebuilt(kind: type[Node], _: Any, children: Any) -> Node:
    return kind(children)


jax.tree_util.register_pytree_node(Keyless, Keyless.flattened, lambda _, children: Keyless(children))
for kind in (Closed, Misleading):
    jax.tree_util.register_pytree_with_keys(kind, kind.with_keys, functools.partial(rebuilt, kind))


@pytest.mark.parametrize("kind", [Keyless, Closed, Misleading])
def test_a_quiet_step_goes_through_few_nodes_of_any_kind(kind: type[Node]) -> None:
    def state() -> object:
        return kind([kind([jnp.zeros(3), jnp.zeros(5)]) for _ in range(50)] + [kind([jnp.zeros(())])])

    run_ahead = RunAhead()
    run_ahead.throttle(state())
    states = [state() for _ in range(5)]
    Node.walks = 0
    for each in states:
        run_ahead.throttle(each)
    assert Node.walks <= 2 * len(states), "the root and the node that has the array"


class SlowlyFlattened:
    """A container whose own flattening takes time, as that of thousands of children does."""

    takes_s, clock = 0.0, 0.0

    def __init__(self, children: Iterable[object]) -> None:
        self.children = tuple(children)

    def with_keys(self) -> tuple[list[tuple[object, object]], None]:
        SlowlyFlattened.clock += self.takes_s
        return [(jax.tree_util.DictKey(key), child) for key, child in enumerate(self.children)], None


jax.tree_util.register_pytree_with_keys(
    SlowlyFlattened, SlowlyFlattened.with_keys, lambda _, children: SlowlyFlattened(children)
)


@pytest.mark.parametrize("step_s", [0.001, 0.005, 0.02, 0.1, 1.0])
@pytest.mark.parametrize("takes_s", [10e-6, 0.0005, 0.002, 0.009])
def test_a_quiet_step_takes_no_longer_for_a_node_whose_own_flattening_takes_long(
    step_s: float, takes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowlyFlattened, "takes_s", takes_s)
    monkeypatch.setattr(SlowlyFlattened, "clock", 0.0)
    run_ahead = RunAhead(lambda: SlowlyFlattened.clock)
    state = SlowlyFlattened([jnp.zeros(())])
    steps = 50 + int(5 / step_s)
    unseen_s, looks, passed = 0.0, list[float](), 0
    for number in range(steps):
        if number == 50:
            began_s = SlowlyFlattened.clock
        SlowlyFlattened.clock += step_s
        before_s = SlowlyFlattened.clock
        waited_for = run_ahead.throttle(state)
        passed += waited_for
        assert (waited_for > 0) is (SlowlyFlattened.clock > before_s)
        assert waited_for == 0 or passed == number + 1, "every step is counted once"
        if SlowlyFlattened.clock > before_s:
            unseen_s = max(unseen_s, before_s - looks[-1]) if looks else 0.0
            looks.append(before_s)
    share = (SlowlyFlattened.clock - began_s) / ((steps - 50) * step_s) - 1
    assert share <= max(0.006, takes_s / max(0.1, step_s) * 1.2, 50e-6 / step_s)
    assert unseen_s <= max(step_s, 0.1) * 1.1 + 4 * takes_s  # the first look flattens it again and again


def test_the_first_steps_are_waited_for_though_it_takes_long_to_find_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before one was waited for, the time between two calls is that of the host alone, and says nothing."""
    monkeypatch.setattr(SlowlyFlattened, "takes_s", 0.0005)
    monkeypatch.setattr(SlowlyFlattened, "clock", 0.0)
    run_ahead, looks = RunAhead(lambda: SlowlyFlattened.clock), list[int]()
    state = SlowlyFlattened([jnp.zeros(())])
    for number in range(100):
        SlowlyFlattened.clock += 1e-5
        before_s = SlowlyFlattened.clock
        run_ahead.throttle(state)
        if SlowlyFlattened.clock > before_s:
            looks.append(number)
    assert all(later <= 2 * (earlier + 2) for earlier, later in itertools.pairwise(looks))


def test_a_state_without_arrays_is_rarely_gone_through() -> None:
    run_ahead, steps = RunAhead(), 200
    Node.walks = 0
    for _ in range(steps):
        assert run_ahead.throttle(Keyless([1, 2.5])) == 1, "nothing runs ahead"
    assert Node.walks < steps / 10


def test_what_is_waited_for_survives_donation() -> None:
    run_ahead = RunAhead()
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = jnp.zeros(())
    for _ in range(10):
        state = step(state)
        run_ahead.throttle(state)
    assert state == 10
