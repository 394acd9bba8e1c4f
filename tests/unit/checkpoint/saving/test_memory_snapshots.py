"""Snapshots beside the saves: which are taken, whose copy they send, and what they do to training if they fail.

The snapshot servers are real ones.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.restoring.restore_step import Restored
from gracepoint.checkpoint.saving import memory_snapshots, planner
from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings, MemorySnapshots
from gracepoint.checkpoint.saving.schedule import SaveSchedule
from gracepoint.checkpoint.steps.lease import DirectoryAccess
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, SaveFailed
from gracepoint.process_group import ProcessGroup, SingleProcess, StorageWait
from gracepoint.snapshots.snapshot_servers import PartCopies, ServerPlacement
from tests.replay.account import NO_SNAPSHOT
from tests.replay.trainer import SNAPSHOTS
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    small_state,
)
from tests.unit.snapshots.fakes.servers import Served, damage, placed, serving, shown, view
from tests.waiting import until

pytestmark = pytest.mark.integration

EVERY_STEP = SaveSchedule(every_steps=1)


class Nodes:
    """Two nodes with a server each, which hold the parts of all processes, and a directory of steps.

    Args:
        root: The directory.
        serve: Starts a server.
    """

    def __init__(self, root: Path, serve: Callable[..., Served]) -> None:
        self.storage = root / "storage"
        self.servers = [serve(), serve()]

    def placement(self, attempt: int = 1) -> ServerPlacement:
        return placed(self.servers, text=shown(attempt=attempt))

    def training(
        self,
        gang: ProcessGroup | None = None,
        *,
        attempt: int = 1,
        placement: ServerPlacement | None = None,
        schedule: SaveSchedule = EVERY_STEP,
        **options: Any,
    ) -> StepCheckpointer:
        """The engine of a process in an attempt of the job."""
        settings = MemorySettings(view(placement or self.placement(attempt)), schedule)
        return engine(self.storage, gang or SingleProcess(), attempt=f"job-{attempt}-a", memory=settings, **options)

    def again(self, gang: ProcessGroup | None = None) -> tuple[StepCheckpointer, Restored]:
        """What the next start restores."""
        then = self.training(gang, attempt=2)
        found = then.restore(small_state(), timeout_s=60)
        assert found is not None
        return then, found


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with serving(tmp_path) as serve:
        yield Nodes(tmp_path, serve)


def taken(checkpointer: StepCheckpointer) -> MemorySnapshots:
    assert checkpointer.memory is not None
    return checkpointer.memory


def pass_step(checkpointer: StepCheckpointer, step: int, state: Any) -> bool:
    """Passes a step as a session does. Returns whether a snapshot was begun."""
    memory = taken(checkpointer)
    if not memory.is_due(step) or not memory.begins(step, sync_point=step):
        return False
    memory.begin(step, state, {"rng": step})
    return True


def wait(checkpointer: StepCheckpointer) -> int | None:
    """Waits for the snapshot in progress, and returns the newest step that is safe."""
    memory = taken(checkpointer)
    until(lambda: not memory.busy, "the end of the snapshot")
    return None if memory.newest is None else memory.newest.step


def snapshot(checkpointer: StepCheckpointer, step: int, state: Any = None) -> None:
    """Has a step in memory."""
    assert pass_step(checkpointer, step, small_state(step) if state is None else state)
    assert wait(checkpointer) == step, taken(checkpointer).skips


class Hanging:
    """Has the first done-record of a part not arrive in the servers until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        finish: Any = PartCopies.finish

        def hang(copies: PartCopies, *arguments: Any) -> tuple[str, ...]:
            if copies.name.part == part and not self.hangs.is_set():
                self.hangs.set()
                assert self.goes_on.wait(60)
            nodes: tuple[str, ...] = finish(copies, *arguments)
            return nodes

        monkeypatch.setattr(PartCopies, "finish", hang)


