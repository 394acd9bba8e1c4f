"""Requests that Orbax or Gracepoint refuse: the same class of error, or a stated reason for a difference."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gracepoint.checkpoint import CheckpointManager
from gracepoint.errors import GracepointError
from tests.contract.fakes.both import Gracepoint, Library, Orbax, assert_same_result, outcome
from tests.unit.checkpoint.fakes.engine import sharding

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::UserWarning", "ignore:coroutine .* was never awaited:RuntimeWarning"
    )
]


def state() -> dict[str, Any]:
    return {
        "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")),
        "n": np.arange(3),
        "i": 3,
        "list": [jnp.ones(2), jnp.ones(3)],
    }


def saved(library: Library, place: Path) -> Path:
    library.save(place / "saved", state())
    return place / "saved"


@pytest.fixture(scope="module", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A checkpoint of each library, which no test changes."""
    for library in (Orbax(), Gracepoint()):
        SHARED[type(library)] = saved(library, tmp_path_factory.mktemp("shared"))
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()  # coroutines that Orbax left when it failed


SHARED: dict[type, Path] = {}


def args(kind: Callable[[], Any], **changes: Any) -> Any:
    return jax.tree.map(lambda _: kind(), state()) | changes


def saves(tree: Callable[[], Any]) -> Callable[[Library, Path], Any]:
    return lambda library, place: library.save(place / "saved", tree())


def restores(
    change: Callable[[], Any], restore_args: Callable[[], Any] = lambda: None, *, partial: bool = False
) -> Callable[[Library, Path], Any]:
    """Returns a restore of ``state()`` with ``like`` changed."""

    def work(library: Library, place: Path) -> Any:
        changed = change()
        like = state() | changed if isinstance(changed, dict) else changed[0]
        return library.restore(SHARED[type(library)], like, restore_args(), partial=partial)

    return work


def damaged(damage: Callable[[Path], object]) -> Callable[[Library, Path], Any]:
    def work(library: Library, place: Path) -> Any:
        path = saved(library, place)
        damage(path)
        return library.restore(path, state())

    return work


def without_arrays(path: Path) -> None:
    for folder in path.iterdir():
        if folder.is_dir() and folder.name != "array_metadatas":
            shutil.rmtree(folder)


# Cases in which both do the same, or raise errors of one class.
SAME: dict[str, Callable[[Library, Path], Any]] = {
    "nothing there": lambda library, place: library.restore(place / "gone"),
    "an empty folder": lambda library, place: library.restore(place),
    "saved twice": lambda library, place: library.save(SHARED[type(library)], state()),
    "saved twice with force": lambda library, place: library.save(saved(library, place), state(), force=True),
    "an empty state": saves(dict),
    "None as the state": saves(lambda: None),
    "an object": saves(lambda: {"a": object()}),
    "a set": saves(lambda: {"a": {1}}),
    "bytes": saves(lambda: {"a": b"x"}),
    "an array of strings": saves(lambda: {"a": np.array(["a"])}),
    "an array of objects": saves(lambda: {"a": np.array([object()])}),
    "a date": saves(lambda: {"a": np.datetime64("2020-01-01")}),
    "an abstract array": saves(lambda: {"a": jax.ShapeDtypeStruct((2,), np.float32)}),
    "more leaves": restores(lambda: {"more": jnp.ones(2)}),
    "fewer leaves": restores(lambda: [{"w": state()["w"]}]),
    "fewer leaves of a part": restores(lambda: [{"w": state()["w"]}], partial=True),
    "another shape": restores(lambda: {"w": jnp.ones((4, 4))}),
    "another rank": restores(lambda: {"w": jnp.ones(64)}),
    "an abstract array of another shape": restores(
        lambda: {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=sharding())}
    ),
    "a tuple for a list": restores(lambda: {"list": (jnp.ones(2), jnp.ones(3))}),
    "a shorter list": restores(lambda: {"list": [jnp.ones(2)]}),
    "a longer list": restores(lambda: {"list": [jnp.ones(2)] * 3}),
    "a dict for a leaf": restores(lambda: {"w": {"a": jnp.ones(2)}}),
    "a leaf for a list": restores(lambda: {"list": jnp.ones(2)}),
    "text for an array": restores(lambda: {"w": "a"}),
    "nothing wanted": restores(lambda: [{}]),
    "numpy for an array of JAX": restores(lambda: {"w": np.ones((8, 8), np.float32)}),
    "all as text": restores(dict, lambda: args(lambda: ocp.RestoreArgs(restore_type=str))),
    "all as numbers": restores(dict, lambda: args(lambda: ocp.RestoreArgs(restore_type=int))),
    "another global shape": restores(
        dict, lambda: args(ocp.RestoreArgs, w=ocp.ArrayRestoreArgs(sharding=sharding(), global_shape=(4, 4)))
    ),
    "another global shape, not strict": restores(
        dict,
        lambda: args(ocp.RestoreArgs, w=ocp.ArrayRestoreArgs(sharding=sharding(), global_shape=(4, 4), strict=False)),
    ),
    "no arrays": damaged(without_arrays),
    "metadata that is no JSON": damaged(lambda path: (path / "_METADATA").write_text("{")),
}

