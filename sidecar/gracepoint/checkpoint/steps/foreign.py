"""Recognizes checkpoints that are no steps of this directory: other names, other places, links, old formats.

A step is a folder named by its number alone. What else looks like a checkpoint is never read as one, and training must
not begin at step 0 beside it without a word.

Flax's ``flax.training.checkpoints`` wrote a checkpoint as one file of msgpack. Orbax before its version 0.4 wrote the
tree, with the values of small leaves, to a msgpack file ``checkpoint`` beside the arrays, and so did T5X. Neither has
metadata. Orbax 0.4 wrote the metadata, too, and put values into the file only where ``SaveArgs.aggregate`` asked so.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Sequence

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps.object_store.concurrent_reads import look_at
from gracepoint.checkpoint.storage.backend import Child
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointRefused

logger = logging.getLogger(__name__)

#: Part of the name of a folder that Orbax is still writing, or did not finish.
UNFINISHED = ".orbax-checkpoint-tmp"
_AGGREGATE = "checkpoint"
_MARKS = frozenset(
    (
        *(layout.MANIFEST, layout.STEP_METADATA, layout.TREE_METADATA, layout.COMMIT_SUCCESS),
        *("manifest.ocdbt", _AGGREGATE),
    )
)
_WORD = re.compile(r"checkpoint|ckpt|chkpt|step", re.IGNORECASE)
# A number alone, or behind a word that names a step, maybe with the suffix of a format of checkpoints. Only the words
# for a checkpoint may have any other before them: loops also write samples_epoch_3 and metrics_step_100.npz.
_NUMBERED = re.compile(
    r"(?:(?:.*(?:checkpoint|ckpt|chkpt)|(?:(?:global|train|model|state)[-_.]?)?"
    r"(?:(?:step|iter|iteration|epoch)[-_.=]*\d+[-_.]+)*(?:step|iter|iteration|epoch))s?[-_.= ]*)?(?P<number>\d+)"
    r"(?:\.(?:ckpt|msgpack|npz|npy|pt|pth|pkl|pickle|bin|safetensors|h5|hdf5|zarr|orbax|eqx|tar|zip))?",
    re.ASCII | re.IGNORECASE,
)
_SHOWN = 5
_MSGPACK = "If flax.training.checkpoints wrote it, it is msgpack: restore it with Flax, and save the state again"


@dataclasses.dataclass(frozen=True)
class LookAlike:
    """Something that looks like a checkpoint and is no step of its directory.

    Attributes:
        path: Where it is.
        step: The step that its name says, or the newest step in it. None: nothing says a number.
        what: What it is, and what to do, in words.
    """

    path: str
    step: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


def check(path: StoragePath) -> None:
    """Raises CheckpointRefused if there is a checkpoint in an old format at ``path``, or in its ``default`` item."""
    if path.is_value():
        raise CheckpointRefused(f"{path} is a file: expected the folder of a checkpoint. {_MSGPACK}")
    for folder in (path, path / layout.STATE_ITEM):
        if (folder / _AGGREGATE).is_value() and not (folder / layout.TREE_METADATA).is_value():
            raise CheckpointRefused(
                f"{folder} has its tree in a msgpack file, {_AGGREGATE}, as old versions of Orbax wrote it, which is "
                "not supported: restore it with Orbax (PyTreeCheckpointer), and save the state again"
            )


def refuse_aggregated(item: StoragePath, names: Sequence[str]) -> None:
    """Raises CheckpointRefused if there are ``names``: leaves of the tree in ``item`` with values in the msgpack file.

    The metadata marks them. The file is also there if no value is in it.
    """
    if names:
        raise CheckpointRefused(
            f"{item} has the values of {len(names)} leaves, as {names[0]!r}, in a msgpack file, {_AGGREGATE}, as old "
            "versions of Orbax wrote them (SaveArgs.aggregate), which is not supported: restore it with Orbax "
            "(PyTreeCheckpointer), and save the state again"
        )


def look_alikes(paths: Layout) -> list[LookAlike]:
    """Returns what looks like a checkpoint or like steps in the root, and is no step. Changes nothing."""
    found = look_at(paths.root, paths.foreign(), functools.partial(_look, paths.root))
    return [each for each in found.values() if each is not None]


def named_like_newer(paths: Layout, step: int) -> list[str]:
    """Returns what is no step of the root, and whose name says a newer step than ``step``. Looks at names only."""
    found = [paths.root / child.name for child in paths.foreign()]
    return [str(path) for path in found if (number_of(path) or 0) > step]


def refusal(root: StoragePath, found: list[LookAlike]) -> CheckpointRefused:
    """Returns the error for a start at step 0 beside ``found``."""
    shown = "; ".join(map(str, found[:_SHOWN])) + ("; ..." if len(found) > _SHOWN else "")
    return CheckpointRefused(
        f"{root} has no step that can be restored, and training from the start would leave out what looks like "
        f"checkpoints there: {shown}. A step is a folder named by its number alone, as {root / '100'}. If training is "
        f"to begin anew, give it another directory, or move these away; restore(from_=...) takes the state of another "
        f"run"
    )


@functools.cache
def warn_once(root: StoragePath) -> None:
    """Says once that a directory without steps has what looks like checkpoints."""
    if found := look_alikes(Layout(root)):
        logger.warning("%s", refusal(root, found))


def checkpoint_around(root: StoragePath) -> StoragePath | None:
    """Returns the checkpoint's folder if ``root`` is one, or an item of one. None if it is a directory of steps."""
    children = root.children()
    if (_MARKS - {_AGGREGATE}) & {child.name for child in children if not child.is_folder}:
        is_item = number_of(root) is None and number_of(root.parent) is not None
        return root.parent if is_item else root
    return root if number_of(root) is not None and _is_checkpoint(root, children) else None


