"""Shards of one array, asked for by several threads at once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint.planning.chunks import local_positions, local_shard, local_shards

COUNT, THREADS = 4, 3
INDICES = [((2 * number, 2 * number + 2),) for number in range(COUNT)]


def split() -> jax.Array:
    devices = Mesh(np.array(jax.devices("cpu")[:COUNT]), ("x",))
    return jax.device_put(jnp.arange(2.0 * COUNT), NamedSharding(devices, PartitionSpec("x")))


def each(array: jax.Array) -> list[list[float]]:
    return [local_shard(array, number).tolist() for number in range(COUNT)]


def all_indices(array: jax.Array) -> list[Any]:
    return list(local_positions(array))


def at_once(ask: Callable[[], Any]) -> list[Any]:
    """What threads find that ask at the same time."""
    ready, found = threading.Barrier(THREADS, timeout=60), list[Any]()

    def run() -> None:
        ready.wait()
        try:
            found.append(ask())
        except IndexError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("ask", [each, all_indices])
def test_threads_that_ask_at_once_get_every_shard_once(ask: Callable[[jax.Array], list[Any]]) -> None:
    expected = ask(split())
    for _ in range(200):
        array = split()
        assert at_once(functools.partial(ask, array)) == [expected] * THREADS
        assert len(array.addressable_shards) == COUNT


def test_shards_are_named_by_index() -> None:
    assert all_indices(split()) == list(local_shards(split())) == INDICES
    assert [shard.tolist() for shard in local_shards(split()).values()] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_array_of_numpy_is_one_shard() -> None:
    array = np.arange(6).reshape(2, 3)
    assert local_positions(array) == {((0, 2), (0, 3)): 0}
    assert local_shards(array)[(0, 2), (0, 3)] is array
