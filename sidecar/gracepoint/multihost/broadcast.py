"""Broadcasts a pytree from one process to all, bit for bit.

First the processes exchange which one is the source and what their trees look like. So if they disagree, no process
hangs, and the values of two sources are never added up. Then the bytes are sent: small trees through the coordination
service's store, large ones through the devices. The devices compute a sum of 32-bit integers, to which all processes
but the source contribute zeros. All pieces have the same size, so one small program is compiled and memory is bounded.
A sum of integers is exact. JAX's own broadcast is a sum in the leaf's dtype, which loses the sign of -0.0 and, unless
x64 is enabled, half of every 64-bit number.

The broadcast runs in the calling thread. If it uses the devices, it is a collective like any other: all processes must
call it in the same order as the collectives of training, so it must not run in a background thread. Once a collective
runs, it has no timeout.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gracepoint.arguments import shown
from gracepoint.errors import AgreementError, GracepointError
from gracepoint.jax_isolation import isolated, jit, setting, to_numpy
from gracepoint.multihost.store import group_name, named
from gracepoint.multihost.utilities import DEFAULT_BARRIER_TIMEOUT_S, joined_cluster, takes_part_alone

if TYPE_CHECKING:
    import numpy as np

    from gracepoint.multihost.barriers import StoreProcessGroup

logger = logging.getLogger(__name__)

#: Up to this size the store is faster: it transfers 25-35 MB/s, and the devices' program takes 0.2 s to compile (2-core
#: VM, jax 0.10). With N processes, the store sends N times the size from process 0.
THROUGH_STORE_BYTES = 256 << 10
#: Size of one piece. It is needed twice, in host memory and in all local devices of a process together.
PIECE_BYTES = 64 << 20
_WORD_BYTES = 4


def broadcast_one_to_all(
    in_tree: Any,
    is_source: bool | None = None,
    *,
    processes: Collection[int] | None = None,
    timeout: float = DEFAULT_BARRIER_TIMEOUT_S,
) -> Any:
    """Sends the values of one process's pytree to all processes. Collective.

    Args:
        in_tree: A pytree of numpy arrays, JAX arrays that this process holds completely, PRNG keys and Python numbers.
            Every process passes a tree of the same structure, shapes and dtypes. Only the values of the source count.
        is_source: True in exactly one process, which may be any. If it is None in all processes, the source is the
            first process that takes part.
        processes: The processes that take part, by ``process_index()``. All of them pass the same ones. None: all
            processes.
        timeout: Seconds to wait for the other processes.

    Returns:
        The tree with the source's values as numpy arrays, and PRNG keys as keys. The source gets the same.

    Raises:
        AgreementError: No process or several processes are the source, or the trees differ. The message says where.
        TypeError: A leaf has another type. The message names the leaf.
        BarrierTimeout: Some processes did not arrive in time. The message names them.
    """
    import jax
    import numpy as np

    if is_source is not None and not isinstance(is_source, bool | np.bool_):
        raise TypeError(f"broadcast_one_to_all(in_tree, is_source): expected True or False, found {shown(is_source)}")
    flat, treedef = jax.tree_util.tree_flatten_with_path(in_tree)
    paths = [jax.tree_util.keystr(path) for path, _ in flat]
    leaves = [_host_array(path, leaf) for path, (_, leaf) in zip(paths, flat, strict=True)]
    if takes_part_alone(processes):
        if is_source is False:
            raise AgreementError("broadcast_one_to_all: this is the only process, and it is not the source")
    else:
        shapes = [
            f"{path or 'the tree'}: {leaf.dtype if _is_key(leaf) else array.dtype.name}{list(array.shape)}"
            for path, (_, leaf), array in zip(paths, flat, leaves, strict=True)
        ]
        leaves = _exchange(leaves, shapes, is_source, processes, timeout)
    values = [_like(leaf, value) for (_, leaf), value in zip(flat, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, values)


def _host_array(path: str, leaf: Any) -> np.ndarray[Any, Any]:
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array):
        if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise TypeError(
                f"broadcast_one_to_all: {path}: expected an array that this process holds wholly, found one of "
                f"sharding {leaf.sharding}; no single process can be its source"
            )
        if _is_key(leaf):
            with isolated():
                leaf = jax.random.key_data(leaf)
    array: np.ndarray[Any, Any] = to_numpy(leaf)
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"broadcast_one_to_all: {path}: expected an array, found a masked one: send .data and .mask")
    if array.dtype.kind in "OUSM" or array.dtype.names:
        raise TypeError(f"broadcast_one_to_all: {path}: expected an array or a number, found {type(leaf).__name__}")
    return array


def _is_key(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf: Any, value: np.ndarray[Any, Any]) -> Any:
    import jax

    if not _is_key(leaf):
        return value
    default = setting("jax_default_device")  # the caller's
    with isolated(), jax.default_device(default):
        return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=jax.random.key_impl(leaf))


def _exchange(
    leaves: Sequence[np.ndarray[Any, Any]],
    shapes: Sequence[str],
    is_source: bool | None,
    processes: Collection[int] | None,
    timeout_s: float,
) -> list[np.ndarray[Any, Any]]:
    """Returns the leaves of the source."""
    import numpy as np

    cluster = joined_cluster()
    gang, me = cluster.gang, cluster.gang.process_index
    participants = sorted(set(processes)) if processes is not None else list(range(gang.process_count))
    key = cluster.keys.next(f"broadcast-{group_name(participants, gang.process_count)}")  # each group has a counter
    is_source_here = me == min(participants, default=me) if is_source is None else bool(is_source)
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()
    texts = gang.gather(f"{key}/who", json.dumps([is_source_here, digest]), timeout_s=timeout_s, processes=processes)
    answers = {process: json.loads(payload) for process, payload in zip(participants, texts, strict=True)}
    sources = [process for process, (is_it, _) in answers.items() if is_it]
    if len(sources) != 1:
        listing = named(sources) if sources else "none"
        _leave(gang, key, processes)
        raise AgreementError(f"broadcast_one_to_all: expected is_source=True in exactly one process, found {listing}")
    (source,) = sources
    strangers = [process for process, (_, other) in answers.items() if other != answers[source][1]]
    if strangers:
        payload = json.dumps(shapes) if me == source else None
        text = gang.broadcast(f"{key}/tree", payload, timeout_s=timeout_s, source=source, processes=processes)
        _leave(gang, key, processes)
        raise AgreementError(
            f"broadcast_one_to_all: expected the tree of process {source}, the source, in every process, found "
            f"another in {named(strangers)}{_difference(json.loads(text), shapes)}"
        )

    received = [np.array(leaf, order="C") if me == source else np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
    views = [leaf.reshape(-1).view(np.uint8) for leaf in received if leaf.nbytes]
    if sum(map(len, views)) <= THROUGH_STORE_BYTES:
        payload = base64.b64encode(b"".join(view.tobytes() for view in views)).decode() if me == source else None
        text = gang.broadcast(f"{key}/data", payload, timeout_s=timeout_s, source=source, processes=processes)
        for stretch, part in _overlaps(views, np.frombuffer(base64.b64decode(text), np.uint8)):
            stretch[:] = part
    elif views:
        _through_devices(views, source, participants)
    gang.barrier(f"{key}/done", timeout_s=timeout_s, processes=processes)
    _leave(gang, key, processes)
    return received


def _leave(gang: StoreProcessGroup, key: str, processes: Collection[int] | None) -> None:
    """Removes the keys of the broadcast once all processes have called this. By then all know how it ended."""
    try:
        gang.leave(key, processes=processes)
    except GracepointError as error:
        logger.warning("could not remove the keys of a broadcast: %s", error)


def _difference(expected: Sequence[str], actual: Sequence[str]) -> str:
    """Returns, as text, the first difference of this process's tree. Empty if there is none."""
    for one, other in itertools.zip_longest(expected, actual, fillvalue="no such leaf"):
        if one != other:
            return f"; in this one, expected {one}, found {other}"
    return ""


