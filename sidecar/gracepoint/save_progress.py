"""How far a save in the background is, for those who watch it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SaveProgress:
    """A background save that is under way in this process.

    Attributes:
        step: Its step.
        stage: The stage that this process's part has reached: "", "written", "durable" or "committed".
        done_bytes: Bytes of this process's part that are written.
        total_bytes: Bytes of this process's part.
        thread_id: Python's identifier of the thread that saves. None if it has not started.
    """

    step: int
    stage: str
    done_bytes: int
    total_bytes: int
    thread_id: int | None
