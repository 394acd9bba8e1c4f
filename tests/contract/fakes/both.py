"""Orbax and Gracepoint behind one interface, so that a test can run the same case through both."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp

from gracepoint import checkpoint
from gracepoint.checkpoint import AsyncCheckpointer, RestoreOptions
from tests.unit.checkpoint.fakes.engine import assert_same


class Library(Protocol):
    """Saves trees to paths and restores them."""

    def save(self, path: Path, tree: Any, **options: Any) -> None: ...

    def restore(self, path: Path, like: Any = None, args: Any = None, *, partial: bool = False) -> Any:
        """Restores with Orbax's restore arguments. None: those that Orbax makes from ``like``."""

    def metadata(self, path: Path) -> Any: ...


class Orbax:
    """``PyTreeCheckpointer``."""

    def save(self, path: Path, tree: Any, **options: Any) -> None:
        ocp.PyTreeCheckpointer().save(path, tree, **options)

    def restore(self, path: Path, like: Any = None, args: Any = None, *, partial: bool = False) -> Any:
        if args is None and like is not None:
            args = ocp.checkpoint_utils.construct_restore_args(like)
        call = ocp.args.PyTreeRestore(like, restore_args=args, partial_restore=partial)
        return ocp.PyTreeCheckpointer().restore(path, args=call)

    def metadata(self, path: Path) -> Any:
        return ocp.PyTreeCheckpointer().metadata(path)


class Gracepoint:
    """``AsyncCheckpointer``."""

    def save(self, path: Path, tree: Any, **options: Any) -> None:
        checkpoint.save(path, tree, **options)

    def restore(self, path: Path, like: Any = None, args: Any = None, *, partial: bool = False) -> Any:
        options = RestoreOptions(partial_restore=partial)
        return checkpoint.restore(path, like, restore_args=args, options=options)

    def metadata(self, path: Path) -> Any:
        with AsyncCheckpointer() as checkpointer:
            return checkpointer.metadata(path)


def outcome(work: Callable[[], Any]) -> Any:
    """Returns the result of ``work``, or the error that it raised, without the frames that it came through.

    If Orbax fails, its frames hold coroutines that nobody awaits.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - compared with that of the other library
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)


def assert_same_result(found: Any, expected: Any) -> None:
    """Fails with the leaf's path if two trees differ in structure, types of leaves, shardings, or in a bit."""
    assert_same(found, expected)
    there = dict(jax.tree_util.tree_flatten_with_path(expected)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        where = jax.tree_util.keystr(path)
        assert isinstance(leaf, jax.Array) == isinstance(there[path], jax.Array), where
        if isinstance(leaf, jax.Array):
            wanted = there[path].sharding
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), f"{where}: {leaf.sharding}, expected {wanted}"
        else:
            assert type(leaf) is type(there[path]), where
