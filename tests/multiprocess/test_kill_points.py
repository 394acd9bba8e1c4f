"""Processes killed at every named point of a save; what they leave is salvaged by fewer, by more, by several at once.

When process 0 dies, JAX ends process 1 within a tenth of a second, in whatever it is doing; when process 1 dies,
process 0 goes on until its time is over.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from gracepoint.checkpoint.steps.commit import RenameCommit
from tests.multiprocess import checkpoint_process
from tests.multiprocess.checkpoint_runs import SCRIPT, expect, restore_here, run
from tests.multiprocess.launcher import Processes
from tests.unit.checkpoint.fakes.engine import engine, save

pytestmark = pytest.mark.multiprocess

KILLED = -9
AT_ONCE = 4  # gangs: they wait more than they work
# How long a survivor waits for the dead. Within it the other one comes to its end, on a machine that is busy.
PATIENCE_S = 5
SURVIVES_ALONE = "saved 2"
GIVES_UP = "save:2 failed: SaveFailed: step 2 is not committed"

# Point, who dies, the steps that the next start may find, what process 0 says if it lives. Up to the done-record each
# process writes its own part; from there on the one that comes last commits, which is made the one that dies.
KILLS = [
    *[
        (point, who, {1}, GIVES_UP)
        for point in ("before any file", "in the middle of the files", "after the files", "before the done-record")
        for who in ("0", "1")
    ],
    ("before the done-record", "01", {1}, ""),
    # Process 1 has written its own by then, or has been ended by JAX before.
    ("after the done-record", "0", {1, 2}, ""),
    ("after the done-record", "1", {2}, SURVIVES_ALONE),
    ("after the done-record", "01", {2}, ""),
    *[
        (point, who, {2}, SURVIVES_ALONE)
        for point in ("before the manifest", "after the manifest", "before the rename", "after the rename")
        for who in ("0", "1")
    ],
    ("after the commit", "0", {2}, ""),
    ("after the commit", "1", {2}, SURVIVES_ALONE),
]


@pytest.fixture
def one_step(tmp_path: Path) -> Path:
    """A directory with step 1."""
    root = tmp_path / "root"
    state = checkpoint_process.with_keys(checkpoint_process.make_state(1), 1)
    save(engine(root, attempt="job-9-z"), 1, state)
    return root


@pytest.mark.timeout(400)
def test_kill_at_any_point_leaves_one_whole_step(
    one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)  # whoever was killed is dead, we know
    kills = sorted(KILLS, key=lambda kill: kill[1] == "1")  # only the survivors of these wait: all together
    for number in range(0, len(kills), AT_ONCE):
        batch = {tmp_path / f"{number}-{n}": kill for n, kill in enumerate(kills[number : number + AT_ONCE])}
        with contextlib.ExitStack() as stack:
            gangs = [stack.enter_context(start_killing(one_step, root, *kill[:2])) for root, kill in batch.items()]
            results = [gang.wait(300) for gang in gangs]
        for (root, (point, who, steps, survivor)), ended in zip(batch.items(), results, strict=True):
            where = f"killed {point}: {who}; {ended}"
            assert all(ended[int(process)].code == KILLED for process in who), where
            if who == "1":
                assert ended[0].code == 0, where
                assert survivor in ended[0].output, where
            step = restore_here(root)
            assert step in steps, where
            assert (root / "2").exists() == (step == 2), where


def start_killing(template: Path, root: Path, point: str, who: str) -> Processes:
    shutil.copytree(template, root)
    last = [] if who == "01" else [f"last:{who}"]
    actions = [f"patience:{PATIENCE_S}", *last, f"kill:{point}:{who}", "save:2"]
    return Processes.start(SCRIPT, 2, arguments=[str(root), "job-0-a", *actions])


@pytest.fixture
def durable_step(one_step: Path) -> Path:
    """A directory with step 1, and step 2 durable and not committed, as both processes died."""
    run(one_step, "kill:after the done-record:01", "save:2")
    assert not (one_step / "2").exists()
    return one_step


def test_more_processes_than_saved_may_salvage(durable_step: Path) -> None:
    with Processes.start(SCRIPT, 4, arguments=[str(durable_step), "job-1-b", "restore:2"], devices=1) as processes:
        expect(processes.wait(90), "restored 2 with {}")


def test_salvagers_in_several_processes_may_race(durable_step: Path) -> None:
    starts = [
        Processes.start(SCRIPT, 1, arguments=[str(durable_step), f"job-{n}-r", "restore:2"], devices=4)
        for n in range(3)
    ]
    with contextlib.ExitStack() as stack:
        for processes in [stack.enter_context(start) for start in starts]:
            expect(processes.wait(90), "restored 2 with {}")
    assert sorted(p.name for p in durable_step.iterdir() if not p.name.startswith(".")) == ["1", "2"]


def test_restart_waits_for_the_save_of_the_previous_attempt(one_step: Path) -> None:
    go_on = one_step / ".go-on"
    writing = [str(one_step), "job-0-a", "patience:60", f"hold:1:{go_on}", "save:2"]
    waiting = [str(one_step), "job-1-b", "quiet:60", "tell-waiting", "restore:2"]
    with Processes.start(SCRIPT, 2, arguments=writing) as old:
        old[0].wait_for_line("durable")
        with Processes.start(SCRIPT, 1, arguments=waiting, devices=4) as new:
            new[0].wait_for_line("waiting")
            go_on.touch()
            # Both commit now, and neither minds the other.
            expect(new.wait(90), "restored 2 with {}")
            expect(old.wait(90), "saved 2")