def number_of(path: StoragePath) -> int | None:
    """Returns the step that the name of ``path`` says. None: it says none."""
    stem, _, _ = path.name.partition(UNFINISHED)
    match = _NUMBERED.fullmatch(stem)
    return int(match["number"]) if match else None


def _look(root: StoragePath, child: Child) -> LookAlike | None:
    path = root / child.name
    step = number_of(path)
    what: str | None = None
    if UNFINISHED in child.name:
        what = "is a save that Orbax has not finished: delete it"
    elif child.is_link:
        if step is not None or _holds_checkpoint(path):
            what = "is a symbolic link, and links are not followed: move the folder itself here"
    elif step is not None:
        what = f"is not named by a number alone: rename it to {step} if it is step {step}"
        if not child.is_folder:
            what = f"is a file: expected the folder of a checkpoint. {_MSGPACK}"
    elif child.is_folder:
        return _look_into(path)
    return None if what is None else LookAlike(str(path), step, what)


def _look_into(path: StoragePath) -> LookAlike | None:
    """Looks into a folder whose name says nothing."""
    try:
        children = path.children()
    except FileNotFoundError:
        return None  # deleted meanwhile
    except PermissionError as error:
        if not _WORD.search(path.name):
            return None  # such as lost+found, which is root's alone
        return LookAlike(str(path), None, f"cannot be read ({error}): give this process the right to read it")
    below = [path / child.name for child in children if child.is_folder or child.is_link]
    for folder in sorted(below, key=lambda each: number_of(each) or 0, reverse=True):
        if (number := number_of(folder)) is not None and _holds_checkpoint(folder):
            return LookAlike(str(path), number, f"holds steps, such as {folder.name}: give that directory")
    if _is_checkpoint(path, children):
        return LookAlike(str(path), None, "is a checkpoint: rename it to the number of its step")
    return None


def _holds_checkpoint(folder: StoragePath) -> bool:
    return folder.is_folder() and _is_checkpoint(folder, folder.children())


def _is_checkpoint(folder: StoragePath, children: list[Child]) -> bool:
    """Returns whether a folder has the marks of a checkpoint, or an item with the tree of one."""
    if _MARKS & {child.name for child in children if not child.is_folder}:
        return True
    return any((folder / child.name / layout.TREE_METADATA).is_value() for child in children if child.is_folder)
