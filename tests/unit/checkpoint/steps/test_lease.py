"""Two jobs in one checkpoint directory are told; attempts of one job follow each other without waiting."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import lease
from gracepoint.checkpoint.steps.lease import Holder, Lease
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.storage.storage_path import Generation
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, SaveFailed, StorageAway
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import DaemonThread
from tests.forked import forked
from tests.interrupts import interrupt
from tests.unit.checkpoint.fakes.engine import engine, outcomes_in_gang, small_state
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore
from tests.waiting import PassingTime, until

# The first number of a process is that of its namespace; no namespace of Linux has this one.
ELSEWHERE = Holder("job-b", "job-b-0", "another-machine", "1:7:123")


class Time:
    """Seconds that pass by sleeping; the file system's clock is the machine's."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def held() -> Iterator[list[Lease]]:
    """Leases to be released in the end."""
    leases: list[Lease] = []
    yield leases
    for each in leases:
        each.release()


def claim(root: Path, job: str, held: list[Lease], *, attempt: str = "0", patience_s: float = 0.0) -> Lease:
    time = Time()
    found = lease.claim(
        Layout(storage_path(root)), job, f"{job}-{attempt}", deadline=Deadline.after(patience_s, time), sleep=time.sleep
    )
    held.append(found)
    return found


def put(root: Path, holder: Holder, *, age_s: float = 0.0) -> Path:
    """Leaves another's lease."""
    path = Path(Layout(storage_path(root)).lease())
    storage_path(path).put(json.dumps(dataclasses.asdict(holder)).encode())
    then_s = path.stat().st_mtime - age_s
    os.utime(path, (then_s, then_s))
    return path


def lose(checkpointer: StepCheckpointer, root: Path) -> None:
    """Has another take the lease, until its holder has seen that."""

    def is_lost() -> bool:
        put(root, ELSEWHERE)  # again where a sign of life came between
        return not checkpointer.access.holds_lease

    until(is_lost, "the holder to see it")


def test_directory_of_another_job_is_refused_and_the_job_is_named(tmp_path: Path, held: list[Lease]) -> None:
    put(tmp_path, ELSEWHERE)
    with pytest.raises(CheckpointError, match=r"another job uses it: job-b \(attempt job-b-0, on another-machine\)"):
        claim(tmp_path, "job-a", held)


HERE = Holder.here("job-b", "job-b-0")


@pytest.mark.parametrize(
    "holder",
    [
        pytest.param(dataclasses.replace(ELSEWHERE, host=HERE.host), id="this host name and another namespace"),
        pytest.param(
            dataclasses.replace(ELSEWHERE, process=HERE.process.split(":")[0] + ":7:123"),
            id="another host and a namespace of this number",
        ),
    ],
)
def test_another_job_is_gone_only_if_that_can_be_known(tmp_path: Path, held: list[Lease], holder: Holder) -> None:
    put(tmp_path, holder)
    with pytest.raises(CheckpointError, match="another job uses it: job-b"):
        claim(tmp_path, "job-a", held)


def test_a_later_attempt_of_the_same_job_takes_over_at_once(tmp_path: Path, held: list[Lease]) -> None:
    put(tmp_path, ELSEWHERE)
    claim(tmp_path, "job-b", held, attempt="1")
    assert json.loads(Layout(storage_path(tmp_path)).lease().read_bytes())["attempt"] == "job-b-1"


SPLIT = dataclasses.replace(ELSEWHERE, attempt="uid-0-aaaa", job="uid")


def claim_of_start(root: Path, held: list[Lease], start: str, *, patience_s: float = 0.0) -> Lease:
    time = Time()
    deadline = Deadline.after(patience_s, time)
    found = lease.claim(
        Layout(storage_path(root)), "uid", f"{start}-bbbb", deadline=deadline, sleep=time.sleep, start=start
    )
    held.append(found)
    return found


def test_another_cluster_of_the_same_start_is_refused_and_named(tmp_path: Path, held: list[Lease]) -> None:
    put(tmp_path, SPLIT)
    both = (
        r"another cluster of this same start of the job uses it: attempt uid-0-aaaa, on another-machine; .*uid-0-bbbb"
    )
    with pytest.raises(CheckpointError, match=both):
        claim_of_start(tmp_path, held, "uid-0", patience_s=10.0)


