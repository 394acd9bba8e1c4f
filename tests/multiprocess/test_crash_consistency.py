"""A save, a deletion and a salvage, cut by a crash after every single operation on the disk.

Two real processes save and are killed, others salvage and save again; strace records what they do to the disk. For
every tree that a crash may leave at any point (tests/multiprocess/disk.py says which), the real restore gives one of
the steps whose save had begun, whole, and never an older one than what a process had been told is durable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import pytest

from gracepoint.checkpoint import AsyncCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.verification import verify
from gracepoint.errors import CheckpointNotFound
from tests.multiprocess import crash_process, strace
from tests.multiprocess.disk import Crash, Disk, Tree
from tests.multiprocess.launcher import Processes
from tests.unit.checkpoint.fakes.engine import assert_same, engine

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]  # of seconds, on machines that are busy

SCRIPT = Path(crash_process.__file__)
LIKE = {"w": jnp.zeros(8), "b": jnp.zeros(3, jnp.bfloat16), "n": 0}
KILLED = -9


STEPS = range(1, 6)
# How many processes, and what they do: saves with a deletion, an emergency, a death before the commit, a salvage, and a
# step that is saved again.
FILES = [
    (2, ["files", "job-0-a", "background:1", "background:2", "save:3", "die-before-commit:4"]),
    (1, ["files", "job-1-b", "restore:4"]),
    (1, ["files", "job-2-c", "save:4"]),
]
# The same past the page cache.
DIRECT = [
    (2, ["direct", "job-0-a", "save:1", "die-before-commit:2"]),
    (1, ["direct", "job-1-b", "restore:2"]),
]
# The same where the processes' parts are merged at the commit.
OCDBT = [
    (2, ["ocdbt", "job-0-a", "background:1", "save:2", "die-before-commit:3"]),
    (1, ["ocdbt", "job-1-b", "restore:3"]),
]
# The same where each process records its own chunks.
PARTS = [
    (2, ["parts", "job-0-a", "save:1", "die-before-commit:2"]),
    (1, ["parts", "job-1-b", "restore:2"]),
]
# One path that is saved to over and over, and at last by another start.
PATH = [
    (2, ["path", "job-0-a", "background:1", "save:2", "background:3", "die-before-commit:4"]),
    (1, ["path", "job-1-b", "save:5"]),
]


verified: dict[frozenset[tuple[str, bytes | None]], bool] = {}  # whether what a folder held was whole


@dataclasses.dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        disk: What it did.
        begun: Position in the recording at which the save of each step began first.
        durable: Position from which on each step is durable, as far as a process may know.
        committed: Position at which a process was told so first.
        left: What it left in fact.
    """

    disk: Disk
    begun: dict[int, int]
    durable: dict[int, int]
    committed: dict[int, int]
    left: Tree


RUNS = {"a file for each chunk": FILES, "direct I/O": DIRECT, "OCDBT": OCDBT, "parts of the manifest": PARTS}


@pytest.fixture(scope="module", params=list(RUNS.values()), ids=list(RUNS))
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(request.param, tmp_path_factory.mktemp("recorded"))


