"""Multi-process utilities for training code: the process index, barriers, broadcasts, and whether it is time to save.

Everything here may be called without a session, once the JAX cluster is joined or in a single process. Processes are
identified by ``jax.process_index()``. Barriers use the coordination service's store, not the devices. So a timeout
names the missing processes, and background threads may use barriers. A collective of the devices must come in the same
order as those of training, so it must not run in a background thread. For a barrier over the devices, which is Orbax's
default, pass ``barrier_sync_fn=lambda *, key, timeout_ms: multihost_utils.sync_global_devices(key)``.

State: one process group (``AllProcesses``) for the coordination service that this process has joined, and the keys of
calls that pass no name. The first thread that needs the group makes it; it is made again if the process joins another
cluster. And the hook through which ``reached_preemption`` asks the open session: the training thread sets it when a
session is attached, clears it when the session ends, and reads it.

``broadcast_one_to_all`` sends a pytree from one process to all, bit for bit. First the processes exchange which one is
the source and what their trees look like. So if they disagree, no process hangs, and the values of two sources are
never added up. Then the bytes are sent: small trees through the coordination service's store, large ones through the
devices. The devices compute a sum of 32-bit integers, to which all processes but the source contribute zeros. All
pieces have the same size, so one small program is compiled and memory is bounded. A sum of integers is exact. JAX's own
broadcast is a sum in the leaf's dtype, which loses the sign of -0.0 and, unless x64 is enabled, half of every 64-bit
number.

The broadcast runs in the calling thread. If it uses the devices, it is a collective like any other: all processes must
call it in the same order as the collectives of training, so it must not run in a background thread. Once a collective
runs, it has no timeout.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gracepoint.arguments import shown
from gracepoint.errors import AgreementError, CannotKnow, GracepointError, NoCluster
from gracepoint.jax_isolation import isolated, jit, setting, to_numpy
from gracepoint.multihost.barriers import StoreProcessGroup
from gracepoint.multihost.distributed import global_state
from gracepoint.multihost.store import BarrierKeys, JaxStore, group_name, named
from gracepoint.wire.names import Env

if TYPE_CHECKING:
    import numpy as np

    from gracepoint.multihost.barriers import StoreProcessGroup


@dataclasses.dataclass(frozen=True)
class AllProcesses:
    """All processes of the JAX cluster."""

    client: Any
    gang: StoreProcessGroup
    keys: BarrierKeys


_lock = threading.Lock()
_last: AllProcesses | None = None


def joined_cluster() -> AllProcesses:
    """Returns all processes of the cluster that this process belongs to now. Initialises JAX's backend.

    Raises:
        NoCluster: This process has not joined a cluster.
    """
    import jax

    global _last
    index, count = jax.process_index(), jax.process_count()
    with _lock:
        client = global_state.client
        if client is None:
            raise NoCluster("expected a JAX cluster, found none: call gracepoint.multihost.initialize() at the start")
        if _last is None or _last.client is not client:
            store = JaxStore(client, "gracepoint/everybody")
            # The service, and so its store, belongs to one attempt. The job and the attempt are in the keys only for
            # people who read them.
            keys = BarrierKeys(os.environ.get(Env.JOBSET_UID) or "local", os.environ.get(Env.RESTART_ATTEMPT) or 0)
            _last = AllProcesses(client, StoreProcessGroup(store, index, count), keys)
        return _last


_hook: Callable[[int], bool] | None = None


def set_reached_preemption_hook(hook: Callable[[int], bool] | None) -> None:
    """Sets the function that answers ``reached_preemption(step)``. None if no session is open."""
    global _hook
    _hook = hook


def reached_preemption_hook() -> Callable[[int], bool] | None:
    """Returns the function that answers ``reached_preemption(step)``. None if no session is open."""
    return _hook


logger = logging.getLogger(__name__)

DEFAULT_BARRIER_TIMEOUT_S = 300
SYNC_DURATION_EVENT = "/jax/checkpoint/sync_global_devices_duration_sec"


class BarrierSyncFn(Protocol):
    """A barrier of several processes, identified by ``key``."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Blocks until all processes have arrived.

        Raises:
            BarrierError: Some processes did not arrive within ``timeout_ms``, or the key was used before.
        """


def process_index() -> int:
    """Returns ``jax.process_index()``. The id in the coordination service is ``global_state.process_id``."""
    import jax

    return int(jax.process_index())


def process_count() -> int:
    """Returns ``jax.process_count()``."""
    import jax

    return int(jax.process_count())


def is_primary_host(primary_host: int | None) -> bool:
    """Returns True in process ``primary_host``. None means that each host writes on its own: True in every process."""
    return primary_host is None or primary_host == process_index()


def get_barrier_sync_fn(*, processes: Collection[int] | None = None) -> BarrierSyncFn:
    """Returns a barrier over the coordination service. Any thread may call it, and several threads at the same time.

    Threads that call it at the same time must use different keys.

    Args:
        processes: The processes that take part, by ``process_index()``. All of them pass the same ones. None: all
            processes.

    Returns:
        A function that all of them call once with the same key. It does nothing if only one process takes part.

    Raises:
        ValueError: This process is not in ``processes``, or a process there does not exist. If there are several
            processes and no coordination service, it is a ``NoCluster``, which is a ValueError.
    """
    if takes_part_alone(processes):
        return _nobody_to_wait_for
    gang = joined_cluster().gang
    gang.check_participants(processes)

    def wait(*, key: str, timeout_ms: int) -> None:
        gang.barrier(key, timeout_s=timeout_ms / 1000, processes=processes)

    return wait


def sync_global_processes(
    name: str,
    *,
    timeout: float | None = None,
    processes: Collection[int] | None = None,
    barrier_sync_fn: BarrierSyncFn | None = None,
    record_event_name: str = SYNC_DURATION_EVENT,
) -> None:
    """Waits until all processes have arrived here. Does nothing if only one process takes part.

    Args:
        name: The name of this barrier. A name can be used once.
        timeout: Seconds to wait. None: 300.
        processes: The processes that take part, by ``process_index()``. All of them pass the same ones. None: all
            processes.
        barrier_sync_fn: The barrier to use. None: ``get_barrier_sync_fn(processes=processes)``.
        record_event_name: The event under which the duration in seconds is recorded in ``jax.monitoring``.

    Raises:
        BarrierTimeout: Some processes did not arrive in time. The message names them.
        BarrierReused: The name was used before.
        ValueError: This process is not in ``processes``, a process there does not exist, or the timeout is not
            positive.
    """
    import jax

    timeout_s = DEFAULT_BARRIER_TIMEOUT_S if timeout is None else timeout
    if timeout_s <= 0:
        raise ValueError(f"timeout: expected seconds above 0, or None for {DEFAULT_BARRIER_TIMEOUT_S}, found {timeout}")
    if takes_part_alone(processes):
        return
    wait = barrier_sync_fn or get_barrier_sync_fn(processes=processes)
    began = time.monotonic()
    if barrier_sync_fn is not None:  # the built-in barrier logs this itself
        logger.info("process %d is at barrier %r, for %g s at most", process_index(), name, timeout_s)
    wait(key=name, timeout_ms=int(timeout_s * 1000))
    jax.monitoring.record_event_duration_secs(record_event_name, time.monotonic() - began)


@contextlib.contextmanager
def failing_together(
    name: str, *, timeout: float | None = None, processes: Collection[int] | None = None
) -> Iterator[None]:
    """Runs a block of work that succeeds in all processes or fails in all. Collective.

    At the end of the block each process waits for the others, as in ``sync_global_processes``. If the block raises an
    error in one process, the others are notified. Their wait ends at once, or as soon as they reach the end of the
    block. A process that is in a collective of the devices is not interrupted. With one process, only the block runs.

        with multihost.failing_together("arrays written"):
            for future in handler.serialize(values, infos):
                future.result()

    Args:
        name: The name of this block. A name can be used once.
        timeout: Seconds to wait at the end of the block. None: 300.
        processes: The processes that take part, by ``process_index()``. All of them pass the same ones. None: all
            processes.

    Raises:
        BarrierFailed: Another process failed. The message names it and its error.
        BarrierTimeout: Some processes did not reach the end in time. The message names them.
        BarrierReused: The name was used before.
        ValueError: As in ``sync_global_processes``.
    """
    try:
        yield
    except BaseException as error:
        if not takes_part_alone(processes):
            try:
                joined_cluster().gang.fail(name, error)
            except GracepointError as unreachable:
                logger.warning("could not notify the other processes of an error name=%s error=%s", name, unreachable)
        raise
    sync_global_processes(name, timeout=timeout, processes=processes)


def reached_preemption(step: int, *, if_unknown: bool | None = None) -> bool:
    """Returns whether this is the step at which all processes save because one of them is going to be preempted.

    This is a sync point. Call it after every step, with the same numbers in all processes. If a session is open, the
    session answers. Otherwise JAX's own preemption service is asked.

    Args:
        step: The number of steps done.
        if_unknown: The result if neither can answer. None raises ``CannotKnow`` instead. With False, a job whose
            preemption service is off trains until it is killed, without any warning.

    Raises:
        CannotKnow: No session is open, and JAX's preemption service does not run in this process.
    """
    ask_session = reached_preemption_hook()
    if ask_session is not None:
        return ask_session(step)
    if global_state.preemption_sync_manager is not None:
        from jax.experimental import multihost_utils

        return bool(multihost_utils.reached_preemption_sync_point(step))
    if if_unknown is None:
        raise CannotKnow(
            "reached_preemption(): expected an open session (gracepoint.attach) or JAX's preemption service, which "
            "runs in a cluster of several processes unless jax_enable_preemption_service is False; found neither"
        )
    return if_unknown


def takes_part_alone(processes: Collection[int] | None) -> bool:
    """Returns True if there is no other process to wait for."""
    return process_count() == 1 or (processes is not None and set(processes) == {process_index()})


def _nobody_to_wait_for(*, key: str, timeout_ms: int) -> None:
    pass


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