@pytest.mark.parametrize(
    ("holder", "start", "age_s"),
    [
        pytest.param(SPLIT, "uid-1", 0.0, id="of an earlier start"),
        pytest.param(SPLIT, "uid-0", lease.EXPIRES_S + 1, id="without a sign of life for long"),
        pytest.param(
            dataclasses.replace(SPLIT, host=os.uname().nodename), "uid-0", 0.0, id="in a container of this pod before"
        ),
        pytest.param(
            dataclasses.replace(Holder.here("uid", "uid-0-aaaa")), "uid-0", 0.0, id="by this process, attached before"
        ),
    ],
)
def test_lease_of_the_same_job_is_taken_over_when_its_holder_ended(
    tmp_path: Path, held: list[Lease], holder: Holder, start: str, age_s: float
) -> None:
    put(tmp_path, holder, age_s=age_s)
    claim_of_start(tmp_path, held, start)
    assert json.loads(Layout(storage_path(tmp_path)).lease().read_bytes())["attempt"] == f"{start}-bbbb"


def test_who_loses_the_directory_to_another_cluster_gets_an_error(
    tmp_path: Path, held: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    mine = claim_of_start(tmp_path, held, "uid-0")

    def is_lost() -> bool:
        put(tmp_path, SPLIT)
        return not mine.is_held

    until(is_lost, "the holder to see it")
    with pytest.raises(CheckpointError, match="another cluster of this same start of the job has taken it over"):
        mine.check()
    assert not mine.is_held


def test_a_lease_without_a_sign_of_life_for_long_is_nobodys(tmp_path: Path, held: list[Lease]) -> None:
    put(tmp_path, ELSEWHERE, age_s=lease.EXPIRES_S - 5)
    with pytest.raises(CheckpointError):
        claim(tmp_path, "job-a", held)
    put(tmp_path, ELSEWHERE, age_s=lease.EXPIRES_S + 1)
    claim(tmp_path, "job-a", held)


def test_a_lease_expires_after_its_time_and_not_with_it(
    tmp_path: Path, held: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, ELSEWHERE)
    os.utime(path, (1000, 1000))
    monkeypatch.setattr(PosixPath, "now_s", lambda path: 1000 + lease.EXPIRES_S)
    with pytest.raises(CheckpointError):
        claim(tmp_path, "job-a", held)
    monkeypatch.setattr(PosixPath, "now_s", lambda path: 1000.25 + lease.EXPIRES_S)
    claim(tmp_path, "job-a", held)


def test_an_empty_lease_is_reported_as_one_whose_writer_may_have_died(tmp_path: Path, held: list[Lease]) -> None:
    Layout(storage_path(tmp_path)).lease().put(b"")
    with pytest.raises(CheckpointError, match="its lease is empty"):
        claim(tmp_path, "job-a", held)


def test_job_waits_for_another_that_is_ending_and_logs_once(
    tmp_path: Path, held: list[Lease], caplog: pytest.LogCaptureFixture
) -> None:
    path = put(tmp_path, ELSEWHERE)
    time, slept = Time(), set[float]()

    def sleep(seconds: float) -> None:
        slept.add(seconds)
        time.sleep(seconds)
        if time.now_s > 20:
            path.unlink(missing_ok=True)

    deadline = Deadline.after(lease.PATIENCE_S, time)
    held.append(lease.claim(Layout(storage_path(tmp_path)), "job-a", "job-a-0", deadline=deadline, sleep=sleep))
    assert 20 < time.now_s < 22
    assert slept == {0.5}
    (said,) = (record.getMessage() for record in caplog.records)
    assert "another job uses it: job-b" in said
    assert said.endswith("; waiting for it to end")


def test_a_job_is_never_kept_out_by_one_that_was_killed() -> None:
    assert lease.PATIENCE_S > lease.EXPIRES_S > 3 * lease.BEAT_S


@pytest.mark.integration
def test_a_process_of_this_machine_that_was_killed_holds_nothing(tmp_path: Path, held: list[Lease]) -> None:
    code = (
        "import sys; from gracepoint.checkpoint.storage.locations import storage_path;"
        "from gracepoint.checkpoint.steps import lease;"
        "from gracepoint.checkpoint.format.layout import Layout; from gracepoint.deadline import Deadline;"
        "import time; lease.claim(Layout(storage_path(sys.argv[1])), 'job-b', 'job-b-0',"
        "deadline=Deadline.after(0, time.monotonic), sleep=time.sleep);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match="another job uses it: job-b"):
            claim(tmp_path, "job-a", held)
        other.kill()
    claim(tmp_path, "job-a", held)


def test_released_it_is_gone_and_what_another_has_taken_is_left(tmp_path: Path, held: list[Lease]) -> None:
    mine = claim(tmp_path, "job-a", held)
    assert mine.is_held
    mine.release()
    assert not mine.is_held
    mine.release()
    assert list(tmp_path.iterdir()) == []
    second = claim(tmp_path, "job-a", held)
    mine.release()
    assert Layout(storage_path(tmp_path)).lease().exists(), "which is another lease of the same process by now"
    path = put(tmp_path, ELSEWHERE)
    second.release()
    assert path.exists()


def test_a_lease_that_somebody_has_overwritten_is_left(tmp_path: Path, held: list[Lease]) -> None:
    mine = claim(tmp_path, "job-a", held)
    path = Path(Layout(storage_path(tmp_path)).lease())
    path.write_text("not a lease")
    mine.release()
    assert path.read_text() == "not a lease"


def test_lease_that_was_deleted_is_written_again_and_may_be_released(
    tmp_path: Path, held: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    written, real = threading.Event(), PosixPath.create

    def create(path: PosixPath, data: bytes) -> Generation:
        generation = real(path, data)
        written.set()
        return generation

    mine = claim(tmp_path, "job-a", held)
    monkeypatch.setattr(PosixPath, "create", create)
    path = Path(Layout(storage_path(tmp_path)).lease())
    path.unlink()
    assert written.wait(30)
    monkeypatch.setattr(PosixPath, "create", lambda path, data: None)  # the next sign of life is not given
    path.unlink(missing_ok=True)
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_a_released_lease_of_an_object_store_is_gone() -> None:
    paths = Layout(FlatPath(FlatStore(), "run"))
    mine = lease.claim(paths, "job", "a-0", deadline=Deadline.after(1, time.monotonic), sleep=time.sleep)
    assert paths.lease().exists()
    mine.release()
    assert not paths.lease().exists()


def test_a_lease_that_is_taken_while_it_is_released_is_left() -> None:
    store = FlatStore()
    paths = Layout(FlatPath(store, "run"))
    mine = lease.claim(paths, "job", "a-0", deadline=Deadline.after(1, time.monotonic), sleep=time.sleep)

    def before(operation: str, key: str) -> None:
        if operation.startswith("delete"):
            FlatPath(store, key).put(json.dumps(dataclasses.asdict(ELSEWHERE)).encode())

    store.before = before
    mine.release()
    assert paths.lease().exists()


def test_the_holder_keeps_giving_signs_of_life(
    tmp_path: Path, held: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    beaten = threading.Event()
    real = PosixPath.replace

    def replace(path: PosixPath, data: bytes, generation: Generation) -> Generation:
        beaten.set()
        return real(path, data, generation)

    monkeypatch.setattr(PosixPath, "replace", replace)
    claim(tmp_path, "job-a", held)
    assert beaten.wait(30)


def test_whoever_has_lost_the_directory_to_another_job_saves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    checkpointer = engine(tmp_path)
    checkpointer.access.claim("job-a", timeout_s=30)
    lose(checkpointer, tmp_path)
    with pytest.raises(CheckpointError, match="another job has taken it over: job-b"):
        checkpointer.save_in_background(1, small_state(), {})
    checkpointer.close(30)
    assert [p.name for p in tmp_path.iterdir()] == [".gracepoint-lease"]


def test_whoever_was_followed_by_a_later_attempt_may_still_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    checkpointer = engine(tmp_path)
    checkpointer.access.claim("job-b", timeout_s=30)
    lose(checkpointer, tmp_path)
    checkpointer.save_in_background(1, small_state(), {})
    checkpointer.close(30)
    assert (tmp_path / "1").is_dir()


def test_one_of_several_jobs_starting_at_once_gets_the_directory(
    tmp_path: Path, held: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [f"job-{number}" for number in range(8)]
    start = threading.Barrier(len(jobs))
    looked = threading.local()
    real = PosixPath.read

    def read(path: PosixPath) -> Any:
        try:
            return real(path)
        except FileNotFoundError:
            if path.name == ".gracepoint-lease" and not hasattr(looked, "first"):
                looked.first = True
                start.wait(30)  # all have seen that the directory is nobody's
            raise

    def on_a_machine_of_its_own(job: str, attempt: str) -> Holder:
        # All threads of one process may share a directory; each of these is as in another machine's.
        return Holder(job, attempt, threading.current_thread().name, ELSEWHERE.process)

    monkeypatch.setattr(PosixPath, "read", read)
    monkeypatch.setattr(Holder, "here", staticmethod(on_a_machine_of_its_own))
    outcomes: dict[str, str] = {}

    def run(job: str) -> None:
        try:
            claim(tmp_path, job, held)
        except CheckpointError as error:
            outcomes[job] = str(error)

    threads = [threading.Thread(target=run, args=(job,), name=f"machine of {job}") for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(held) == 1
    assert len(outcomes) == len(jobs) - 1
    monkeypatch.undo()
    winner = json.loads(Layout(storage_path(tmp_path)).lease().read_bytes())["job"]
    assert all(f"another job uses it: {winner} " in refusal for refusal in outcomes.values()), outcomes
    assert [p.name for p in tmp_path.iterdir()] == [".gracepoint-lease"]


def test_a_lease_that_goes_away_while_it_is_looked_at_is_nobodys(
    tmp_path: Path, held: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, ELSEWHERE)
    real = PosixPath.read

    def read(path: PosixPath) -> Any:
        found = real(path)
        path.delete()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PosixPath, "read", read)
        claim(tmp_path, "job-a", held)
    assert json.loads(path.read_text())["job"] == "job-a"


@pytest.mark.integration
def test_a_process_that_never_releases_its_lease_can_end(tmp_path: Path) -> None:
    code = (
        "import sys, time; from gracepoint.checkpoint.storage.locations import storage_path;"
        "from gracepoint.checkpoint.steps import lease;"
        "from gracepoint.checkpoint.format.layout import Layout; from gracepoint.deadline import Deadline;"
        "lease.claim(Layout(storage_path(sys.argv[1])), 'job-b', 'job-b-0',"
        "deadline=Deadline.after(0, time.monotonic), sleep=time.sleep)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert Layout(storage_path(tmp_path)).lease().exists()


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a thread waits longer, as the machine may be busy."""
    wait = DaemonThread.wait
    monkeypatch.setattr(DaemonThread, "wait", lambda thread, timeout_s: wait(thread, 30.0))


@pytest.mark.usefixtures("_patient")
def test_running_lease_renewal_does_not_outlive_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    beating = threading.Event()
    real = PosixPath.replace

    def replace(path: PosixPath, data: bytes, found: Generation) -> Generation:
        beating.set()
        until(lambda: not mine.is_held, "the release")
        for _ in range(20):  # the time in which a release that does not wait removes the file
            if not path.exists():
                return path.create(data)  # as the holder does where the lease was deleted
            time.sleep(0.01)
        return real(path, data, found)

    monkeypatch.setattr(PosixPath, "replace", replace)
    before = set(threading.enumerate())
    mine = claim(tmp_path, "job-a", [])
    (thread,) = set(threading.enumerate()) - before
    assert beating.wait(30)
    mine.release()
    thread.join(30)
    assert not thread.is_alive()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_patient")
def test_a_release_that_was_interrupted_is_done_by_the_next_one(
    tmp_path: Path, held: list[Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()
    real = PosixPath.read

    def read(path: PosixPath) -> Any:
        if threading.current_thread().name == "gracepoint-lease":
            asked.set()
            answers.wait(30)
        return real(path)

    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    mine = claim(tmp_path, "job-a", held)
    monkeypatch.setattr(PosixPath, "read", read)
    assert asked.wait(30)
    assert interrupt(mine.release, 0.05)
    assert list(tmp_path.iterdir()) != []
    answers.set()
    mine.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_a_forked_child_neither_holds_nor_releases_the_lease(tmp_path: Path, held: list[Lease]) -> None:
    mine = claim(tmp_path, "job-a", held)

    def in_child() -> str:
        mine.release()
        return str(mine.is_held)

    assert forked(in_child) == "False"
    assert mine.is_held
    assert list(tmp_path.iterdir()) != []


def test_the_refusal_reaches_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE_S", 0.01)
    put(tmp_path, ELSEWHERE)
    found = outcomes_in_gang(2, lambda gang: engine(tmp_path, gang).access.claim("job-a", timeout_s=30))
    assert ["another job uses it: job-b" in str(error) for error in found] == [True, True]
    assert all(isinstance(error, CheckpointError) and not isinstance(error, SaveFailed) for error in found)


def test_failed_lease_claim_leaves_the_disk_unchanged(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lease.claim(
                Layout(storage_path(tmp_path)), "job-a", "0", deadline=Deadline.after(0.0, Time()), sleep=Time().sleep
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_lease_is_not_replaced(tmp_path: Path, held: list[Lease]) -> None:
    Layout(storage_path(tmp_path)).lease().put(b"something")
    with pytest.raises(CheckpointError, match="is not a lease of Gracepoint's"):
        claim(tmp_path, "job-a", held)


def away(root: Path, monkeypatch: pytest.MonkeyPatch, errors: list[OSError]) -> None:
    """Has the storage of ``root`` fail with these errors, one after the other, when process 0 first uses it."""
    make = PosixPath.make_folder_durably

    def make_once_it_is_there(self: PosixPath) -> None:
        if errors and str(self) == str(root):
            raise errors.pop(0)
        make(self)

    monkeypatch.setattr(PosixPath, "make_folder_durably", make_once_it_is_there)
    monkeypatch.setattr(lease, "time", PassingTime())


@pytest.mark.parametrize(
    "number", [errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ESTALE, errno.ENOTCONN]
)
def test_storage_that_is_away_is_waited_for_and_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away(tmp_path, monkeypatch, [OSError(number, "as the storage says")] * 3)
    tries: list[None] = []

    def use(gang: ProcessGroup) -> None:
        access = engine(tmp_path, gang).access
        access.claim("job-a", timeout_s=30, away_s=math.inf, on_away=lambda: tries.append(None))
        access.release()

    assert outcomes_in_gang(2, use) == [None, None]
    assert len(tries) == 3
    assert f"attach waits for storage seconds=0 error=process 0 does not reach {tmp_path}" in caplog.text


def test_storage_that_stays_away_is_a_separate_error_in_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away(tmp_path, monkeypatch, [TimeoutError(errno.ETIMEDOUT, "as the storage says")] * 10_000)
    for error in outcomes_in_gang(
        2, lambda gang: engine(tmp_path, gang).access.claim("job-a", timeout_s=30, away_s=0.1)
    ):
        assert isinstance(error, StorageAway)
        assert f"process 0 does not reach {tmp_path}: [Errno 110] as the storage says" in str(error)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENODEV, errno.EROFS, errno.EIO, errno.ENOENT])
def test_storage_that_refuses_is_an_error_at_once(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away(tmp_path, monkeypatch, [OSError(number, "as the storage says")])
    for error in outcomes_in_gang(
        2, lambda gang: engine(tmp_path, gang).access.claim("job-a", timeout_s=30, away_s=math.inf)
    ):
        assert isinstance(error, CheckpointError)
        assert not isinstance(error, StorageAway)
        assert "as the storage says" in str(error)


def test_a_process_that_does_not_reach_the_storage_says_so_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appears(*_: Any, **__: Any) -> bool:
        raise TimeoutError(errno.ETIMEDOUT, "as the storage says")

    monkeypatch.setattr(lease, "appears", appears)
    for error in outcomes_in_gang(2, lambda gang: engine(tmp_path, gang).access.check_shared(timeout_s=30)):
        assert isinstance(error, StorageAway)
        assert f"process 1 does not reach {tmp_path}: [Errno 110] as the storage says" in str(error)
