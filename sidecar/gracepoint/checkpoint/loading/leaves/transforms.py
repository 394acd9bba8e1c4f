"""Transformations on restore: which stored leaf each leaf of ``like`` comes from, and what is computed from it.

A leaf is named by its keys, joined by slashes, as in Orbax's ``transforms``. A function gets the whole leaf in host
memory, in every process.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint.format import pytree, sharding_file
from gracepoint.checkpoint.loading.leaves.leaf_request import (
    ANYWHERE,
    LeafRequest,
    as_args_say,
    as_like,
    as_stored,
    describe,
    describe_leaf,
    dtype_name,
)
from gracepoint.checkpoint.loading.leaves.leaf_target import LeafTarget, target_of
from gracepoint.checkpoint.loading.leaves.placement import OnDefaultDevice
from gracepoint.checkpoint.options import RestoreArgs, RestoreOptions, Transform
from gracepoint.checkpoint.orbax_calls import AsSaved
from gracepoint.checkpoint.orbax_objects import is_orbax
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf
from gracepoint.errors import CheckpointMismatch, CheckpointRefused
from gracepoint.jax_isolation import isolated, to_numpy

Keys = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a leaf of ``like`` comes from.

    Attributes:
        name: Name of the stored leaf. None: the leaf keeps its value from ``like``.
        function: Computes the leaf from the stored one. None: the stored leaf is restored as it is.
        is_asked_for: Whether a transformation names the stored leaf, which must then exist.
    """

    name: str | None
    function: Callable[[Any], Any] | None = None
    is_asked_for: bool = False


def origins(options: RestoreOptions, like: Any, stored: Iterable[Keys]) -> Callable[[Keys], Origin]:
    """Returns a function from the keys of a leaf of ``like`` to its origin.

    Args:
        options: The transformations.
        like: The tree to restore into.
        stored: The keys of all stored leaves and empty nodes.

    Raises:
        CheckpointRefused: A transformation is not supported.
    """
    if options.transforms is None:
        return lambda keys: Origin(pytree.name_of(keys))
    if like is None:
        raise CheckpointRefused("transforms: expected like=, which has the form of the result, found none")
    rules = [(_pattern(path), _rule(path, rule)) for path, rule in _flat(options.transforms).items()]
    names = {_path(keys): pytree.name_of(keys) for keys in stored}
    by_default = options.transforms_default_to_original

    def find(keys: Keys) -> Origin:
        path, found = _path(keys), None
        for pattern, rule in rules:
            if match := pattern.fullmatch(path):
                found = _origin(match, rule, path, names, by_default)  # the last one counts, as in Orbax
        return found or Origin(pytree.name_of(keys) if by_default else None)

    return find


def computed(stored: StoredLeaf, like: Any, args: RestoreArgs, function: Callable[[Any], Any]) -> LeafTarget:
    """Returns how a leaf is restored that ``function`` computes from ``stored``.

    Raises:
        CheckpointRefused: The leaf is of a type that cannot be computed.
        CheckpointError: It cannot be restored as asked.
    """
    spec = stored.spec
    if spec is not None and spec.kind == "key":
        raise CheckpointRefused(f"leaf {stored.name!r}: typed PRNG keys have no value_fn: compute them afterwards")
    as_saved = isinstance(like, AsSaved)  # the function says what the leaf is, the arguments where it goes
    wanted = as_stored(stored) if as_saved else as_like(stored.name, like)
    wanted = as_args_say(stored, wanted, args, as_saved=as_saved)
    is_array = spec is not None and spec.kind != "scalar"
    host = target_of(stored, None, RestoreArgs(np.ndarray if is_array else None))
    finish = host.finish
    return dataclasses.replace(host, finish=lambda value: _placed(stored, function(finish(value)), wanted, as_saved))


def _origin(match: re.Match[str], rule: Transform, path: str, names: Mapping[str, str], by_default: bool) -> Origin:
    if rule.use_fallback and by_default:
        return Origin(None)
    original = path
    if rule.original_key is not None:
        original = match.expand(rule.original_key)
    return Origin(names.get(original, original.replace("/", ".")), rule.value_fn, is_asked_for=True)


def _placed(stored: StoredLeaf, value: Any, wanted: LeafRequest, as_saved: bool) -> Any:
    """Returns the result of a function where ``wanted`` wants it. ``as_saved``: it may be of any shape and type.

    Raises:
        CheckpointMismatch: It does not have the shape or type that is wanted.
    """
    if wanted.restore_type is str:
        return str(value)
    array = to_numpy(value)
    if as_saved:
        if wanted.restore_type == "scalar":
            return value
        wanted = dataclasses.replace(wanted, shape=array.shape, dtype=array.dtype)
    weak = not isinstance(value, np.ndarray | np.generic | jax.Array)  # a number of Python
    if array.shape != wanted.shape or (not weak and dtype_name(array.dtype) != dtype_name(wanted.dtype)):
        raise CheckpointMismatch(
            f"leaf {stored.name!r}, found as {describe_leaf(stored)}: expected {wanted} from value_fn, found "
            f"{describe(array.shape, array.dtype, None)}"
        )
    if wanted.restore_type is jax.Array:
        array = array.astype(wanted.dtype, copy=False)
        if wanted.sharding is None or wanted.sharding is ANYWHERE:
            return OnDefaultDevice(array.shape).put({tuple((0, size) for size in array.shape): array})
        sharding = wanted.sharding
        if isinstance(sharding, Mapping):
            sharding = sharding_file.to_jax(sharding, f"leaf {stored.name!r}")
        with isolated():
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    if wanted.restore_type is np.ndarray:
        return array.astype(wanted.dtype, copy=False)
    return wanted.dtype.type(array[()]) if wanted.restore_type is np.generic else wanted.restore_type(array.item())


def _rule(path: str, given: Any) -> Transform:
    where = f"transforms[{path!r}]"
    if not isinstance(given, Transform) and not is_orbax(given, "Transform"):
        raise CheckpointRefused(f"{where}: expected a Transform, found a {type(given).__qualname__}")
    if getattr(given, "multi_value_fn", None) is not None:
        raise CheckpointRefused(
            f"{where}: multi_value_fn is not supported: restore without like=, and compute the leaf from the result"
        )
    if is_orbax(given, "RestoreTransform") and given.value_fn is not None:
        raise CheckpointRefused(
            f"{where}: the value_fn of a RestoreTransform gets RestoreArgs, which is not supported: use a Transform"
        )
    if not isinstance(given.original_key, str | None):
        raise CheckpointRefused(f"{where}: original_key is {given.original_key!r}; expected keys joined by slashes")
    return Transform(given.original_key, given.use_fallback, given.value_fn)


def _pattern(path: str) -> re.Pattern[str]:
    try:
        return re.compile(path)
    except re.error as error:
        raise CheckpointRefused(f"transforms: {path!r} is no regular expression: {error}") from error


def _flat(transforms: Any, above: str = "") -> dict[str, Any]:
    """Returns the transformations by path. Nested dicts are accepted, as in Orbax."""
    found: dict[str, Any] = {}
    for key, rule in transforms.items():
        found |= _flat(rule, f"{above}{key}/") if isinstance(rule, Mapping) else {f"{above}{key}": rule}
    return found


def _path(keys: Keys) -> str:
    return "/".join(key for key, _ in keys)
