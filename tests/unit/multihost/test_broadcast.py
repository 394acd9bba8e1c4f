"""What a broadcast takes, refuses and leaves. Several JAX processes are in tests/multiprocess/test_multihost.py."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.errors import AgreementError
from gracepoint.multihost import BarrierKeys, InMemoryStore, StoreProcessGroup, broadcast_one_to_all, utilities
from gracepoint.multihost.store import StoreUnavailable
from gracepoint.multihost.utilities import AllProcesses, _difference, _overlaps
from tests.unit.multihost.fakes.gangs import gangs, together


def test_a_single_process_gets_its_own_values_as_numpy_arrays() -> None:
    key = jax.random.key(3)
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "n": 7, "nested": [np.float16(1.5), None], "key": key}
    found = broadcast_one_to_all(tree)
    assert isinstance(found["w"], np.ndarray)
    np.testing.assert_array_equal(found["w"], tree["w"])
    assert (found["n"], found["nested"]) == (7, [1.5, None])
    assert found["key"].dtype == key.dtype
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(key).tolist()


def test_a_single_process_is_the_source_or_nobody_is() -> None:
    assert broadcast_one_to_all(in_tree=1, is_source=True) == 1
    with pytest.raises(AgreementError, match="the only process, and it is not the source"):
        broadcast_one_to_all(1, is_source=False)


@pytest.mark.parametrize("leaf", [object(), "text", b"bytes"], ids=["object", "text", "bytes"])
def test_a_leaf_that_is_no_array_is_refused_by_its_path(leaf: object) -> None:
    with pytest.raises(TypeError, match=r"\['a'\]\[0\]: expected an array or a number"):
        broadcast_one_to_all({"a": [leaf]})


def test_the_mask_of_a_masked_array_is_not_dropped() -> None:
    with pytest.raises(TypeError, match=r"\['a'\]: expected an array, found a masked one: send \.data and \.mask"):
        broadcast_one_to_all({"a": np.ma.masked_array([1.0], [True])})


@pytest.mark.parametrize("piece_bytes", [1, 3, 4, 7, 100])
def test_pieces_of_any_size_make_up_the_whole(piece_bytes: int) -> None:
    sizes = [5, 1, 0, 9, 2]
    source = [np.arange(n, dtype=np.uint8) + 10 * n for n in sizes]
    target = [np.zeros(n, np.uint8) for n in sizes]
    for start in range(0, sum(sizes), piece_bytes):
        piece = np.zeros(piece_bytes, np.uint8)
        for stretch, part in _overlaps(source, piece, start):
            part[:] = stretch
        for stretch, part in _overlaps(target, piece, start):
            stretch[:] = part
    for one, other in zip(source, target, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_difference_names_the_first_leaf_where_trees_part() -> None:
    assert _difference(["a: int32[]", "b: int32[2]"], ["a: int32[]", "b: int32[3]"]) == (
        "; in this one, expected b: int32[2], found b: int32[3]"
    )
    assert _difference(["a: int32[]"], ["a: int32[]", "b: int32[3]"]).endswith(
        "expected no such leaf, found b: int32[3]"
    )
    assert _difference(["a: int32[]"], ["a: int32[]"]) == ""


def broadcasts(
    monkeypatch: pytest.MonkeyPatch, members: Sequence[StoreProcessGroup], call: Callable[[int], Any]
) -> list[Any]:
    """Makes the call in all of the processes at the same time. Returns what each returned or raised."""
    here = threading.local()
    monkeypatch.setattr(utilities, "takes_part_alone", lambda processes: False)
    monkeypatch.setattr(utilities, "joined_cluster", lambda: here.cluster)

    def run(gang: StoreProcessGroup) -> Any:
        here.cluster = AllProcesses(None, gang, BarrierKeys("job", 0))
        return call(gang.process_index)

    return together(*(functools.partial(run, gang) for gang in members))


@pytest.mark.parametrize("processes", [[0, 1, 2], [1, 2]], ids=["all", "some"])
def test_a_broadcast_leaves_no_keys_behind(processes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryStore()
    members = [gangs(3, store)[process] for process in processes]
    for _ in range(2):  # of the same key, which a process that remembered it would refuse
        found = broadcasts(monkeypatch, members, lambda process: broadcast_one_to_all(process, processes=processes))
        assert found == [processes[0]] * len(processes)
        assert store.list("job") == {}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda process: broadcast_one_to_all(1, is_source=False), "found none", id="no source"),
        pytest.param(
            lambda process: broadcast_one_to_all([1] * process), "found another in process", id="different trees"
        ),
    ],
)
def test_a_refused_broadcast_leaves_no_keys_behind(
    call: Callable[[int], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InMemoryStore()
    found = broadcasts(monkeypatch, gangs(3, store), call)
    assert all(isinstance(error, AgreementError) and words in str(error) for error in found), found
    assert store.list("job") == {}


def test_keys_that_cannot_be_removed_do_not_fail_a_broadcast(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Lost(StoreProcessGroup):
        def leave(self, folder: str, *, processes: Collection[int] | None = None) -> None:
            if self.process_index == 1:
                raise StoreUnavailable("process 0 has ended")
            super().leave(folder, processes=processes)

    store = InMemoryStore()
    assert broadcasts(monkeypatch, [Lost(store, 0, 2), Lost(store, 1, 2)], broadcast_one_to_all) == [0, 0]
    assert "could not remove the keys of a broadcast: process 0 has ended" in caplog.text
