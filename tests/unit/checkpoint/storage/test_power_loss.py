"""What a process was told is committed is there after the power was lost, on real file systems that recover."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.verification import verify
from gracepoint.errors import CheckpointError, SaveFailed
from tests import loop_mount
from tests.loop_mount import LoopMount
from tests.unit.checkpoint.fakes.engine import engine, restore, save
from tests.waiting import until

pytestmark = [pytest.mark.mounts, pytest.mark.timeout(600)]

CUTS = 30
LONGEST_S = 0.3
STOPPED_S = 60.0

_starts = itertools.count()


@pytest.fixture(params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopMount]:
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)  # nobody else writes
    if reason := loop_mount.why_not(request.param):
        pytest.skip(reason)
    with loop_mount.mounted(request.param, tmp_path) as mount:
        yield mount


def state_of(step: int) -> dict[str, Any]:
    """Returns a large leaf, which is written past the page cache, and small ones."""
    return {"large": np.full(1 << 20, step, np.float32), "small": np.full(10, step, np.int32), "number": step}


def is_of(state: dict[str, Any], step: int) -> bool:
    return all(bool(np.all(leaf == step)) for leaf in state.values())


class Saving:
    """Saves one step after the other in a thread, until a save fails. Periodic and emergency saves take turns."""

    def __init__(self, root: Path, first: int, options: WriteOptions) -> None:
        attempt = f"job-{next(_starts)}-a"  # what an earlier start left is not this one's
        self._checkpointer = engine(root, attempt=attempt, keep_last=2, options=options)
        self.told = 0  # the newest step that this process knows to be committed
        self._step = first
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, SaveFailed, CheckpointError):
            while True:
                if self._step % 2:
                    save(self._checkpointer, self._step, state_of(self._step))
                else:
                    self._checkpointer.save_in_background(self._step, state_of(self._step), {})
                    self._checkpointer.executor.wait_until_finished(STOPPED_S)
                self.told = self._step
                self._step += 1

    def join(self) -> None:
        self._thread.join(STOPPED_S)
        assert not self._thread.is_alive()
        self._checkpointer.abandon("the power was lost", timeout_s=STOPPED_S)


def lost_or_torn(disk: LoopMount, random_: random.Random, options: WriteOptions) -> list[str]:
    """Saves, loses the power, and says what the next start misses. Goes on with what is there."""
    root = disk.top / "run"
    found = restore(root, state_of(0)) if root.exists() else None
    saving = Saving(root, found.step + 1 if found else 1, options)
    if random_.random() < 0.5:  # on a slow disk, many a first save is cut short
        until(lambda: saving.told, "the first save")
    time.sleep(random_.uniform(0, LONGEST_S))
    disk.lose_power()
    saving.join()
    disk.power_on()
    faults = []
    after = restore(root, state_of(0)) if root.exists() else None
    newest = after.step if after else 0
    if newest < saving.told:
        faults.append(f"step {saving.told} was committed, and {newest} is the newest")
    if after and not is_of(after.state, after.step):
        faults.append(f"step {newest} has other values")
    steps = [path for path in root.iterdir() if path.name.isdigit()] if root.exists() else []
    return faults + [f"step {path.name} is damaged" for path in steps if not verify(path).ok]


@pytest.mark.parametrize("use_ocdbt", [False, True], ids=["files", "OCDBT"])
def test_a_committed_step_survives_a_power_loss(disk: LoopMount, use_ocdbt: bool) -> None:
    random_ = random.Random(1)
    for _ in range(CUTS):
        assert lost_or_torn(disk, random_, WriteOptions(use_ocdbt=use_ocdbt)) == []


def test_the_test_finds_saves_that_are_not_synced(disk: LoopMount, monkeypatch: pytest.MonkeyPatch) -> None:
    forget: Callable[[int], None] = lambda descriptor: None  # noqa: E731
    monkeypatch.setattr(os, "fsync", forget)
    random_ = random.Random(1)
    with contextlib.suppress(CheckpointError):  # nothing at all can be restored
        assert any(lost_or_torn(disk, random_, WriteOptions()) for _ in range(CUTS))