def test_snapshot_is_a_step_in_memory_and_touches_no_storage(nodes: Nodes) -> None:
    checkpointer, state = nodes.training(), small_state(3)
    snapshot(checkpointer, 5, state)
    newest = taken(checkpointer).newest
    assert newest is not None
    assert (newest.copies, newest.nodes) == (2, tuple(served.at.node for served in nodes.servers))
    assert not nodes.storage.exists()
    then, found = nodes.again()
    assert (found.step, found.from_memory, found.host_state) == (5, True, {"rng": 5})
    assert_same(found.state, state)
    assert then.committed_step is None


def test_snapshots_come_by_their_own_interval(nodes: Nodes) -> None:
    checkpointer = nodes.training(schedule=SaveSchedule(every_steps=3))
    begun = [step for step in range(1, 8) if pass_step(checkpointer, step, small_state(step)) and wait(checkpointer)]
    assert begun == [3, 6]


def test_servers_hold_the_newest_safe_step_alone(nodes: Nodes) -> None:
    checkpointer = nodes.training()
    for step in (1, 2, 3):
        snapshot(checkpointer, step)
    for served in nodes.servers:
        entries = served.client().entries("", Deadline.after(60, time.monotonic))
        assert {entry.place.step for entry in entries} == {3}


def test_copy_of_a_save_that_began_at_the_same_step_is_sent(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_copy(*arguments: Any) -> None:
        raise AssertionError("the state was copied from the devices twice")

    monkeypatch.setattr(memory_snapshots, "Transfer", another_copy)
    checkpointer, state = nodes.training(), small_state(4)
    checkpointer.save_in_background(5, state, {})
    snapshot(checkpointer, 5, state)
    checkpointer.wait_until_finished()
    stored = restore(nodes.storage, small_state())
    assert stored is not None
    assert_same(stored.state, state)
    nodes.storage.rename(nodes.storage.with_name("gone"))
    _, found = nodes.again()
    assert_same(found.state, state)


def test_state_that_storage_encodes_is_sent_plain(nodes: Nodes) -> None:
    checkpointer, state = nodes.training(options=WriteOptions(compression="zstd", use_ocdbt=True)), small_state(4)
    checkpointer.save_in_background(5, state, {})
    snapshot(checkpointer, 5, state)
    checkpointer.wait_until_finished()
    snapshot(checkpointer, 6)
    _, found = nodes.again()
    assert (found.step, found.from_memory) == (6, True)
    assert_same(found.state, small_state(6))


def test_snapshots_go_on_while_a_save_is_slow(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, goes_on, put = threading.Event(), threading.Event(), PosixPath.put

    def hang(path: PosixPath, data: bytes) -> None:
        if path.name == "done.process_0.json":
            slow.set()
            assert goes_on.wait(60)
        put(path, data)

    monkeypatch.setattr(PosixPath, "put", hang)
    checkpointer = nodes.training()
    checkpointer.save_in_background(5, small_state(5), {})
    assert slow.wait(30)
    snapshot(checkpointer, 5)
    snapshot(checkpointer, 6)
    goes_on.set()
    checkpointer.wait_until_finished()
    stored = restore(nodes.storage, small_state())
    assert stored is not None
    assert stored.step == 5
    assert_same(stored.state, small_state(5))
    _, found = nodes.again()
    assert (found.step, found.from_memory) == (6, True)
    assert_same(found.state, small_state(6))


def test_snapshot_in_progress_anywhere_is_skipped_by_all_and_said(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=SNAPSHOTS)
    hanging, turn = Hanging(monkeypatch, part=1), threading.Barrier(3, timeout=60)

    def run(gang: ProcessGroup) -> tuple[Any, ...]:
        checkpointer = nodes.training(gang)
        begun = [pass_step(checkpointer, 1, small_state(1))]
        assert hanging.hangs.wait(30)
        begun += [pass_step(checkpointer, 2, small_state(2)), pass_step(checkpointer, 3, small_state(3))]
        turn.wait()
        hanging.goes_on.set()
        assert wait(checkpointer) == 1
        begun.append(pass_step(checkpointer, 4, small_state(4)))
        skips = taken(checkpointer).skips
        return begun, wait(checkpointer), skips.count, "the snapshot of step 1 is still sent" in skips.reason

    assert in_gang(3, run) == [([True, False, False, True], 4, 2, True)] * 3
    lacking = (NO_SNAPSHOT.match(message) for message in caplog.messages)
    assert {match[1] for match in lacking if match} == {"2", "3"}, "as a replay reads it"


def test_part_that_cannot_be_sent_leaves_all_without_this_snapshot_and_the_next_one_comes(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, failed = PartCopies.finish, threading.Event()

    def fail(copies: PartCopies, *arguments: Any) -> Any:
        if copies.name.part == 1 and not failed.is_set():
            failed.set()
            raise OSError("the servers are gone")
        return finish(copies, *arguments)

    monkeypatch.setattr(PartCopies, "finish", fail)

    def run(gang: ProcessGroup) -> tuple[Any, ...]:
        checkpointer = nodes.training(gang)
        assert pass_step(checkpointer, 1, small_state(1))
        first = wait(checkpointer)
        assert pass_step(checkpointer, 2, small_state(2))
        skips = taken(checkpointer).skips
        return first, wait(checkpointer), skips.count, "the servers are gone" in skips.reason

    assert in_gang(2, run) == [(None, 2, 1, True)] * 2


def test_copies_are_those_of_the_part_that_has_fewest(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=SNAPSHOTS)

    def run(gang: ProcessGroup) -> tuple[int, int]:
        fewer = placed(nodes.servers[:1], nodes.servers[1:])
        checkpointer = nodes.training(gang, placement=fewer if gang.process_index == 1 else None)
        snapshot(checkpointer, 1)
        newest = taken(checkpointer).newest
        assert newest is not None
        return newest.copies, len(newest.nodes)

    assert in_gang(2, run) == [(1, 2), (1, 1)]
    lacking = (NO_SNAPSHOT.match(message) for message in caplog.messages)
    assert {match[2] for match in lacking if match} == {"1"}, "as a replay reads it"


def test_state_that_cannot_be_saved_costs_the_snapshot_and_not_the_training(nodes: Nodes) -> None:
    checkpointer = nodes.training()
    assert pass_step(checkpointer, 1, {"w": object()})
    assert taken(checkpointer).skips.count == 1
    assert "object" in taken(checkpointer).skips.reason
    snapshot(checkpointer, 2)


def test_no_snapshot_is_begun_without_servers(nodes: Nodes) -> None:
    checkpointer = nodes.training(placement=placed([], nodes.servers))
    assert not pass_step(checkpointer, 1, small_state())
    assert taken(checkpointer).skips == memory_snapshots.Skips(1, "there is no snapshot server for this process")
    taken(checkpointer).servers.place(nodes.placement())
    snapshot(checkpointer, 2)


def test_save_that_needs_the_memory_ends_the_snapshot_that_is_sent_from_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Hanging(monkeypatch, part=0)
    checkpointer = nodes.training()
    checkpointer.save_in_background(1, small_state(1), {})
    assert pass_step(checkpointer, 1, small_state(1))
    assert hanging.hangs.wait(30)
    threading.Timer(0.2, hanging.goes_on.set).start()
    checkpointer.save_in_background(2, small_state(2), {})
    checkpointer.wait_until_finished()
    stored = restore(nodes.storage, small_state())
    assert stored is not None
    assert_same(stored.state, small_state(2))
    wait(checkpointer)
    snapshot(checkpointer, 3)
    _, found = nodes.again()
    assert_same(found.state, small_state(3))


@pytest.mark.parametrize(
    ("in_background", "short"),
    [
        pytest.param(True, "allows {limit}, of which saves use {part}", id="beside saves"),
        pytest.param(False, "allows {limit}", id="snapshots alone"),
    ],
)
def test_memory_for_snapshots_is_checked_at_the_start_and_refused_with_numbers(
    nodes: Nodes, in_background: bool, short: str
) -> None:
    state = small_state()
    part = state["w"].nbytes + state["b"].nbytes + 8
    limit = part * (1 + in_background) - 1
    words = (
        f"snapshots in the memory of nodes need {part} bytes .* {short.format(limit=limit, part=part)}: leave them out"
    )
    with pytest.raises(CheckpointError, match=words):
        nodes.training(host_memory_limit_bytes=limit).prepare(state, in_background=in_background)
    enough = nodes.training(host_memory_limit_bytes=limit + 1)
    assert enough.prepare(state, in_background=in_background) == part


def test_end_of_training_ends_the_snapshot_in_progress(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = Hanging(monkeypatch, part=0)
    checkpointer = nodes.training()
    assert pass_step(checkpointer, 1, small_state(1))
    assert hanging.hangs.wait(30)
    threading.Timer(0.2, hanging.goes_on.set).start()
    checkpointer.close(30)
    assert not taken(checkpointer).busy


def test_step_in_memory_that_is_newer_than_all_stored_ones_is_restored_and_then_stored(nodes: Nodes) -> None:
    first = nodes.training()
    first.save_in_background(4, small_state(4), {"rng": 4})
    first.wait_until_finished()
    snapshot(first, 5)
    then, found = nodes.again()
    assert (found.step, found.from_memory, found.host_state) == (5, True, {"rng": 5})
    assert_same(found.state, small_state(5))
    assert then.committed_step is None
    then.save_in_background(5, found.state, {})
    then.wait_until_finished()
    stored = restore(nodes.storage, small_state())
    assert stored is not None
    assert stored.step == 5


def test_stored_step_is_restored_if_it_is_as_new(nodes: Nodes) -> None:
    first = nodes.training()
    snapshot(first, 5)
    first.save_in_background(5, small_state(5), {"rng": 5})
    first.wait_until_finished()
    then, found = nodes.again()
    assert (found.step, found.from_memory, then.committed_step) == (5, False, 5)


def test_another_number_of_processes_restores_from_memory(nodes: Nodes) -> None:
    in_gang(4, lambda gang: snapshot(nodes.training(gang), 5))

    def again(gang: ProcessGroup) -> tuple[int, bool]:
        then = nodes.training(gang, attempt=2)
        found = then.restore(small_state(), timeout_s=60, reshard={"rng": lambda values, index, count: values[0]})
        assert found is not None
        assert_same(found.state, small_state(5))
        return found.step, found.from_memory

    assert in_gang(3, again) == [(5, True)] * 3


def test_damaged_copy_is_found_and_the_other_one_is_read(nodes: Nodes) -> None:
    snapshot(nodes.training(), 5)
    damage(nodes.servers[0], "w/0.0")
    _, found = nodes.again()
    assert found.from_memory
    assert_same(found.state, small_state(5))


@pytest.mark.parametrize("harm", ["damaged", "a part is missing", "no server answers"])
def test_snapshot_that_cannot_be_restored_leaves_the_stored_step(nodes: Nodes, harm: str) -> None:
    def run(gang: ProcessGroup) -> None:
        first = nodes.training(gang)
        first.save_in_background(4, small_state(4), {"rng": 4})
        first.wait_until_finished()
        snapshot(first, 5)

    in_gang(2, run)
    for served in nodes.servers:
        if harm == "damaged":
            damage(served, "w/0.0")
        elif harm == "a part is missing":  # it was still sent when the processes died
            served.client().drop("5/1/1", Deadline.after(60, time.monotonic))
        else:
            served.close()

    def again(gang: ProcessGroup) -> tuple[Any, ...]:
        then, found = nodes.again(gang)
        assert_same(found.state, small_state(4))
        return found.step, found.from_memory, then.committed_step

    assert in_gang(2, again) == [(4, False, 4)] * 2


def storage_is_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Has the storage away until the event is set."""
    back, make = threading.Event(), PosixPath.make_folder_durably

    def away(path: PosixPath) -> None:
        if str(path).startswith(str(root)) and not back.is_set():
            raise TimeoutError(errno.ETIMEDOUT, "as the storage says")
        make(path)

    monkeypatch.setattr(PosixPath, "make_folder_durably", away)
    return back


def test_start_without_storage_trains_from_memory_and_stores_when_it_is_back(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_gang(2, lambda gang: snapshot(nodes.training(gang), 5))
    back = storage_is_away(nodes.storage, monkeypatch)

    def again(gang: ProcessGroup) -> tuple[Any, ...]:
        then = nodes.training(gang, attempt=2)
        claimed = then.access.claim_if_there("job-a", timeout_s=60, away_s=60, answer_s=5)
        found = then.restore(small_state(), timeout_s=60)
        assert found is not None
        assert_same(found.state, small_state(5))
        then.prepare(found.state)
        touched = nodes.storage.exists()
        with pytest.raises(CheckpointError, match="as the storage says"):
            then.save_in_background(6, small_state(6), {})
        gang.barrier("tried", timeout_s=60)
        back.set()
        then.save_in_background(7, small_state(7), {})
        then.wait_until_finished()
        holds = then.access.holds_lease
        then.close(60)
        return claimed, found.step, found.from_memory, touched, holds

    assert in_gang(2, again) == [(False, 5, True, False, True), (False, 5, True, False, False)]
    stored = restore(nodes.storage, small_state())
    assert stored is not None
    assert stored.step == 7


def test_start_without_storage_and_without_a_snapshot_waits_for_the_storage(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = storage_is_away(nodes.storage, monkeypatch)
    then = nodes.training()
    assert not then.access.claim_if_there("job-a", timeout_s=60, away_s=60, answer_s=5)
    threading.Timer(0.2, back.set).start()
    assert then.restore(small_state(), timeout_s=60) is None
    assert then.access.holds_lease
    then.close(60)


def test_restore_shows_the_stall_watch_that_it_waits_for_the_storage(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    restoring: dict[int, DirectoryAccess] = {}
    back, make = threading.Event(), PosixPath.make_folder_durably

    def away(path: PosixPath) -> None:
        if str(path).startswith(str(nodes.storage)) and not back.is_set():
            waits = {process: access.waits for process, access in list(restoring.items())}
            if not (waits.get(0) or StorageWait(0)).tries or waits.get(1) != StorageWait(None):
                raise TimeoutError(errno.ETIMEDOUT, "as the storage says")
            back.set()
        make(path)

    monkeypatch.setattr(PosixPath, "make_folder_durably", away)

    def start(gang: ProcessGroup) -> StorageWait | None:
        then = nodes.training(gang)
        assert not then.access.claim_if_there("job-a", timeout_s=60, away_s=60, answer_s=5)
        assert then.access.waits is None
        restoring[gang.process_index] = then.access
        gang.barrier("claimed", timeout_s=60)
        assert then.restore(small_state(), timeout_s=60) is None
        then.close(60)
        return then.access.waits

    assert in_gang(2, start) == [None, None]


def test_process_at_another_step_is_found_at_the_snapshot(nodes: Nodes) -> None:
    def run(gang: ProcessGroup) -> bool:
        return taken(nodes.training(gang)).begins(1 + gang.process_index, sync_point=1)

    outcomes = outcomes_in_gang(2, run)
    assert sum("step 1 at sync point 1" in str(outcome) and "step 2" in str(outcome) for outcome in outcomes) == 1


def test_leaves_that_do_not_change_are_sent_once(nodes: Nodes) -> None:
    first, state = nodes.training(), {}
    frozen = {f"frozen{number}": jnp.full(1 << 15, number, jnp.float32) for number in range(9)}
    for step in (1, 2, 3):
        state = {**frozen, "w": jnp.full(1 << 15, step, jnp.float32)}
        snapshot(first, step, state)
    newest = taken(first).newest
    assert newest is not None
    assert newest.part_bytes == 10 * 4 << 15
    assert newest.sent_bytes <= 0.11 * 2 * newest.part_bytes
    found = nodes.training(attempt=2).restore(state, timeout_s=60)
    assert found is not None
    assert (found.step, found.from_memory) == (3, True)
    assert_same(found.state, state)


def test_manifest_in_parts_is_read_from_memory(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MANY_CHUNKS", 2)
    in_gang(3, lambda gang: snapshot(nodes.training(gang), 5))

    def again(gang: ProcessGroup) -> bool:
        _, found = nodes.again(gang)
        assert_same(found.state, small_state(5))
        return found.from_memory

    assert in_gang(3, again) == [True] * 3


def test_attempt_that_died_in_the_middle_leaves_nothing_that_counts_as_safe(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nodes.training()
    snapshot(first, 4)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PartCopies, "finish", die)
    assert pass_step(first, 5, small_state(5))
    assert wait(first) == 4
    _, found = nodes.again()
    assert (found.step, found.from_memory) == (4, True)
    assert_same(found.state, small_state(4))


#: A state of 1 MiB in one chunk, and what two snapshots of it cost a server: each value costs a page beside its bytes.
MIB_STATE = {"w": jnp.ones(1 << 18, jnp.float32)}
TWO_BYTES = 2 * ((1 << 20) + 4096)
#: What a snapshot has beside its chunks: metadata, host state and done-record.
SMALL_BYTES = 1 << 17


def mib_state(value: int) -> dict[str, jnp.ndarray]:
    return {"w": MIB_STATE["w"] * value}


def begins_where_a_job_may_have(
    tmp_path: Path, limit_bytes: int, gang: ProcessGroup | None = None
) -> tuple[StepCheckpointer, bool]:
    with serving(tmp_path) as serve:
        nodes = Nodes(tmp_path, lambda: serve(workload_bytes=limit_bytes))
        first = nodes.training(gang)
        first.prepare(MIB_STATE)
        begun = [pass_step(first, step, mib_state(step)) and wait(first) == step for step in (1, 2, 3)]
        first.close(60)
        return first, all(begun)


def test_servers_that_may_hold_two_snapshots_get_them(tmp_path: Path) -> None:
    first, begins = begins_where_a_job_may_have(tmp_path, TWO_BYTES + SMALL_BYTES)
    assert begins, taken(first).skips


def test_servers_that_may_not_hold_two_snapshots_get_one_and_the_reason_has_both_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, begins = begins_where_a_job_may_have(tmp_path, TWO_BYTES - 1)
    assert not begins
    newest = taken(first).newest
    assert newest is not None
    assert newest.step == 1
    assert f"need {TWO_BYTES} bytes in the server of node " in taken(first).skips.reason
    assert f"the job may have {TWO_BYTES - 1} there: raise snapshots.capacity" in taken(first).skips.reason
    assert [record.levelname for record in caplog.records if "there are no snapshots" in record.message] == ["ERROR"]


def test_the_parts_of_all_processes_count_in_each_server(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        nodes = Nodes(tmp_path, lambda: serve(workload_bytes=TWO_BYTES - 1))

        def run(gang: ProcessGroup) -> str:
            first = nodes.training(gang)
            first.prepare(MIB_STATE)
            snapshot(first, 1, mib_state(1))
            assert pass_step(first, 2, mib_state(2))
            assert wait(first) == 1
            assert not pass_step(first, 3, mib_state(3))
            first.close(60)
            return taken(first).skips.reason

        # Both have a copy of the array, and one of them sends it.
        assert all(f"need {TWO_BYTES} bytes" in reason for reason in in_gang(2, run))


def test_other_servers_are_tried_though_those_of_the_start_may_not_hold_two_snapshots(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        small = Nodes(tmp_path, lambda: serve(workload_bytes=TWO_BYTES - 1))
        first = small.training()
        first.prepare(MIB_STATE)
        snapshot(first, 1, mib_state(1))
        assert pass_step(first, 2, mib_state(2))
        assert wait(first) == 1
        assert not pass_step(first, 3, mib_state(3))
        taken(first).servers.place(Nodes(tmp_path, serve).placement())
        snapshot(first, 4, mib_state(4))
        first.close(60)


def test_state_that_hardly_changes_needs_no_room_for_two_snapshots(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        first = Nodes(tmp_path, lambda: serve(workload_bytes=(1 << 20) + SMALL_BYTES * 2)).training()
        states = [MIB_STATE | {"adapter": jnp.full(1 << 12, step, jnp.float32)} for step in range(4)]
        first.prepare(states[0])
        for step in (1, 2, 3):
            snapshot(first, step, states[step])
        first.close(60)


def test_servers_that_come_while_all_meet_for_the_first_step_are_tried_too(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        first = Nodes(tmp_path, lambda: serve(workload_bytes=TWO_BYTES - 1)).training()
        first.prepare(MIB_STATE)
        taken(first).servers.place(Nodes(tmp_path, serve).placement())
        assert pass_step(first, 1, MIB_STATE), taken(first).skips
        assert wait(first) == 1
        first.close(60)


def test_snapshot_is_brought_forward_when_the_servers_have_changed(nodes: Nodes) -> None:
    first = nodes.training(schedule=SaveSchedule(every_steps=1000))
    assert not [step for step in range(1, 9) if pass_step(first, step, small_state(step))]
    taken(first).servers.place(placed(nodes.servers[:1], text=shown()))
    assert [step for step in range(9, 100) if pass_step(first, step, small_state(step))]
    wait(first)


def test_parts_that_are_sent_at_once_are_a_step_without_a_meeting(nodes: Nodes) -> None:
    def send(gang: ProcessGroup) -> tuple[Any, ...]:
        first = nodes.training(gang)
        snapshot(first, 4)
        stages: list[str] = []
        deadline = Deadline.after(60, time.monotonic)
        sent = taken(first).send_now(5, small_state(5), {"rng": 5}, deadline=deadline, on_stage=stages.append)
        return sent.step, sent.copies, len(sent.nodes), stages

    assert in_gang(2, send) == [(5, 2, 2, ["written", "durable"])] * 2

    def again(gang: ProcessGroup) -> tuple[Any, ...]:
        _, found = nodes.again(gang)
        assert_same(found.state, small_state(5))
        return found.step, found.from_memory, found.host_state

    assert in_gang(2, again) == [(5, True, {"rng": 5})] * 2


def test_sending_at_once_is_predicted_from_the_part_the_servers_and_earlier_snapshots(nodes: Nodes) -> None:
    first = nodes.training()
    assert taken(first).evacuation([]) is None  # nothing is known of the state
    first.prepare(small_state(), in_background=False)
    found = taken(first).evacuation([])
    assert found is not None
    assert (found.part_bytes, found.copies, found.bytes_per_s) == (64 + 16 + 8, 2, None)
    snapshot(first, 4)
    found = taken(first).evacuation([])
    assert found is not None
    assert found.bytes_per_s is not None
    taken(first).servers.place(placed([], nodes.servers, text=shown()))
    assert taken(first).evacuation([]) is None


def test_part_that_no_server_takes_at_once_is_said_to_be_lost(nodes: Nodes) -> None:
    first = nodes.training()
    for served in nodes.servers:
        served.server.close()
    with pytest.raises(SaveFailed, match="step 5 was not sent to any snapshot server: .*no snapshot server takes"):
        taken(first).send_now(5, small_state(5), {}, deadline=Deadline.after(60, time.monotonic))


def test_snapshots_of_another_directory_of_the_job_are_not_restored(nodes: Nodes, tmp_path: Path) -> None:
    snapshot(nodes.training(), 1000)
    nodes.storage = tmp_path / "another-directory"
    assert nodes.training(attempt=2).restore(small_state(), timeout_s=60) is None


def test_storage_that_did_not_answer_at_first_is_asked_again_before_an_older_snapshot_is_restored(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = nodes.training()
    snapshot(first, 5)
    first.save_in_background(9, small_state(9), {"rng": 9})
    first.wait_until_finished()
    back = storage_is_away(nodes.storage, monkeypatch)
    then = nodes.training(attempt=2)
    assert not then.access.claim_if_there("job-a", timeout_s=60, away_s=60, answer_s=5)
    back.set()
    found = then.restore(small_state(), timeout_s=60)
    then.close(60)
    assert found is not None
    assert found.step == 9


def test_a_restore_has_its_time_after_storage_was_away_for_longer(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(gang: ProcessGroup) -> None:
        first = nodes.training(gang)
        first.save_in_background(9, small_state(9), {"rng": 9})
        first.wait_until_finished()

    in_gang(2, run)
    back = storage_is_away(nodes.storage, monkeypatch)

    def again(gang: ProcessGroup) -> int:
        then = nodes.training(gang, attempt=2)
        assert not then.access.claim_if_there("job-a", timeout_s=60, away_s=60, answer_s=5)
        if gang.process_index == 0:
            threading.Timer(5, back.set).start()
        found = then.restore(small_state(), timeout_s=4)
        assert found is not None
        return found.step

    assert in_gang(2, again) == [9, 9]


def test_a_step_that_a_later_start_went_back_from_is_not_restored_again(nodes: Nodes) -> None:
    first = nodes.training()
    first.save_in_background(4, small_state(4), {"rng": 4})
    first.wait_until_finished()
    snapshot(first, 50, small_state(50))
    no_server = dataclasses.replace(nodes.placement(2), write=(), read=())
    second = nodes.training(attempt=2, placement=no_server)
    found = second.restore(small_state(), timeout_s=60)
    assert found is not None
    assert found.step == 4
    taken(second).servers.place(nodes.placement(2))
    for step in (5, 6):
        snapshot(second, step, small_state(-step))
    second.save_in_background(7, small_state(-7), {"rng": -7})
    second.wait_until_finished()
    found = nodes.training(attempt=3).restore(small_state(), timeout_s=60)
    assert found is not None
    assert found.step == 7


def test_nothing_is_left_in_the_servers_of_nodes_that_a_restart_has_left(tmp_path: Path) -> None:
    with serving(tmp_path) as serve:
        nodes = Nodes(tmp_path, serve)
        snapshot(nodes.training(), 5)
        before = nodes.servers
        nodes.servers = [serve(), serve()]
        then = nodes.training(attempt=2, placement=placed(nodes.servers, before, text=shown(attempt=2)))
        assert then.restore(small_state(), timeout_s=60) is not None
        for step in (6, 7):
            snapshot(then, step)
        then.close(60)
        assert not any(served.used_bytes() for served in before)


def test_a_stored_step_that_is_damaged_is_read_from_memory(nodes: Nodes) -> None:
    first = nodes.training()
    for step in (4, 9):
        first.save_in_background(step, small_state(step), {"rng": step})
        first.wait_until_finished()
    snapshot(first, 9, small_state(9))
    for path in (nodes.storage / "9").rglob("w/0*"):
        path.write_bytes(b"x" * path.stat().st_size)
    _, found = nodes.again()
    assert found.step == 9
    assert found.from_memory
    assert_same(found.state, small_state(9))


@pytest.mark.parametrize("is_safe", [True, False], ids=["in all processes", "not in all processes"])
def test_snapshots_go_on_after_a_drill_in_which_a_step_was_sent_at_once(tmp_path: Path, is_safe: bool) -> None:
    with serving(tmp_path) as serve:
        nodes = Nodes(tmp_path, lambda: serve(workload_bytes=TWO_BYTES + SMALL_BYTES))
        first, states = nodes.training(), [{"w": MIB_STATE["w"] + step} for step in range(5)]
        first.prepare(states[0])
        snapshot(first, 1, states[1])
        taken(first).send_now(2, states[2], {"rng": 2}, deadline=Deadline.after(60, time.monotonic))
        taken(first).make_room(is_safe=is_safe)
        for step in (3, 4):
            snapshot(first, step, states[step])
        first.close(60)