# Cases that differ on purpose, each with the reason.
DIFFERENT: dict[str, tuple[Callable[[Library, Path], Any], str]] = {
    "metadata of nothing": (
        lambda library, place: library.metadata(place / "gone"),
        "no checkpoint is told from an empty one",
    ),
    "an array without elements": (
        saves(lambda: {"w": jnp.ones(2), "a": np.zeros((0, 2))}),
        "such arrays are saved: optimizers have them",
    ),
    "a complex number": (
        saves(lambda: {"w": jnp.ones(2), "a": 1j}),
        "numbers of Python are saved, whatever their kind",
    ),
    "a function": (
        saves(lambda: {"w": jnp.ones(2), "a": jax.nn.relu}),
        "modules of Equinox have them as leaves: they are no data",
    ),
    "a masked array": (
        saves(lambda: {"a": np.ma.masked_array([1.0], [True])}),
        "the mask would be lost",
    ),
    "more leaves of a part": (
        restores(lambda: [{"w": state()["w"], "more": jnp.ones(2)}], partial=True),
        "keep_missing= keeps leaves that were not saved, and nothing else does",
    ),
    "another shape without a sharding": (
        restores(lambda: {"w": jax.ShapeDtypeStruct((4,), np.float32)}),
        "the shape of like= counts, whatever else it says",
    ),
    "another dtype": (
        restores(lambda: {"w": jnp.ones((8, 8), jnp.int32)}),
        "values are cast only where RestoreArgs(dtype=) asks for it",
    ),
    "an array for a number": (restores(lambda: {"i": jnp.ones(())}), "values are cast only where that is asked for"),
    "a fraction for a whole number": (restores(lambda: {"i": 1.0}), "values are cast only where that is asked for"),
    "a dict for a list": (
        restores(lambda: {"list": {"0": jnp.ones(2), "1": jnp.ones(3)}}),
        "leaves are found by their names, whatever the containers are",
    ),
    "arguments for a part of the tree": (
        restores(dict, lambda: {"w": ocp.ArrayRestoreArgs(sharding=sharding())}),
        "leaves without arguments are restored as like= says",
    ),
    "no metadata of the tree": (
        damaged(lambda path: (path / "_METADATA").unlink()),
        "a file that the manifest has and the disk lacks is damage",
    ),
}


@pytest.mark.parametrize("work", SAME.values(), ids=SAME)
def test_both_refuse_with_one_class_of_error_or_give_the_same(
    tmp_path: Path, work: Callable[[Library, Path], Any]
) -> None:
    found, expected = outcomes(work, tmp_path)
    if isinstance(expected, Exception):
        assert isinstance(found, builtin(expected)), f"{found!r}, expected a {type(expected).__name__}"
        assert isinstance(found, GracepointError)
    elif expected is not None:
        assert_same_result(found, expected)
    else:
        assert found is None


@pytest.mark.parametrize(("work", "reason"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_on_purpose_differs(tmp_path: Path, work: Callable[[Library, Path], Any], reason: str) -> None:
    found, expected = outcomes(work, tmp_path)
    assert isinstance(found, Exception) != isinstance(expected, Exception), reason
    assert isinstance(found, GracepointError) or not isinstance(found, Exception)


def outcomes(work: Callable[[Library, Path], Any], place: Path) -> tuple[Any, Any]:
    """Returns the outcomes of Gracepoint and of Orbax, each in a folder of its own."""
    found = []
    libraries: dict[str, Library] = {"ours": Gracepoint(), "theirs": Orbax()}
    for name, library in libraries.items():
        (place / name).mkdir()
        found.append(outcome(lambda library=library, name=name: work(library, place / name)))  # type: ignore[misc]
    return found[0], found[1]


def builtin(error: Exception) -> type[BaseException]:
    """Returns the nearest class of ``error`` that Python has, as code catches these."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")


MANAGERS = {"no step": lambda manager: manager.restore(None), "no such step": lambda manager: manager.restore(5)}


@pytest.mark.parametrize("work", MANAGERS.values(), ids=MANAGERS)
def test_managers_refuse_with_one_class_of_error(tmp_path: Path, work: Callable[[Any], Any]) -> None:
    def with_orbax() -> None:
        with ocp.CheckpointManager(tmp_path / "theirs") as manager:
            work(manager)

    def with_gracepoint() -> None:
        with CheckpointManager(tmp_path / "ours") as manager:
            work(manager)

    expected, found = outcome(with_orbax), outcome(with_gracepoint)
    assert isinstance(found, GracepointError)
    assert isinstance(found, builtin(expected)), f"{found!r}, expected {expected!r}"