def _through_devices(views: Sequence[np.ndarray[Any, Any]], source: int, participants: Sequence[int]) -> None:
    """Fills ``views`` with the source's bytes, piece by piece. Each device of a process transfers its share."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = [[d for d in jax.devices() if d.process_index == process] for process in participants]
    width = min(map(len, devices))
    mesh = Mesh(np.array([own[:width] for own in devices]), ("process", "device"))
    total_bytes = sum(map(len, views))
    share_bytes = _WORD_BYTES * width
    piece_bytes = math.ceil(min(PIECE_BYTES, total_bytes) / share_bytes) * share_bytes
    words = np.zeros(piece_bytes // _WORD_BYTES, np.uint32)
    piece = words.view(np.uint8)
    split = NamedSharding(mesh, PartitionSpec("process", "device"))
    add = jit(_add_up, out_shardings=NamedSharding(mesh, PartitionSpec("device")))
    for start in range(0, total_bytes, piece_bytes):
        if jax.process_index() == source:
            for stretch, part in _overlaps(views, piece, start):
                part[:] = stretch
        with isolated():
            operand = jax.make_array_from_process_local_data(split, words[None], (len(participants), len(words)))
            total = jax.block_until_ready(add(operand))  # the next piece uses the same memory
        if jax.process_index() != source:
            shards = sorted(total.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            received = np.concatenate([to_numpy(shard.data) for shard in shards]).view(np.uint8)
            for stretch, part in _overlaps(views, received, start):
                stretch[:] = part


def _overlaps(
    views: Sequence[np.ndarray[Any, Any]], piece: np.ndarray[Any, Any], start: int = 0
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yields, for each view, the bytes that it shares with ``piece``, as a slice of the view and one of the piece.

    ``start`` is the offset of the piece in the concatenation of all views.
    """
    offset = 0
    for view in views:
        low, high = max(start, offset), min(start + len(piece), offset + len(view))
        if low < high:
            yield view[low - offset : high - offset], piece[low - start : high - start]
        offset += len(view)


def _add_up(words: Any) -> Any:
    return words.sum(axis=0, dtype=words.dtype)
