"""What a snapshot server holds, and the exact account of its memory.

Any thread may call ``HeldValues``; one lock guards all of its state, and nothing waits or copies under it. Memory is
reserved before the first byte of a value is accepted. It is given back when the value is dropped, replaced or not
completed; if somebody still reads the value, when the last reader has ended. A value costs its bytes and
``VALUE_BYTES`` more, for its key, its record and the rest of its last page. So a flood of empty values fills a
workload's own part of the memory, and not the server. Values of one workload may have the same bytes (``link``), which
count once, until the last of these values is gone.

A value can be seen once all of it has arrived and its checksum fits. A workload sees only its own values, of its
capability's attempt and of earlier ones. Once a newer attempt has shown a capability to write, an earlier one can
neither write nor drop, also if it began before.

The memory of values is anonymous mappings. The first touch of a page costs more than its decryption, and the next
snapshot has the sizes of the one before. So mappings that are free are spare for a while: they count as free, and are
given up as soon as memory of another size is needed. Nobody sees what was in them, as a value is seen once it is
filled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import math
import mmap
import threading
from collections.abc import Callable, Iterator

from gracepoint.snapshots.exchange import ENTRIES_AT_ONCE, Refusal, StoredValue, ValuePlace, is_under
from gracepoint.wire.snapshot_requests import Capability, Right

#: What a value costs besides its bytes.
VALUE_BYTES = 4096
#: Workloads of which a server keeps a record, of some hundred bytes.
_WORKLOADS = 10_000
#: Values of a workload: a look at all of them takes some milliseconds.
_VALUES = 50_000
#: Mappings from this size on become spare.
_SPARE_BYTES = 64 << 10
#: Seconds without any use of them after which the system gets all spare mappings back.
_SPARE_S = 60.0


class NotServed(Exception):
    """A request is refused; its connection goes on.

    Attributes:
        refusal: Why.
    """

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclasses.dataclass(eq=False)
class _Bytes:
    """The bytes of a value, or of several values of one workload.

    Attributes:
        size_bytes: How many.
        mapping: The mapping that has them. None if there are none.
        memory: The bytes.
        values: How many values have them. The last one gives them back.
    """

    size_bytes: int
    mapping: mmap.mmap | None = None
    memory: memoryview = dataclasses.field(default_factory=lambda: memoryview(b""))
    values: int = 1


@dataclasses.dataclass(eq=False)
class HeldValue:
    """A value, or memory for one. Its fields, but for its memory, are guarded by the lock of ``HeldValues``.

    Attributes:
        place: What its key says.
        workload: Whose it is.
        bytes: Its bytes, which do not change once they are complete.
        checksum: CRC-32 of its bytes, once they are complete.
        generation: Identifies this version.
        written_s: When it was complete, by the clock of ``HeldValues``.
        users: How many threads read it, or fill it.
        is_visible: Whether it is complete, and neither dropped nor replaced.
    """

    place: ValuePlace
    workload: _Workload
    bytes: _Bytes
    checksum: int = 0
    generation: str = ""
    written_s: float = 0.0
    users: int = 0
    is_visible: bool = False

    @property
    def key(self) -> str:
        """Its key."""
        return self.place.key

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.bytes.size_bytes

    @property
    def memory(self) -> memoryview:
        """Its bytes."""
        return self.bytes.memory


@dataclasses.dataclass(eq=False)
class _Workload:
    """The values of a workload.

    Attributes:
        uid: Its UID.
        namespace: Its namespace.
        newest_attempt: The newest attempt that has shown a capability to write.
        seen_s: When something was last written, or the newest attempt came.
        used_bytes: What it costs, with what is not complete and what is still being read.
        values: Its values that can be seen, by key.
    """

    uid: str
    namespace: str
    seen_s: float
    newest_attempt: int = 0
    used_bytes: int = 0
    values: dict[str, HeldValue] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Dropped:
    """What was dropped.

    Attributes:
        values: How many values.
        bytes: What they cost.
    """

    values: int
    bytes: int


class HeldValues:
    """The values of all workloads.

    Args:
        capacity_bytes: What all values together may cost.
        workload_bytes: What those of one workload may cost, if its capability does not say less.
        name: Begins each generation, so that no two servers have the same.
        clock: Returns monotonic seconds.
        namespace_bytes: What those of all workloads of one namespace may cost. None: all.
    """

    def __init__(
        self,
        capacity_bytes: int,
        workload_bytes: int,
        name: str,
        clock: Callable[[], float],
        *,
        namespace_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._workload_bytes = workload_bytes
        self._namespace_bytes = namespace_bytes or capacity_bytes
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._workloads: dict[str, _Workload] = {}
        self._used_bytes = 0
        self._used_of_namespace: collections.Counter[str] = collections.Counter()
        self._spare: dict[int, list[mmap.mmap]] = {}  # by size; the size that came last is the last one
        self._spare_bytes = 0
        self._spare_used_s = -math.inf
        self._writes = 0

    def enter(self, capability: Capability) -> None:
        """Takes note of the attempt of a capability that a server has found genuine.

        Raises:
            NotServed: There are too many workloads.
        """
        if Right.WRITE in capability.rights:
            with self._lock:
                self._entered(capability)

    def limit_bytes(self, capability: Capability) -> int:
        """Returns what the values of the workload may cost if nobody else has any."""
        return min(self.capacity_bytes, self._workload_bytes, self._namespace_bytes, capability.max_bytes)

    @contextlib.contextmanager
    def writing(
        self, capability: Capability, key: str, size_bytes: int, *, if_absent: bool
    ) -> Iterator[tuple[HeldValue, Callable[[int], StoredValue]]]:
        """Yields memory for a value, and a function that makes it visible once it is filled.

        That function is given the CRC-32. Without it the value is forgotten when the block ends.

        Args:
            capability: Who writes.
            key: Key of the value.
            size_bytes: Its size.
            if_absent: Whether a value that is there already is an error.

        Raises:
            NotServed: Here, or by the function: there is no memory, or the capability does not allow it.
        """
        place = _own_place(capability, key)
        with self._lock:
            workload = self._writable(capability)
            self._check_absent(workload, key, if_absent)
            self._reserve(workload, capability, key, size_bytes)
            held = _Bytes(size_bytes, self._take_spare(size_bytes))
            value = HeldValue(place, workload, held, users=1)
        try:
            try:
                if held.mapping is None and size_bytes:  # there are no empty mappings
                    held.mapping = _new_mapping(size_bytes)
                held.memory = memoryview(bytearray() if held.mapping is None else held.mapping)[:size_bytes]
            except (OSError, MemoryError) as error:
                raise NotServed(Refusal.FULL, f"{key}: the system has no {size_bytes} bytes: {error}") from error

            def complete(checksum: int) -> StoredValue:
                return self._completed(capability, value, checksum, if_absent)

            yield value, complete
        finally:
            self._let_go(value)

    def link(self, capability: Capability, key: str, of: str, generation: str) -> StoredValue:
        """Makes a value with the bytes of another one, which are held once for both.

        Args:
            capability: Who writes.
            key: Key of the value.
            of: Key of the other value, of the same workload.
            generation: The version of the other value.

        Raises:
            NotServed: There is no such version, or no memory, or the capability does not allow it.
        """
        place = _own_place(capability, key)
        _check_right(capability, Right.READ)
        with self._lock:
            workload = self._writable(capability)
            other = self._readable(capability, of, generation)
            self._reserve(workload, capability, key, 0)
            other.bytes.values += 1
            return self._shown(HeldValue(place, workload, other.bytes), other.checksum)

    @contextlib.contextmanager
    def reading(self, capability: Capability, key: str, generation: str) -> Iterator[HeldValue]:
        """Yields a value. Its memory stays until the block ends.

        Raises:
            NotServed: There is none, or another generation than the one that is given.
        """
        _check_right(capability, Right.READ)
        with self._lock:
            value = self._readable(capability, key, generation)
            value.users += 1
        try:
            yield value
        finally:
            self._let_go(value)

    def entries(self, capability: Capability, under: str, after: str) -> list[StoredValue]:
        """Returns the first values in a folder whose keys come after ``after``, in the order of their keys."""
        _check_right(capability, Right.READ)
        with self._lock:
            keys = (key for key in self._visible(capability) if key > after and is_under(key, under))
            first = heapq.nsmallest(ENTRIES_AT_ONCE, keys)
            values = self._workloads[capability.workload].values if first else {}
            return [self._described(values[key]) for key in first]

    def drop(self, capability: Capability, *, under: str | None = None, before_step: int | None = None) -> Dropped:
        """Drops all values in a folder, or of all steps before one.

        Raises:
            NotServed: The capability does not allow it.
        """
        _check_right(capability, Right.DROP)
        with self._lock:
            workload = self._workloads.get(capability.workload)
            if workload is None:
                return Dropped(0, 0)
            self._check_newest(workload, capability)
            doomed = [
                key
                for key in self._visible(capability)
                if (is_under(key, under) if under is not None else workload.values[key].place.step < (before_step or 0))
            ]
            return self._drop(workload, doomed)

    def drop_aged(self, age_s: float) -> Dropped:
        """Drops the values of workloads that have completed no value for so long, and forgets their attempts."""
        values = size_bytes = 0
        with self._lock:
            for workload in list(self._workloads.values()):
                if self._clock() - workload.seen_s < age_s:
                    continue
                dropped = self._drop(workload, list(workload.values))
                values, size_bytes = values + dropped.values, size_bytes + dropped.bytes
                if workload.used_bytes == 0:  # nobody reads or writes
                    del self._workloads[workload.uid]
        return Dropped(values, size_bytes)

    def give_up_spare(self) -> None:
        """Gives spare mappings back to the system if none was used for a minute."""
        with self._lock:
            if self._clock() - self._spare_used_s >= _SPARE_S:
                self._spare.clear()
                self._spare_bytes = 0

    def figures(self) -> dict[str, object]:
        """Returns what all workloads have, as plain values."""
        with self._lock:
            return {
                "capacity_bytes": self.capacity_bytes,
                "used_bytes": self._used_bytes,
                "spare_bytes": self._spare_bytes,
                "values": sum(len(workload.values) for workload in self._workloads.values()),
                "workloads": {
                    workload.uid: {
                        "namespace": workload.namespace,
                        "attempt": workload.newest_attempt,
                        "values": len(workload.values),
                        "used_bytes": workload.used_bytes,
                        "age_s": round(self._clock() - workload.seen_s, 3),
                    }
                    for workload in self._workloads.values()
                },
            }

    # What follows is called with the lock held, but for ``_completed`` and ``_let_go``.

    def _entered(self, capability: Capability) -> _Workload:
        workload = self._workloads.get(capability.workload)
        if workload is None:
            if len(self._workloads) >= _WORKLOADS:
                raise NotServed(Refusal.BUSY, f"the server has values of {_WORKLOADS} workloads: use another one")
            workload = _Workload(capability.workload, capability.namespace, self._clock())
            self._workloads[capability.workload] = workload
        if workload.namespace != capability.namespace:
            raise NotServed(Refusal.NOT_ADMITTED, f"workload {capability.workload} is of another namespace")
        if capability.attempt > workload.newest_attempt:
            workload.newest_attempt = capability.attempt
            workload.seen_s = self._clock()
        return workload

    def _readable(self, capability: Capability, key: str, generation: str) -> HeldValue:
        workload = self._workloads.get(capability.workload)
        value = workload.values.get(key) if workload and workload.namespace == capability.namespace else None
        if value is None or value.place.attempt > capability.attempt:
            raise NotServed(Refusal.NOT_FOUND, f"{key}: the workload has no such value here")
        if generation and value.generation != generation:
            raise NotServed(Refusal.REPLACED, f"{key}: expected {generation}, found {value.generation}")
        return value

    def _reserve(self, workload: _Workload, capability: Capability, key: str, size_bytes: int) -> None:
        if len(workload.values) >= _VALUES:
            raise NotServed(Refusal.FULL, f"{key}: the workload has {_VALUES} values here: drop older steps")
        cost_bytes = size_bytes + VALUE_BYTES
        limit_bytes = min(self._workload_bytes, capability.max_bytes)
        less = "drop older steps, or raise the limit"
        for holder, used_bytes, allowed_bytes, advice in (
            ("the workload has", workload.used_bytes, limit_bytes, less),
            ("the namespace has", self._used_of_namespace[workload.namespace], self._namespace_bytes, less),
            ("all have", self._used_bytes, self.capacity_bytes, "use another server, or give it more memory"),
        ):
            if used_bytes + cost_bytes > allowed_bytes:
                raise NotServed(
                    Refusal.FULL,
                    f"{key} of {size_bytes} bytes: {holder} {used_bytes} of {allowed_bytes} bytes here: {advice}",
                )
        self._account(workload, cost_bytes)

    def _writable(self, capability: Capability) -> _Workload:
        workload = self._entered(capability)
        self._check_newest(workload, capability)
        return workload

    def _check_newest(self, workload: _Workload, capability: Capability) -> None:
        if workload.namespace != capability.namespace:
            raise NotServed(Refusal.NOT_ADMITTED, f"workload {capability.workload} is of another namespace")
        if capability.attempt < workload.newest_attempt:
            raise NotServed(
                Refusal.SUPERSEDED,
                f"attempt {capability.attempt} of the workload is over: attempt {workload.newest_attempt} has come",
            )

    def _check_absent(self, workload: _Workload, key: str, if_absent: bool) -> None:
        if if_absent and key in workload.values:
            raise NotServed(Refusal.EXISTS, f"{key}: there is a value already")

    def _completed(self, capability: Capability, value: HeldValue, checksum: int, if_absent: bool) -> StoredValue:
        with self._lock:
            # It may have been forgotten by its age; but not while this value is counted.
            workload = value.workload
            self._check_newest(workload, capability)
            self._check_absent(workload, value.key, if_absent)
            return self._shown(value, checksum)

    def _shown(self, value: HeldValue, checksum: int) -> StoredValue:
        """Makes a value visible."""
        workload = value.workload
        self._drop(workload, [value.key] if value.key in workload.values else [])
        self._writes += 1
        value.checksum, value.generation = checksum, f"{self._name}-{self._writes}"
        value.written_s = workload.seen_s = self._clock()
        value.is_visible = True
        workload.values[value.key] = value
        return self._described(value)

    def _let_go(self, value: HeldValue) -> None:
        with self._lock:
            value.users -= 1
            self._free(value)

    def _account(self, workload: _Workload, cost_bytes: int) -> None:
        workload.used_bytes += cost_bytes
        self._used_bytes += cost_bytes
        self._used_of_namespace[workload.namespace] += cost_bytes
        if not self._used_of_namespace[workload.namespace]:
            del self._used_of_namespace[workload.namespace]

    def _take_spare(self, size_bytes: int) -> mmap.mmap | None:
        """Returns a spare mapping for a value whose memory is reserved, or makes room for a new one."""
        same = self._spare.get(_pages(size_bytes))
        if same:
            self._spare_used_s = self._clock()
            return self._pop_spare(_pages(size_bytes))
        while self._spare and self._used_bytes + self._spare_bytes > self.capacity_bytes:
            self._pop_spare(next(iter(self._spare)))
        return None

    def _pop_spare(self, size_bytes: int) -> mmap.mmap:
        mapping = self._spare[size_bytes].pop()
        self._spare_bytes -= size_bytes
        if not self._spare[size_bytes]:
            del self._spare[size_bytes]
        return mapping

    def _free(self, value: HeldValue) -> None:
        """Gives back what the value costs if nobody can need it any more."""
        if value.users or value.is_visible:
            return
        held = value.bytes
        held.values -= 1
        cost_bytes = VALUE_BYTES + (0 if held.values else held.size_bytes)
        self._account(value.workload, -cost_bytes)
        if held.values:
            return
        mapping, held.mapping, held.memory = held.mapping, None, memoryview(b"")
        if mapping is not None and len(mapping) >= _SPARE_BYTES:
            self._spare.setdefault(len(mapping), []).append(mapping)
            self._spare_bytes += len(mapping)
            self._spare_used_s = self._clock()

    def _drop(self, workload: _Workload, keys: list[str]) -> Dropped:
        size_bytes = 0
        for key in keys:
            value = workload.values.pop(key)
            value.is_visible = False
            size_bytes += value.size_bytes + VALUE_BYTES
            self._free(value)
        return Dropped(len(keys), size_bytes)

    def _visible(self, capability: Capability) -> Iterator[str]:
        workload = self._workloads.get(capability.workload)
        if workload is not None and workload.namespace == capability.namespace:
            yield from (key for key, value in workload.values.items() if value.place.attempt <= capability.attempt)

    def _described(self, value: HeldValue) -> StoredValue:
        return StoredValue(
            key=value.key,
            bytes=value.size_bytes,
            checksum=value.checksum,
            generation=value.generation,
            age_s=round(self._clock() - value.written_s, 3),
        )


def _check_right(capability: Capability, right: Right) -> None:
    if right not in capability.rights:
        allowed = ", ".join(sorted(capability.rights)) or "nothing"
        raise NotServed(Refusal.NOT_ADMITTED, f"the capability allows {allowed}, expected {right}")


def _own_place(capability: Capability, key: str) -> ValuePlace:
    """Returns the place of a value that the capability lets its attempt write."""
    _check_right(capability, Right.WRITE)
    place = ValuePlace.of(key)
    if place.attempt != capability.attempt:
        raise NotServed(
            Refusal.NOT_ADMITTED,
            f"{key}: attempt {capability.attempt} may write its own values, and this key is of {place.attempt}",
        )
    return place


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _new_mapping(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, _pages(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
