"""What the parts of this process do, for the watch for stalls.

The training thread sets the stage; the stall thread calls the object.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from gracepoint.deadline_plan import NewestSnapshot, SnapshotState
from gracepoint.preemption.stall_detector import Activity
from gracepoint.preemption.stall_watch import is_compiling


class Activities:
    """See the module. Made in the training thread.

    Args:
        place: Returns the number of the latest sync point, the step, and whether an epoch is open.
        snapshot: Returns the newest snapshot, whose save may be under way. None before the first.
    """

    def __init__(
        self, place: Callable[[], tuple[int, int, bool]], snapshot: Callable[[], NewestSnapshot | None]
    ) -> None:
        self._place = place
        self._snapshot = snapshot
        self._thread_id = threading.get_ident()
        self._doing = ("", False)  # the stage, and whether it computes

    @contextlib.contextmanager
    def at(self, stage: str, *, computes: bool = False) -> Iterator[None]:
        """Names what the training thread does within the block.

        Args:
            stage: In words.
            computes: True if the process reads and computes by itself for as long as that takes, without a sync point.
        """
        before, self._doing = self._doing, (stage, computes)
        try:
            yield
        finally:
            self._doing = before

    def __call__(self) -> list[Activity]:
        sync_point, step, in_epoch = self._place()
        stage, computes = self._doing
        compiles = is_compiling(self._thread_id)
        words = "compilation" if compiles else stage or ("emergency save" if in_epoch else "training")
        training = Activity(
            "training",
            f"{words} after step {step}" if step else words,
            (sync_point, stage, in_epoch, compiles),
            self._thread_id,
            computes=compiles or computes,
        )
        saving = self._snapshot()
        if saving is None or saving.state is not SnapshotState.WRITING:
            return [training]
        marks = (saving.step, saving.done_bytes)
        return [training, Activity("background save", f"background save of step {saving.step}", marks)]
