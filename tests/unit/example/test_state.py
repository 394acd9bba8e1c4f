from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import model
import numpy as np
import pytest
import state

pytestmark = pytest.mark.integration

CONFIG = model.Config(length=8, width=32, layers=1, heads=2)


@pytest.fixture(scope="module")
def train_step() -> Callable[[state.State, jax.Array], Any]:
    return state.train_step(CONFIG, state.mesh(), 3e-3)


@pytest.fixture(scope="module")
def initial() -> state.State:
    return state.init(CONFIG, state.mesh(), seed=1)()


@pytest.fixture
def fresh(initial: state.State) -> state.State:
    return copied(initial)


def batches(count: int) -> list[jax.Array]:
    rows = np.random.default_rng(0).integers(0, 256, (count, 4, CONFIG.length + 1), dtype=np.uint8)
    return [jax.device_put(batch, state.batch_sharding(state.mesh())) for batch in rows]


def copied(current: state.State) -> state.State:
    copy: state.State = jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), leaf.sharding), current)
    return copy


def test_run_resumed_from_a_state_copy_ends_with_the_same_bits(train_step: Any, fresh: state.State) -> None:
    data = batches(4)
    current = fresh
    for batch in data[:2]:
        current, _ = train_step(current, batch)
    saved = copied(current)

    def finish(current: state.State) -> tuple[str, float]:
        for batch in data[2:]:
            current, loss = train_step(current, batch)
        return state.digest(current), float(loss)

    assert finish(current) == finish(saved)


def test_what_is_dropped_out_comes_from_the_key_in_the_state(train_step: Any, fresh: state.State) -> None:
    (batch,) = batches(1)
    same, other = copied(fresh), copied(fresh)
    other["dropout"] = other["dropout"] + 1
    losses = [float(train_step(current, batch)[1]) for current in (fresh, same, other)]
    assert losses[0] == losses[1] != losses[2]


def test_every_step_draws_another_key(train_step: Any, fresh: state.State) -> None:
    before = np.array(fresh["dropout"])
    after, _ = train_step(fresh, batches(1)[0])
    assert not np.array_equal(before, after["dropout"])


def test_the_step_donates_the_state_that_it_is_given(train_step: Any, fresh: state.State) -> None:
    train_step(fresh, batches(1)[0])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(fresh["parameters"]))


def test_training_learns(train_step: Any, fresh: state.State) -> None:
    (batch,) = batches(1)
    losses = []
    for _ in range(40):
        fresh, loss = train_step(fresh, batch)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(np.log(256), abs=1.0)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("part", ["parameters", "mean", "variance", "dropout", "step"])
def test_the_digest_depends_on_every_part_of_the_state(fresh: state.State, part: str) -> None:
    changed = {**fresh, part: jax.tree.map(lambda value: value + 1, fresh[part])}
    assert state.digest(changed) != state.digest(fresh)
