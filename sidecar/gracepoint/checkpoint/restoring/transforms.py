"""What a restore does to ``like``: which stored leaf each leaf comes from, what is computed, and whose memory is freed.

**Transformations.** A leaf is named by its keys, joined by slashes, as in Orbax's ``transforms``. A function gets the
whole leaf in host memory, in every process.

**Donation.** A state fills most of its devices' memory, so a second one does not fit. With ``RestoreOptions.donate``
the arrays of ``like`` are therefore deleted. This happens after the checkpoint was found to fit ``like``, and before
anything is read. The shapes, types, shardings and layouts of the arrays are recorded first, so that an older step can
be restored if a newer one is damaged. JAX raises an error when a deleted array is used, also through other references
to it. So a restore that fails after this point leaves nothing that looks like a state. ``FormByCall`` is for a ``like``
that ``init`` makes. Its arrays are not deleted but dropped: ``init`` may have returned arrays that other code holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint.format import orbax_metadata, pytree
from gracepoint.checkpoint.options import RestoreArgs, RestoreOptions, Transform
from gracepoint.checkpoint.orbax import AsSaved, is_orbax
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf
from gracepoint.checkpoint.restoring.leaves import (
    ANYWHERE,
    Donated,
    LeafRequest,
    LeafTarget,
    as_args_say,
    as_like,
    as_stored,
    describe,
    describe_leaf,
    dtype_name,
    target_of,
)
from gracepoint.checkpoint.restoring.placement import OnDefaultDevice
from gracepoint.errors import CheckpointError, CheckpointMismatch, CheckpointRefused
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
        path, origin = _path(keys), None
        for pattern, rule in rules:
            if match := pattern.fullmatch(path):
                origin = _origin(match, rule, path, names, by_default)  # the last one counts, as in Orbax
        return origin or Origin(pytree.name_of(keys) if by_default else None)

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
    request = as_stored(stored) if as_saved else as_like(stored.name, like)
    request = as_args_say(stored, request, args, as_saved=as_saved)
    is_array = spec is not None and spec.kind != "scalar"
    host = target_of(stored, None, RestoreArgs(np.ndarray if is_array else None))
    finish = host.finish
    return dataclasses.replace(host, finish=lambda value: _placed(stored, function(finish(value)), request, as_saved))


def _origin(match: re.Match[str], rule: Transform, path: str, names: Mapping[str, str], by_default: bool) -> Origin:
    if rule.use_fallback and by_default:
        return Origin(None)
    original = path
    if rule.original_key is not None:
        original = match.expand(rule.original_key)
    return Origin(names.get(original, original.replace("/", ".")), rule.value_fn, is_asked_for=True)


def _placed(stored: StoredLeaf, value: Any, request: LeafRequest, as_saved: bool) -> Any:
    """Returns the result of a function where ``request`` wants it. ``as_saved``: it may be of any shape and type.

    Raises:
        CheckpointMismatch: It does not have the shape or type that is wanted.
    """
    if request.restore_type is str:
        return str(value)
    array = to_numpy(value)
    if as_saved:
        if request.restore_type == "scalar":
            return value
        request = dataclasses.replace(request, shape=array.shape, dtype=array.dtype)
    weak = not isinstance(value, np.ndarray | np.generic | jax.Array)  # a number of Python
    if array.shape != request.shape or (not weak and dtype_name(array.dtype) != dtype_name(request.dtype)):
        raise CheckpointMismatch(
            f"leaf {stored.name!r}, found as {describe_leaf(stored)}: expected {request} from value_fn, found "
            f"{describe(array.shape, array.dtype, None)}"
        )
    if request.restore_type is jax.Array:
        array = array.astype(request.dtype, copy=False)
        if request.sharding is None or request.sharding is ANYWHERE:
            return OnDefaultDevice(array.shape).put({tuple((0, size) for size in array.shape): array})
        sharding = request.sharding
        if isinstance(sharding, Mapping):
            sharding = orbax_metadata.to_jax_sharding(sharding, f"leaf {stored.name!r}")
        with isolated():
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    if request.restore_type is np.ndarray:
        return array.astype(request.dtype, copy=False)
    return request.dtype.type(array[()]) if request.restore_type is np.generic else request.restore_type(array.item())


def _rule(path: str, rule: Any) -> Transform:
    where = f"transforms[{path!r}]"
    if not isinstance(rule, Transform) and not is_orbax(rule, "Transform"):
        raise CheckpointRefused(f"{where}: expected a Transform, found a {type(rule).__qualname__}")
    if getattr(rule, "multi_value_fn", None) is not None:
        raise CheckpointRefused(
            f"{where}: multi_value_fn is not supported: restore without like=, and compute the leaf from the result"
        )
    if is_orbax(rule, "RestoreTransform") and rule.value_fn is not None:
        raise CheckpointRefused(
            f"{where}: the value_fn of a RestoreTransform gets RestoreArgs, which is not supported: use a Transform"
        )
    if not isinstance(rule.original_key, str | None):
        raise CheckpointRefused(f"{where}: original_key is {rule.original_key!r}; expected keys joined by slashes")
    return Transform(rule.original_key, rule.use_fallback, rule.value_fn)


def _pattern(path: str) -> re.Pattern[str]:
    try:
        return re.compile(path)
    except re.error as error:
        raise CheckpointRefused(f"transforms: {path!r} is no regular expression: {error}") from error


def _flat(transforms: Any, above: str = "") -> dict[str, Any]:
    """Returns the transformations by path. Nested dicts are accepted, as in Orbax."""
    rules: dict[str, Any] = {}
    for key, rule in transforms.items():
        rules |= _flat(rule, f"{above}{key}/") if isinstance(rule, Mapping) else {f"{above}{key}": rule}
    return rules


def _path(keys: Keys) -> str:
    return "/".join(key for key, _ in keys)


logger = logging.getLogger(__name__)

_NOTE = (
    "The arrays of the state that was given to restore (like=) are deleted by now, as restore takes their memory over: "
    "make the state again before it is used."
)


@dataclasses.dataclass(frozen=True)
class FormByCall:
    """A ``like`` that is known once ``init`` was called. That may do what cannot be traced, so the call is a real one.

    Attributes:
        init: Makes a state.
    """

    init: Callable[[], Any]

    def form(self) -> Any:
        """Returns the state with a ``LeafRequest`` in place of each array, whose memory is free then.

        Raises:
            Exception: What ``init`` raises.
        """
        logger.info("init is called to learn the form of the state; one that is compiled by jax.jit is only traced")
        state = jax.block_until_ready(self.init())  # a computation that still runs would hold memory
        return jax.tree.map(lambda leaf: as_like("", leaf) if isinstance(leaf, jax.Array) else leaf, state)


def marked(like: Any) -> Any:
    """Returns ``like`` with its arrays replaced by ``Donated``."""
    return jax.tree.map(
        lambda leaf: Donated(leaf, as_like("", leaf)) if isinstance(leaf, jax.Array) else leaf,
        like,
    )


def kept(leaf: Any) -> Any:
    """Returns a leaf of ``marked`` as the caller gave it, for a leaf that is not restored."""
    if isinstance(leaf, AsSaved):
        return leaf.value
    return leaf.array if isinstance(leaf, Donated) else leaf


def take(donations: Iterable[tuple[str, Any]], staying: Iterable[tuple[str, Any]]) -> None:
    """Deletes the arrays of leaves that will be restored.

    Args:
        donations: Leaves of ``marked`` that will be restored, with their names. Several leaves may be the same array.
        staying: Leaves that are not restored, with their names.

    Raises:
        CheckpointError: An array is in both, or a leaf that stays has a deleted array. Nothing more is deleted then.
    """
    donated = {id(leaf.array): (name, leaf.array) for name, leaf in donations if isinstance(leaf, Donated)}
    for name, leaf in staying:
        array = kept(leaf)
        if isinstance(array, jax.Array) and array.is_deleted():
            raise CheckpointError(
                f"leaf {name!r} is not in the checkpoint and keeps its array, which was deleted: a newer step has the "
                "leaf, and could not be read. Expected a state that is there: restore again with a new one, or with "
                "donate=False"
            )
        if isinstance(array, jax.Array) and id(array) in donated:
            raise CheckpointError(
                f"leaf {name!r} is not in the checkpoint and keeps its array, and leaf {donated[id(array)][0]!r}, "
                "which is restored, has the same one: expected two arrays, or donate=False"
            )
    arrays = [array for _, array in donated.values() if not array.is_deleted()]
    jax.block_until_ready(arrays)  # a computation that still runs would hold their memory
    for array in arrays:
        array.delete()


@contextlib.contextmanager
def noting_deletions(like: Any) -> Iterator[None]:
    """Adds a note to an error that leaves the block, if arrays of ``like`` were deleted in the block."""
    arrays = [leaf for leaf in map(kept, jax.tree.leaves(like)) if isinstance(leaf, jax.Array)]
    there = [array for array in arrays if not array.is_deleted()]
    try:
        yield
    except Exception as error:
        if any(array.is_deleted() for array in there) and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
        raise
