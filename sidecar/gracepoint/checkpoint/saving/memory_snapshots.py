"""Snapshots of a gang in the memory of nodes, beside its training and beside its saves to storage.

A snapshot is a save like any other, to a place whose files are values of snapshot servers: what a process writes, its
done-record and the meeting of the processes are those of ``SaveOperation``. So a step *is safe* once the done-records
of all its parts are there, and all processes know it when they have met. Then older steps are dropped.

Memory: the trainer holds one copy of its part, and one more for saves in the background, if there are any. If both are
due at a step, and the arrays are stored alike, the copy of the save is sent. The servers together hold, of each part,
``copies`` of the step that is safe, and as many of the one that is being sent. Where a server may not hold so much, no
snapshot is begun once one has failed: files that have not changed are held once, so two may fit all the same.

The training thread calls all methods. It waits for nothing but the copy from its devices: if a snapshot is due while
the one before is in progress anywhere, it is skipped by all. The first process that asks decides for all
(``DueSaves``). If each decided for itself, processes might skip by turns, and no step would ever have all its parts.

Each snapshot has a thread ("gracepoint: snapshot of step N", daemon), which sends, meets the others, and ends with the
snapshot, at its deadline at the latest; ``end`` cancels it. It replaces ``newest`` as a whole, and any thread may read
that. The writer's threads, which send, are nicer than those that train (``snapshot_path``).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions
from gracepoint.checkpoint.saving.device_copy import NotComputed, knowing_devices
from gracepoint.checkpoint.saving.host_snapshot import Transfer
from gracepoint.checkpoint.saving.operation import CommitOptions, SaveOperation
from gracepoint.checkpoint.saving.part import begun
from gracepoint.checkpoint.saving.planner import PreparedSave, SavePlanner, SaveSettings
from gracepoint.checkpoint.saving.schedule import DueSaves, SaveInterval, SaveSchedule
from gracepoint.checkpoint.saving.snapshot_save import InMemory, SnapshotSave
from gracepoint.checkpoint.steps.snapshot_steps import key_of, steps_of
from gracepoint.checkpoint.storage.snapshot_path import OwnPart, SnapshotPath
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.checkpoint.writing.pool import SaveSource
from gracepoint.deadline import Deadline, Evacuation
from gracepoint.errors import GracepointError, SaveFailed
from gracepoint.process_group import ProcessGroup
from gracepoint.snapshots.held_values import VALUE_BYTES
from gracepoint.snapshots.snapshot_servers import PartName, ServerAt, SnapshotServers
from gracepoint.threads import BackgroundThread

logger = logging.getLogger(__name__)

#: Seconds for a snapshot. Then it has failed, and the next one may begin.
_TIMEOUT_S = 300.0
#: Seconds for the thread of a snapshot to end that has ended in the process that decided: an answer of the store.
_ENDS_S = 2.0
#: Seconds for the servers to say how much they may hold.
_LIMITS_S = 5.0
#: Seconds to wait for the other processes, whose first step may take longer.
_MEETING_TIMEOUT_S = 900.0
_KIND = "snapshot"
#: Number of the latest speeds that are kept.
_KEPT = 5

#: A process's values by name, or a function that returns them.
HostState = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class MemorySettings:
    """Where snapshots go, and when.

    Attributes:
        servers: The snapshot servers that this process may use.
        schedule: When snapshots are due.
        copies: In how many servers each part is to be.
    """

    servers: SnapshotServers
    schedule: SaveSchedule
    copies: int = 2


@dataclasses.dataclass(frozen=True)
class SafeSnapshot:
    """A snapshot whose parts are all there.

    Attributes:
        step: Its step.
        copies: In how many servers each part is.
        taken_s: When this process copied it from its devices, on the clock: what was trained since then is not in it.
        safe_at_s: When all parts were there, on the clock.
        part_bytes: Bytes of this process's part.
        nodes: The nodes that have this process's part.
        sent_bytes: Bytes that this process sent for it, to all servers together. What has not changed is not sent.
    """

    step: int
    copies: int
    taken_s: float
    safe_at_s: float
    part_bytes: int
    nodes: tuple[str, ...]
    sent_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Skips:
    """The snapshots that were due in this start and are not there: how many, and why the last one is not."""

    count: int = 0
    reason: str = ""


class MemorySnapshots:
    """Takes the snapshots of one gang. A call is collective unless its docstring says otherwise.

    Args:
        settings: Where snapshots go, and when.
        gang: The processes that save together.
        attempt: Unique for each start of the gang; the same in all its processes.
        paths: Where the saves to storage go.
        saves: What holds for the saves to storage.
        clock: Returns monotonic seconds.
        newest_save: Returns the newest save to storage, whose copy a snapshot of the same step shares.

    Attributes:
        servers: The snapshot servers.
        interval: Says when a snapshot is due.
        newest: The newest step that is safe. None before the first.
        skips: What is not there.
    """

    def __init__(
        self,
        settings: MemorySettings,
        gang: ProcessGroup,
        *,
        attempt: str,
        paths: Layout,
        saves: SaveSettings,
        clock: Callable[[], float],
        newest_save: Callable[[], SnapshotSave | None],
    ) -> None:
        directory = steps_of(paths)
        attempt = f"{attempt}-{directory}"
        self._key = key = f"checkpoint/{attempt}/snapshots"
        options = _plain(saves.options)
        self.servers = settings.servers
        self._own = OwnPart(settings.servers, gang.process_index)
        self._paths = Layout(SnapshotPath(self._own, ""), item=paths.item)
        self._gang = gang
        self._attempt, self._directory = attempt, directory
        self._planner = SavePlanner(gang, f"{attempt}-memory", dataclasses.replace(saves, options=options, sends=True))
        self._same_plan: tuple[PreparedSave, PreparedSave, bool] | None = None
        self._copies = 0  # of the snapshot in progress, in all processes; its thread sets it
        self._writer = ChunkWriter(options)
        self._clock = clock
        self._newest_save = newest_save
        self._how = CommitOptions(kind=_KIND, barrier=self._meet)
        self._due = DueSaves(gang, f"{key}/due", fail=self._refuse)
        self._thread = BackgroundThread()
        self._current: _Sending | None = None
        self._sent_now: PartName | None = None  # what ``send_now`` has begun last
        self._saves = 0
        self._retired = 0
        self._skipped_step = 0
        self._prepares = 0
        self._shortage = ""  # why the servers may not hold two snapshots of which nothing is the same
        self._has_failed = False  # a snapshot; then the shortage counts
        schedule = dataclasses.replace(settings.schedule, hastens=settings.schedule.every_steps != 1)
        self._known: frozenset[ServerAt] = frozenset()  # the servers at the step before
        self._asked: frozenset[ServerAt] = frozenset()  # the servers when they were asked what they may hold
        self._part_bytes: int | None = None  # of this process; None before ``prepare``
        self._rates: tuple[float, ...] = ()  # bytes per second that were sent; each snapshot's thread replaces it
        self.interval = SaveInterval(schedule, gang=gang, key=f"{key}/cadence", clock=clock)
        self.newest: SafeSnapshot | None = None
        self.skips = Skips()

    def prepare(self, state: Any, *, host_state: Callable[[], Mapping[str, Any]] = dict, held_bytes: int) -> None:
        """Plans the snapshots, and reserves and touches the memory for the copy of this process's part.

        Asks the servers whether they may hold them. If not, none is begun once one has failed, until there are others.

        Args:
            state: A state of the form that will be sent.
            host_state: This process's values by name, which are only checked.
            held_bytes: What of ``host_memory_limit_bytes`` the copies for saves to storage hold.

        Raises:
            CheckpointError: The state cannot be saved, or there is no memory for it; says how much is needed.
            BarrierError: Another process did not come in time, or has failed.
        """
        self._planner.prepare(state, in_background=True, host_state=host_state, held_bytes=held_bytes)
        _, prepared = self._planner.plan(state)
        mine = [chunk.bytes for chunk in prepared.plan.chunks if chunk.mine]
        self._part_bytes = sum(mine)
        need_bytes = 2 * (self._part_bytes + VALUE_BYTES * len(mine))
        self._asked = self._servers_now()
        limits = self.servers.limits(_LIMITS_S)
        answer = json.dumps([[server.node, server.address, need_bytes, limit] for server, limit in limits.items()])
        self._prepares += 1
        key = f"{self._key}/limits/{self._prepares}"
        self._shortage = self._gang.reduce(key, answer, _shortage, timeout_s=_MEETING_TIMEOUT_S)
        if self._shortage and self._gang.process_index == 0:
            logger.error("there are no snapshots, unless much of the state stays the same: %s", self._shortage)

    def evacuation(self, leaving: Collection[str]) -> Evacuation | None:
        """Returns what ``send_now`` would do. None: it has no server, or nothing is prepared. Not collective.

        Args:
            leaving: Nodes that go away.
        """
        placement = self.servers.placement
        if placement is None or not placement.write or self._part_bytes is None:
            return None
        return Evacuation(
            part_bytes=self._part_bytes,
            copies=len(placement.staying(self._gang.process_index, leaving)),
            bytes_per_s=statistics.median(self._rates) if self._rates else None,
        )

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in progress in this process. Not collective."""
        return self._thread.busy

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that were sent of the snapshot in progress, which any thread may ask. None if there is none."""
        current = self._current
        try:
            return None if current is None else self._own.part_of(key_of(current.save.temporary)).sent_bytes
        except FileNotFoundError:  # it has not begun, or has ended
            return None

    def is_due(self, step: int) -> bool:
        """Returns whether a snapshot is due; see ``interval``.

        If the servers have changed, it is brought forward: the newest one may have fewer copies than it had.

        Raises:
            BarrierTimeout: Process 0 is far behind.
        """
        servers = self._servers_now()
        if servers != self._asked:
            self._shortage = ""  # what the new ones may hold is found when they are full
        if self._known and servers != self._known:
            self.interval.hasten()
        self._known = servers
        return self.interval.is_due(step)

    def _servers_now(self) -> frozenset[ServerAt]:
        placement = self.servers.placement
        return frozenset() if placement is None else frozenset(placement.servers)

    def begins(self, step: int, *, sync_point: int, not_now: str = "") -> bool:
        """Returns whether the snapshot that is due at this step is taken. If it is, the caller calls ``begin``.

        Args:
            step: The step.
            sync_point: Number of the sync point; the same in all processes.
            not_now: Why this process takes none now, as text. Empty: nothing is against it.

        Raises:
            AgreementError: Another process is at another step. The message names both.
            BarrierError: The other processes cannot be reached.
        """
        self._look()
        reason = not_now or self._in_progress() or self._lacks_servers() or (self._shortage if self._has_failed else "")
        decided = self._due.decide(step, sync_point=sync_point, ready=not reason, saves=self._saves, reason=reason)
        if not decided.begins:
            elsewhere = decided.process != self._gang.process_index
            self._skip(step, f"{decided.reason} (process {decided.process})" if elsewhere else decided.reason)
        return decided.begins

    def begin(self, step: int, state: Any, host_state: HostState) -> None:
        """Copies the state from the devices, and sends it beside the training. Then the state may be donated.

        If something is wrong, no process has a snapshot of this step, and ``skips`` says why.

        Args:
            step: The step that ``state`` is at.
            state: The train state.
            host_state: This process's values by name, or what returns them.

        Raises:
            jax.errors.JaxRuntimeError: The devices have failed to compute the state, so that training cannot continue.
        """
        began_s = self._clock()
        self._saves += 1
        save = self._operation(step)
        try:
            with save.failing_together(), knowing_devices(state):
                self._thread.wait(_ENDS_S)
                self._send(save, step, state, host_state() if callable(host_state) else host_state)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on, and its saves will say the same
            self._skip(step, str(error))
            if isinstance(error, NotComputed) and error.devices is not None:
                raise error.devices from None
        metrics.tell_snapshot_taken(self._clock() - began_s)

    def send_now(
        self,
        step: int,
        state: Any,
        host_state: HostState,
        *,
        deadline: Deadline,
        leaving: Collection[str] = (),
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> SafeSnapshot:
        """Sends this process's part of a step straight from the devices, as fast as it can, and waits for it.

        Not collective: what the other processes do is for the caller to know. A snapshot in progress is stopped.

        Args:
            step: The step that ``state`` is at.
            state: The train state. Must not be donated before this returns.
            host_state: This process's values by name, or what returns them.
            deadline: When all must have arrived.
            leaving: Nodes that go away, so that their servers are not used if there are others.
            on_stage: Called with "written" and "durable".

        Returns:
            What is known of this process's part.

        Raises:
            SaveFailed: It did not arrive in any server in time.
            CheckpointError: The state cannot be saved; names the leaf.
        """
        self.end(f"step {step} is sent in its place", _ENDS_S)
        temporary = self._paths.temporary(step, self._attempt, 0)  # the other snapshots are counted from 1
        save = SaveOperation(self._paths, temporary, self._gang, self._writer, how=self._how)
        leaves, prepared = self._planner.plan(state)
        save.describe(leaves, prepared, host_state() if callable(host_state) else host_state)
        taken_s = self._clock()
        source = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, None, deadline)
        self._own.is_urgent, self._own.leaving = True, frozenset(leaving)
        try:
            with begun(save.part(), source, deadline, on_stage) as writing:
                self._sent_now = self._own.part_of(key_of(temporary)).name
                writing.make_durable(self._writer.write(writing.job(), deadline))
            sent = self._own.part_of(key_of(temporary))
        except OSError as error:
            raise SaveFailed(f"step {step} was not sent to any snapshot server: {error}") from error
        finally:
            self._own.end(key_of(temporary))
            self._own.is_urgent, self._own.leaving = False, frozenset()  # after a drill, training goes on
        return SafeSnapshot(step, len(sent.nodes), taken_s, self._clock(), save.mine_bytes, sent.nodes, sent.sent_bytes)

    def make_room(self, *, is_safe: bool) -> None:
        """Drops what ``send_now`` has made superfluous, as training goes on: else the next snapshots would not fit.

        Not collective. Never raises.

        Args:
            is_safe: Whether all parts of that step are there. If so, older steps are dropped, else this part is.
        """
        name, self._sent_now = self._sent_now, None
        if name is None:
            return
        if is_safe:
            self.servers.drop(before_step=name.step)
            return
        for folder in (name.done, name.folder):
            self.servers.drop(folder=folder)

    def end(self, reason: str, timeout_s: float) -> None:
        """Ends the snapshot in progress, in all processes, and waits for its thread. Not collective. Never raises."""
        current = self._current
        if current is not None and self.busy:
            current.stop(reason)
            self._has_ended(current, timeout_s)
        self._thread.take_error()

    def close(self) -> None:
        """Ends the connections to the servers. This is the last call. Not collective."""
        self.servers.close()

    def _send(self, save: SaveOperation, step: int, state: Any, host_state: Mapping[str, Any]) -> None:
        leaves, prepared = self._planner.plan(state)
        save.describe(leaves, prepared, host_state)
        taken_s, of_save = self._clock(), self._newest_save()
        if of_save is not None and of_save.chunks is not None and self._is_same(of_save, step, prepared):
            source: SaveSource = InMemory(of_save.chunks, of_save.source.check_unchanged)
            filled = of_save.filled
        else:
            memory = self._planner.snapshot(leaves, prepared, save.key)
            source = transfer = Transfer(leaves, prepared.specs, prepared.plan, self._writer.options, memory)
            filled = transfer.filled
        deadline = Deadline.after(_TIMEOUT_S, self._clock)
        self._current = current = _Sending(save, deadline, self._has_ended)
        if filled is not None:
            filled.snapshot.lend(current)
        number_asked, part = self._due.asked, key_of(save.temporary)

        def run() -> None:
            try:
                save.run(source, deadline, lambda stage: None)
                sent = self._own.part_of(part)
            finally:
                self._own.end(part)
            is_first = self.newest is None
            newest = SafeSnapshot(
                step, self._copies, taken_s, self._clock(), save.mine_bytes, sent.nodes, sent.sent_bytes
            )
            self.newest = newest
            sent_s = newest.safe_at_s - taken_s
            if sent.sent_bytes * 2 >= save.mine_bytes and sent_s > 0:  # else hardly anything had changed
                self._rates = (*self._rates, sent.sent_bytes / sent_s)[-_KEPT:]
            metrics.tell_snapshot_safe(sent_s, save.mine_bytes)
            logger.debug(
                "snapshot is safe step=%d copies=%d bytes=%d sent_s=%.3f",
                step,
                newest.copies,
                save.mine_bytes,
                sent_s,
            )
            self._retire(save.temporary.ordinal, number_asked)
            # What earlier starts have left in other servers goes once.
            self.servers.drop(before_step=step, everywhere=is_first and self._gang.process_index == 0)
            if is_first:
                self.servers.drop_left(step, self._attempt, self._directory)

        self._thread.start(f"snapshot of step {step}", run)

    def _is_same(self, of_save: SnapshotSave, step: int, prepared: PreparedSave) -> bool:
        """Returns whether the copy of a save to storage is what the snapshot of this step needs."""
        if of_save.save.temporary.step != step:
            return False
        other = of_save.save.prepared
        if self._same_plan is None or self._same_plan[0] is not other or self._same_plan[1] is not prepared:
            is_same = other.specs == prepared.specs and other.plan.chunks == prepared.plan.chunks
            self._same_plan = other, prepared, is_same
        return self._same_plan[2]

    def _meet(self, key: str, *, timeout_s: float, on_last: Callable[[], None]) -> None:
        """Meets the other processes (``Barrier``), and finds in how many servers each part is."""

        def fewest(copies: list[str]) -> str:
            on_last()
            return str(min(map(int, copies)))

        current = self._current
        assert current is not None  # its thread calls this
        own = len(self._own.part_of(key_of(current.save.temporary)).nodes)
        self._copies = int(self._gang.reduce(key, str(own), fewest, timeout_s=timeout_s))

    def _lacks_servers(self) -> str:
        placement = self.servers.placement
        if placement is None:
            return "the operator has named no snapshot server yet"
        return "" if placement.write else "there is no snapshot server for this process"

    def _operation(self, step: int) -> SaveOperation:
        temporary = self._paths.temporary(step, self._attempt, self._saves)
        return SaveOperation(self._paths, temporary, self._gang, self._writer, how=self._how)

    def _refuse(self, step: int, error: Exception) -> None:
        """Fails the snapshot that the others begin and this process cannot."""
        self._saves += 1
        self._operation(step).fail(error)

    def _has_ended(self, sending: _Sending, within_s: float) -> bool:
        """Waits for a snapshot. A later one begins only once it has ended."""
        if self._current is not sending or not self.busy:
            return True
        with contextlib.suppress(SaveFailed):
            self._thread.wait(within_s)
        return not self.busy

    def _in_progress(self) -> str:
        current = self._current
        if current is None or not self.busy:
            return ""
        for_s = self._clock() - current.began_s
        return f"the snapshot of step {current.save.temporary.step} is still sent, for {for_s:.1f} s"

    def _look(self) -> None:
        """Takes the outcome of the snapshot before, if it has ended."""
        error = self._thread.take_error()
        if error is not None and self._current is not None:
            self._has_failed = True
            self._skip(self._current.save.temporary.step or 0, str(error))

    def _skip(self, step: int, reason: str) -> None:
        is_news = self.skips.count == 0 or (self.newest is not None and self.newest.step > self._skipped_step)
        self._skipped_step = step
        self.skips = Skips(self.skips.count + 1, reason)
        metrics.tell_snapshot_skipped()
        logger.log(logging.WARNING if is_news else logging.DEBUG, "no snapshot of step %d: %s", step, reason)

    def _retire(self, ordinal: int, number_asked: int) -> None:
        """Removes keys that all processes have passed, as they have met for this snapshot."""
        try:
            self._due.retire(number_asked)
            while self._retired < ordinal - 2:
                self._retired += 1
                self._gang.retire(f"checkpoint/{self._attempt}/{_KIND}/{self._retired}")
        except GracepointError as error:
            logger.warning("could not remove the keys of earlier snapshots: %s", error)


class _Sending:
    """A snapshot that is sent, as a user of the memory that holds it (``MemoryUser``).

    Args:
        save: The snapshot.
        deadline: When it must have ended.
        wait: Waits for this snapshot, so many seconds at most, and returns whether it has ended.
    """

    def __init__(self, save: SaveOperation, deadline: Deadline, wait: Callable[[_Sending, float], bool]) -> None:
        self.save = save
        self.began_s = deadline.clock()
        self._deadline = deadline
        self._wait = wait

    def stop(self, reason: str) -> None:
        """Ends the snapshot, in all processes."""
        self._deadline.cancel(reason)
        self.save.cancel(reason)

    def end(self, timeout_s: float) -> bool:
        """As ``MemoryUser``: the memory is needed for a save, which comes first."""
        if self._wait(self, 0.0):
            return True
        self.stop("a save needs the memory that it is sent from")
        return self._wait(self, timeout_s)


def _shortage(answers: Sequence[str]) -> str:
    """Returns which server may not hold what all processes send to it, with both numbers. Empty: there is none.

    Args:
        answers: For each process, as JSON, the servers that it writes to: node, address, how many bytes it needs there,
            and how many the server says that the job may have. None: it is not known.
    """
    needs: collections.Counter[tuple[str, str]] = collections.Counter()
    limits: dict[tuple[str, str], int] = {}
    for node, address, need_bytes, limit_bytes in itertools.chain.from_iterable(map(json.loads, answers)):
        needs[node, address] += need_bytes
        if limit_bytes is not None:
            limits[node, address] = limit_bytes
    short = [(needs[server] - limit_bytes, server) for server, limit_bytes in limits.items()]
    missing_bytes, server = max(short, default=(0, ("", "")))
    if missing_bytes <= 0:
        return ""
    return (
        f"two snapshots, one complete and one in progress, need {needs[server]} bytes in the server of node "
        f"{server[0]}, and the job may have {limits[server]} there: raise snapshots.capacity (or workloadCapacity or "
        "namespaceCapacity), or spread the state over more nodes, or have one copy (checkpoint.memory.copies)"
    )


def _plain(options: WriteOptions) -> WriteOptions:
    """Returns the options of snapshots: nothing is encoded, so that the bytes that are sent are those of the arrays.

    Nothing in them belongs to the user's saves, and nothing leaves values on the devices.
    """
    return dataclasses.replace(
        options,
        use_ocdbt=False,
        compression=None,
        express=True,
        callback=DEFAULT_OPTIONS.callback,
        device_host_max_bytes=None,
        write_limit_bytes=None,
        writer=None,
    )
