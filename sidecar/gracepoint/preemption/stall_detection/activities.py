"""What the parts of this process do, for the stall watch.

The training thread sets the stage; the stall thread calls the object.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from gracepoint import trace
from gracepoint.preemption.stall_detection.stacks import is_compiling
from gracepoint.preemption.stall_detection.stall_detector import Activity
from gracepoint.save_progress import SaveProgress

#: Stages of a process's part of a save, in order.
_STAGES = ("", "written", "durable", "committed")
_IN_WORDS = {"written": "all written but not durable", "durable": "its part durable", "committed": "committed"}


class Activities:
    """See the module. Made in the training thread.

    Args:
        place: Returns the number of the latest sync point, the step, and whether an epoch is open.
        saving: Returns how far the background save is. None if none is under way.
        written: Returns how many bytes are written of the save that the training thread makes itself.
    """

    def __init__(
        self,
        place: Callable[[], tuple[int, int, bool]],
        saving: Callable[[], SaveProgress | None],
        written: Callable[[], int],
    ) -> None:
        self._place = place
        self._saving = saving
        self._written = written
        self._thread_id = threading.get_ident()
        self._doing = ("", False, False)  # the stage, whether it computes, and whether it saves

    @contextlib.contextmanager
    def at(self, stage: str, *, computes: bool = False, saves: bool = False) -> Iterator[None]:
        """Names what the training thread does within the block.

        Args:
            stage: In words.
            computes: True if the process reads and computes by itself for as long as that takes, without a sync point.
            saves: True if the thread saves, or waits for the background save. Each byte that is written is progress.
        """
        before, self._doing = self._doing, (stage, computes, saves)
        try:
            with trace.span(stage):
                yield
        finally:
            self._doing = before

    def __call__(self) -> list[Activity]:
        sync_point, step, in_epoch = self._place()
        stage, computes, saves = self._doing
        compiles = is_compiling(self._thread_id)
        words = "compilation" if compiles else stage or ("emergency save" if in_epoch else "training")
        saving = self._saving()
        in_background = [] if saving is None else [_background_save(saving)]
        written = (self._written(), *(save.marks for save in in_background)) if saves else ()
        training = Activity(
            "training",
            f"{words} after step {step}" if step else words,
            (sync_point, stage, in_epoch, compiles, written),
            (sync_point,),
            f"sync point {sync_point}",
            self._thread_id,
            computes=compiles or computes,
        )
        return [training, *in_background]


def _background_save(saving: SaveProgress) -> Activity:
    # Processes have parts of different sizes, so only the stages can be compared.
    done = f"{saving.done_bytes:,} of {saving.total_bytes:,} bytes written"
    return Activity(
        "background save",
        f"background save of step {saving.step}",
        (saving.step, saving.stage, saving.done_bytes),
        (saving.step, _STAGES.index(saving.stage)),
        f"step {saving.step}, {_IN_WORDS.get(saving.stage, done)}",
        saving.thread_id,
    )
