"""What a checkpoint directory has to offer: the steps that can be restored, and in words why others cannot.

Also waits for saves of a previous attempt that is still writing. Only the process that lists looks here
(process 0); the others are told.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit, recovery
from gracepoint.checkpoint.storage.checks import must_not_write
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew

#: A save in which nothing has changed for so long has no living writer.
QUIET_S = 5.0
_POLL_S = 0.1
_UNFINISHED = ".orbax-checkpoint-tmp"  # is in the name of what Orbax still writes


@dataclasses.dataclass(frozen=True)
class Listing:
    """What process 0 found.

    Attributes:
        steps: Steps whose folders look complete, newest first; those that a newer Gracepoint wrote are among them.
        refused: Folders named like a step that are no complete checkpoint, each with the reason.
        remarks: What else was seen that somebody who misses a checkpoint wants to know.
    """

    steps: tuple[int, ...]
    refused: tuple[str, ...]
    remarks: tuple[str, ...]

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Listing:
        return cls(**{key: tuple(value) for key, value in json.loads(text).items()})


def list_steps(paths: Layout, *, attempt: str, deadline: Deadline, sleep: Callable[[float], object]) -> Listing:
    """Salvages what can be salvaged, waits for what is still being written, and lists what is there then.

    A save of another attempt that is newer than all complete steps and still incomplete is waited for while
    it changes (nothing in it has changed for ``QUIET_S``: its writer is dead), at the longest until
    ``deadline``.
    """
    if not paths.root.is_folder():
        return Listing((), (), (f"there is no folder {paths.root}",))
    remarks = settle(
        paths,
        attempt=attempt,
        is_wanted=lambda step: step is not None and step > max(complete_steps(paths), default=-1),
        deadline=deadline,
        sleep=sleep,
    )
    steps, refused = _sort_out(paths)
    if strangers := paths.strangers():
        remarks.append(f"{paths.root} also has {', '.join(strangers[:5])}{' ...' if len(strangers) > 5 else ''}")
    return Listing(tuple(steps), tuple(refused), tuple(remarks))


def settle(
    paths: Layout,
    *,
    attempt: str,
    is_wanted: Callable[[int | None], bool],
    deadline: Deadline,
    sleep: Callable[[float], object],
) -> list[str]:
    """Salvages what can be salvaged, and waits for what other attempts are still writing; returns remarks, in words.

    Where this process may only read, it cannot tell what is still being written, and waits for nothing.

    Args:
        paths: Where.
        attempt: This one, whose saves are not waited for.
        is_wanted: Whether a save of a step that is still incomplete is worth waiting for.
        deadline: Until when, at the longest.
        sleep: Waits.
    """
    while True:
        others = [t for t in paths.temporaries() if t.attempt != attempt]
        unknown, live = [], []
        try:
            live = [t for t in others if is_wanted(t.step) and _is_live(paths, t)]
        except OSError as error:
            if not must_not_write(error):
                raise
            unknown = [f"what others are still writing in {paths.root} cannot be told: {error}"]
        # After that look: what its writer has finished since then is committed by one of us.
        remarks = recovery.salvage(paths)
        live = [t for t in live if t.path.is_folder()]
        if not live or deadline.passed():
            late = [f"{t.path} was still being written when the time to wait for it was over" for t in live]
            return remarks + unknown + late
        sleep(min(_POLL_S, deadline.remaining_s()))


def complete_steps(paths: Layout) -> list[int]:
    """Returns the steps whose folders look complete, oldest first."""
    return sorted(step for step in paths.steps() if why_not(paths.step(step), step) is None)


def why_not(folder: StoragePath, step: int) -> str | None:
    """Returns why ``folder`` is no complete checkpoint of ``step``, or None if it looks like one.

    One that a newer Gracepoint wrote does, though it cannot be read: it is not passed over in silence.
    """
    try:
        manifest = commit.manifest_fields(folder)
    except CheckpointTooNew:
        return None
    except CheckpointCorrupt as error:
        return str(error)
    if manifest is not None:
        if manifest["step"] != step:
            return f"{folder} holds step {manifest['step']}"
        return None
    try:
        if not folder.children():
            return f"{folder} is empty"
    except FileNotFoundError:
        return f"{folder} went away while it was looked at"
    if not (folder / layout.STATE_ITEM / layout.TREE_METADATA).is_value():
        return (
            f"{folder} is not a checkpoint: it has neither {layout.MANIFEST} (Gracepoint's) nor "
            f"{layout.STATE_ITEM}/{layout.TREE_METADATA} (Orbax's, in an item named {layout.STATE_ITEM!r})"
        )
    if not finished_by_orbax(folder):
        return f"{folder} was written by Orbax, and not finished"
    return None


def is_ours(folder: StoragePath, step: int) -> bool:
    """True if ``folder`` is a complete checkpoint of ``step`` that Gracepoint wrote, in a format known here."""
    try:
        manifest = commit.manifest_fields(folder)
    except (CheckpointCorrupt, CheckpointTooNew):
        return False
    return manifest is not None and manifest["step"] == step


def _sort_out(paths: Layout) -> tuple[list[int], list[str]]:
    steps, refused = [], []
    for step in paths.steps():
        reason = why_not(paths.step(step), step)
        if reason is None:
            steps.append(step)
        elif paths.step(step).is_folder():  # else it was deleted meanwhile
            refused.append(reason)
    return steps, refused


def _is_live(paths: Layout, temporary: Temporary) -> bool:
    try:
        if commit.done_records(temporary.path) is not None:
            return False  # all have finished, and yet it was not salvaged
    except CheckpointCorrupt:
        return False  # it can never become complete
    except CheckpointTooNew:
        pass  # its own version may be at it still
    age_s = paths.root.now_s() - temporary.path.last_change_s()
    return age_s < QUIET_S


def finished_by_orbax(folder: StoragePath) -> bool:
    """True unless a mark, or its name, says that Orbax has not finished the checkpoint in ``folder``.

    Orbax makes its marks before it gives the folder its final name. Older versions, and its handlers by themselves,
    make none: then the name counts, and what is missing is found when arrays are opened.
    """
    if _UNFINISHED in folder.name or ((folder.parent / layout.STEP_METADATA).is_value() and _unfinished(folder.parent)):
        return False
    return not _unfinished(folder)


def _unfinished(folder: StoragePath) -> bool:
    """True if there is a mark of Orbax's that a finished checkpoint has filled in."""
    if (folder / layout.COMMIT_SUCCESS).is_value():
        return False
    try:
        metadata = json.loads((folder / layout.STEP_METADATA).read_bytes())
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return not isinstance(metadata, dict) or metadata.get("commit_timestamp_nsecs") is None