def record(run: Sequence[tuple[int, list[str]]], top: Path) -> Run:
    """Has the processes of ``run`` do what it says, one start after the other, below ``top``."""
    if why := strace.missing():
        pytest.skip(why)
    root = top / "root"
    root.mkdir()
    with strace.recording(top / "log") as nursery:
        for count, (form, *arguments) in run:
            arguments = [form, str(root), *arguments]
            with Processes.start(SCRIPT, count, arguments=arguments, devices=1, off=nursery) as processes:
                codes = [result.code for result in processes.wait(90)]
                assert codes == [0] * count or (count == 2 and codes == [KILLED] * 2), processes.output()
    calls = strace.read(top / "log")
    marks = [(call.mark, call.entered) for call in calls if call.mark]
    begun = {step: first(f"begun {step}", marks) for step in STEPS}
    durable = {step: durable_from(step, marks) for step in STEPS}
    committed = {step: first(f"committed {step}", marks) for step in STEPS}
    left = {str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
    return Run(Disk(calls, str(root)), begun, durable, committed, left)


def test_folders_made_before_their_parents_call_returns_are_kept() -> None:
    def making(path: str, entered: int, left: int) -> strace.Call:
        return strace.Call(
            "mkdir", '"' + "".join(f"\\x{byte:02x}" for byte in path.encode()) + '", 0777', 0, entered, left
        )

    disk = Disk([making("/top/a/b/c", 1, 6), making("/top/a/b", 2, 5), making("/top/a", 3, 4)], "/top")
    assert disk.tree() == dict.fromkeys(["a", "a/b", "a/b/c"])


def first(mark: str, marks: Sequence[tuple[str, int]]) -> int:
    """Returns where in the recording a mark came first; after its end if it never did."""
    return min((position for text, position in marks if text == mark), default=sys.maxsize)


def durable_from(step: int, marks: Sequence[tuple[str, int]]) -> int:
    """A process was told that the step is committed, or both that their own parts are durable."""
    parts = [first(f"durable {step} {process}", marks) for process in range(2)]
    return min(first(f"committed {step}", marks), max(parts))


def test_the_recording_is_complete(recorded: Run) -> None:
    assert recorded.disk.tree() == recorded.left
    begun = [step for step, position in recorded.begun.items() if position < sys.maxsize]
    assert {path for path in recorded.left if "/" not in path} == {str(max(begun))}, "the others were deleted"


def test_restore_gives_one_whole_step_after_any_crash(
    recorded: Run, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)  # nobody writes any more, we know
    crashes = recorded.disk.crashes(ignoring=is_read_by_nobody)
    steps = {restored_after(crash, recorded, memory_folder / str(n)) for n, crash in enumerate(crashes)}
    begun = {step for step, position in recorded.begun.items() if position < sys.maxsize}
    assert steps == {None, *begun}, "the crashes are not where they should be"


def is_read_by_nobody(path: str) -> bool:
    """What is in the trash, and files under the names that they have while they are written."""
    return (".gracepoint-trash." in path and "/" in path) or path.endswith(".__lock") or ".partial-" in path


def restored_after(crash: Crash, recorded: Run, root: Path) -> int | None:
    """Restores what a crash left, checks it, and returns the step."""
    where = f"a crash between {crash.first} and {crash.last} of the recording"
    lay_out(crash, root)
    visible = Layout(storage_path(root)).steps()
    for step in visible:
        assert is_whole(crash, root, str(step)), f"{where}: step {step} has its name and is not whole"
    told = newest(recorded.committed, crash.last)
    if told < 4:  # which is saved again
        assert max(visible, default=0) >= told, f"{where}: step {told} was committed and has its name no more"
    checkpointer = engine(root, attempt="job-3-d")
    restored = checkpointer.restore(LIKE, timeout_s=30)
    checkpointer.close(30)
    least, most = newest(recorded.durable, crash.last), newest(recorded.begun, crash.first)
    found = 0 if restored is None else restored.step
    assert least <= found <= most, f"{where}: step {found} is restored, expected {least} to {most}"
    if restored is not None:
        assert_same(restored.state, {"w": jnp.arange(8.0) + found, "b": jnp.full(3, found, jnp.bfloat16), "n": found})
    shutil.rmtree(root)
    return found or None


def is_whole(crash: Crash, root: Path, folder: str) -> bool:
    """Verifies a checkpoint in a tree that is laid out; one that equals another, byte for byte, only once."""
    held = frozenset((path, data) for path, data in crash.tree.items() if path.startswith(f"{folder}/"))
    if held not in verified:
        verified[held] = verify(root / folder).ok
    return verified[held]


def newest(reached: Mapping[int, int], position: int) -> int:
    """Returns the newest step that had reached a point by ``position``; 0 if none had."""
    return max((step for step, at in reached.items() if at <= position), default=0)


def test_replaced_path_holds_one_whole_tree_after_any_crash(
    tmp_path: Path, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)
    run = record(PATH, tmp_path)
    assert run.disk.tree() == run.left
    crashes = run.disk.crashes(ignoring=is_read_by_nobody)
    found = {path_after(crash, run, memory_folder / str(n)) for n, crash in enumerate(crashes)}
    assert found == {None, 1, 2, 3, 4, 5}, "the crashes are not where they should be"


def path_after(crash: Crash, recorded: Run, root: Path) -> int | None:
    """Restores the path from what a crash left, checks it, and returns which save it holds."""
    where = f"a crash between {crash.first} and {crash.last} of the recording"
    lay_out(crash, root)
    path = root / "model"
    assert not path.exists() or is_whole(crash, root, path.name), f"{where}: the path is there, and not whole"
    found = None
    with AsyncCheckpointer(timeout_s=30) as checkpointer, contextlib.suppress(CheckpointNotFound):
        state = checkpointer.restore(path, LIKE)
        found = int(state["n"])
        assert_same(state, {"w": jnp.arange(8.0) + found, "b": jnp.full(3, found, jnp.bfloat16), "n": found})
    least, most = newest(recorded.durable, crash.last), newest(recorded.begun, crash.first)
    assert least <= (found or 0) <= most, f"{where}: save {found} is restored, expected {least} to {most}"
    shutil.rmtree(root)
    return found


def lay_out(crash: Crash, root: Path) -> None:
    """Makes the tree that a crash left."""
    root.mkdir()
    for path, data in crash.tree.items():
        (root / path).mkdir() if data is None else (root / path).write_bytes(data)


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where thousands of syncs cost nothing; the usual one where there is none."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
