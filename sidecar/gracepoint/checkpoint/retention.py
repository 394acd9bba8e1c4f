"""Which committed steps are kept: the newest ``keep_last`` up to the one just committed or restored."""

from __future__ import annotations

import logging

from gracepoint.checkpoint import catalog, commit
from gracepoint.checkpoint.layout import Layout

logger = logging.getLogger(__name__)


def to_delete(steps: list[int], *, newest_good: int, keep_last: int) -> list[int]:
    """Returns the steps to delete.

    Args:
        steps: Complete steps of ours.
        newest_good: The step just committed or restored. Newer ones are what a restore found damaged and went
            back from: they neither count as kept, nor are they deleted.
        keep_last: How many to keep, at least 1.
    """
    return sorted((s for s in steps if s <= newest_good), reverse=True)[keep_last:]


def apply(paths: Layout, *, newest_good: int, keep_last: int, attempt: str, ordinal: int) -> None:
    """Makes trash of what ``to_delete`` says; folders that are not ours, or not complete, are left."""
    ours = [step for step in paths.steps() if catalog.is_ours(paths.step(step), step)]
    for step in to_delete(ours, newest_good=newest_good, keep_last=keep_last):
        logger.info("deleting step %d: the newest %d are kept", step, keep_last)
        commit.discard(paths.step(step), paths.trash(step, attempt, ordinal))
