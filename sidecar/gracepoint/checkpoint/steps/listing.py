"""Lists a checkpoint directory: the steps that can be restored, and the reasons why others cannot.

Also waits for saves that a previous attempt is still writing. Only process 0 lists the directory, and sends the other
processes what it found.

A step is a folder named by its number alone. What else looks like a checkpoint, by its name, its place, as a link or in
an old format, is never read as one. But training must not begin at step 0 next to it without a warning.

Flax's ``flax.training.checkpoints`` wrote a checkpoint as one file of msgpack. Orbax before its version 0.4 wrote the
tree, with the values of small leaves, to a msgpack file ``checkpoint`` next to the arrays, and so did T5X. Neither has
metadata. Orbax 0.4 wrote the metadata, too, and put values into the file only where ``SaveArgs.aggregate`` asked so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence

from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.checks import must_not_write
from gracepoint.checkpoint.storage.storage_path import Child, StoragePath, look_at
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointRefused, CheckpointTooNew

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
        what: What it is, and what to do, as text.
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
    by_path = look_at(paths.root, paths.foreign(), functools.partial(_look_alike, paths.root))
    return [each for each in by_path.values() if each is not None]


def named_like_newer(paths: Layout, step: int) -> list[str]:
    """Returns what is no step of the root, and whose name says a newer step than ``step``. Looks at names only."""
    paths_there = [paths.root / child.name for child in paths.foreign()]
    return [str(path) for path in paths_there if (number_of(path) or 0) > step]


def refusal(root: StoragePath, look_alikes: list[LookAlike]) -> CheckpointRefused:
    """Returns the error for a start at step 0 beside ``look_alikes``."""
    shown = "; ".join(map(str, look_alikes[:_SHOWN])) + ("; ..." if len(look_alikes) > _SHOWN else "")
    return CheckpointRefused(
        f"{root} has no step that can be restored, and training from the start would leave out what looks like "
        f"checkpoints there: {shown}. A step is a folder named by its number alone, as {root / '100'}. If training is "
        f"to begin anew, give it another directory, or move these away; restore(from_=...) takes the state of another "
        f"run"
    )


@functools.cache
def warn_once(root: StoragePath) -> None:
    """Says once that a directory without steps has what looks like checkpoints."""
    if others := look_alikes(Layout(root)):
        logger.warning("%s", refusal(root, others))


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


def _look_alike(root: StoragePath, child: Child) -> LookAlike | None:
    path = root / child.name
    step = number_of(path)
    problem: str | None = None
    if UNFINISHED in child.name:
        problem = "is a save that Orbax has not finished: delete it"
    elif child.is_link:
        if step is not None or _holds_checkpoint(path):
            problem = "is a symbolic link, and links are not followed: move the folder itself here"
    elif step is not None:
        problem = f"is not named by a number alone: rename it to {step} if it is step {step}"
        if not child.is_folder:
            problem = f"is a file: expected the folder of a checkpoint. {_MSGPACK}"
    elif child.is_folder:
        return _look_into(path)
    return None if problem is None else LookAlike(str(path), step, problem)


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


_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Listing:
    """What process 0 found.

    Attributes:
        steps: Steps whose folders look complete, newest first. Includes steps that a newer Gracepoint wrote.
        refused: For each folder that is named like a step and is not a complete checkpoint, its path and the reason.
        remarks: Other findings that explain why a checkpoint may be missing.
        standing: Identifiers (``Commit.standing``) of the ``steps`` whose manifest this version can read.
        look_alikes: What looks like a checkpoint and is no step, if there are no steps.
    """

    steps: tuple[int, ...]
    refused: tuple[str, ...]
    remarks: tuple[str, ...]
    standing: Mapping[int, str] = dataclasses.field(default_factory=dict)
    look_alikes: tuple[LookAlike, ...] = ()

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Listing:
        fields = json.loads(text)
        standing = {int(step): identifier for step, identifier in fields.pop("standing").items()}
        look_alikes = tuple(LookAlike(**each) for each in fields.pop("look_alikes"))
        return cls(**{k: tuple(value) for k, value in fields.items()}, standing=standing, look_alikes=look_alikes)


def list_steps(
    paths: Layout,
    *,
    attempt: str,
    deadline: Deadline,
    sleep: Callable[[float], object],
    holds_lease: bool = False,
) -> Listing:
    """Salvages durable saves, waits for saves that are still being written, and then lists the steps.

    Waits for an incomplete save of another attempt if it is newer than all complete steps. The wait ends when the save
    has not changed for ``Commit.quiet_s`` seconds, as its writer is then dead, and at ``deadline`` at the latest.
    ``holds_lease``: see ``settle``.

    Raises:
        CheckpointRefused: The directory is the folder of one step.
    """
    way = commit.of(paths)
    layout_seen = way.seen()
    if layout_seen is None:
        return _no_folder(paths)
    remarks: list[str] = []
    if not way.is_settled(layout_seen):
        remarks = settle(
            paths,
            attempt=attempt,
            awaited=functools.partial(_newer_than_complete, paths),
            deadline=deadline,
            sleep=sleep,
            holds_lease=holds_lease,
        )
        layout_seen = way.seen() or paths
    listing = _sort_out(layout_seen)
    remarks += listing.remarks
    if names := [child.name for child in layout_seen.foreign()]:
        remarks.append(f"{paths.root} also has {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    return dataclasses.replace(listing, remarks=tuple(remarks), look_alikes=_look_alikes(layout_seen, listing))


def _look_alikes(paths: Layout, listing: Listing) -> tuple[LookAlike, ...]:
    """Returns what looks like a checkpoint, if there is nothing else to restore. Names of newer ones are logged.

    Raises:
        CheckpointRefused: The directory is the folder of one step.
    """
    if listing.steps:
        if newer := named_like_newer(paths, listing.steps[0]):
            logger.error(
                "%s are named like newer steps than %d, and are not restored: a step is a folder whose name is its "
                "number alone",
                ", ".join(newer[:5]),
                listing.steps[0],
            )
        return ()
    if listing.refused:
        return ()
    if (checkpoint := checkpoint_around(paths.root)) is not None:
        problem = "is the folder of one step" if checkpoint == paths.root else "is in the folder of one step"
        raise CheckpointRefused(f"{paths.root} {problem}; give the directory of the steps, {checkpoint.parent}")
    return tuple(look_alikes(paths))


def complete_listing(paths: Layout) -> Listing:
    """Lists the steps of a directory that may only be read. Nothing is salvaged, and no save is waited for."""
    layout_seen = commit.of(paths).seen()
    return _no_folder(paths) if layout_seen is None else _sort_out(layout_seen)


def _no_folder(paths: Layout) -> Listing:
    return Listing((), (), (f"there is no folder {paths.root}",))


def settle(
    paths: Layout,
    *,
    attempt: str,
    awaited: Callable[[list[Temporary]], list[Temporary]],
    deadline: Deadline,
    sleep: Callable[[float], object],
    holds_lease: bool = False,
) -> list[str]:
    """Salvages durable saves, and waits for saves that other attempts are still writing. Returns remarks.

    If this process may only read the directory, it cannot find out what is still being written, and does not wait.

    Args:
        paths: Layout of the directory.
        attempt: The current attempt. Its own saves are not waited for.
        awaited: Is given the incomplete saves. Returns those to wait for, if another process still writes them.
        deadline: When the wait must have ended.
        sleep: Waits for a number of seconds.
        holds_lease: Whether this process holds the lease, so that it can write. A refused write is then raised.
    """
    way, quiet = commit.of(paths), _QuietTimes(paths, deadline.clock)
    while True:
        others = [t for t in paths.temporaries() if t.attempt != attempt]
        unknown, live = [], []
        try:
            live = [t for t in awaited(others) if _is_live(t, quiet)] if others else []
        except OSError as error:
            if holds_lease or not must_not_write(error):
                raise
            unknown = [f"what others are still writing in {paths.root} cannot be told: {error}"]
        # Salvage comes after the check: if the writer finished in between, the writer or this salvage commits the save.
        remarks = commit.salvage(paths, holds_lease=holds_lease)
        live = [t for t in live if t.path.is_folder() and not way.is_committed(t)]
        if not live or deadline.passed():
            late = [f"{t.path} was still being written when the time to wait for it was over" for t in live]
            return remarks + unknown + late
        sleep(min(max(_POLL_S, paths.root.look_every_s), deadline.remaining_s()))


def complete_steps(paths: Layout) -> list[int]:
    """Returns the steps whose folders look complete, oldest first."""
    return sorted(step for step, (reason, _) in _looks(paths).items() if reason is None)


def steps_for_users(paths: Layout) -> list[int]:
    """Returns ``complete_steps``. If there are none, says once what else looks like a checkpoint.

    Raises:
        CheckpointRefused: The root is a file.
    """
    if paths.root.is_value():
        raise CheckpointRefused(f"{paths.root} is a file: expected the directory of the steps")
    if not (steps := complete_steps(paths)):
        warn_once(paths.root)
    return steps


def _looks(paths: Layout) -> dict[int, tuple[str | None, str]]:
    """Returns ``_look`` of all steps, newest first."""
    return look_at(paths.root, paths.steps(), functools.partial(_look, paths))


def _newer_than_complete(paths: Layout, saves: list[Temporary]) -> list[Temporary]:
    newest = max(complete_steps(paths), default=-1)
    return [save for save in saves if save.step is not None and save.step > newest]


def why_not(paths: Layout, step: int) -> str | None:
    """Returns why the folder of ``step`` is not a complete checkpoint of it. None if it looks like one.

    A checkpoint that a newer Gracepoint wrote counts as complete, though this version cannot read it. So a restore
    reports it.
    """
    return _look(paths, step)[0]


def _look(paths: Layout, step: int) -> tuple[str | None, str]:
    """Returns ``why_not``, and the checkpoint's identifier (``Commit.standing``). Empty if no manifest says it."""
    folder = paths.step(step)
    try:
        manifest = records.manifest_fields(folder)
    except CheckpointTooNew:
        return None, ""
    except CheckpointCorrupt as error:
        return str(error), ""
    if manifest is None:
        return _why_not_of_orbax(paths, folder), ""
    if manifest["step"] != step:
        return f"{folder} holds step {manifest['step']}", ""
    return None, records.identifier(manifest)


def _why_not_of_orbax(paths: Layout, folder: StoragePath) -> str | None:
    """Returns why a folder without a manifest is not a complete checkpoint of Orbax. None if it looks like one."""
    if commit.of(paths).is_unfinished(folder):
        return f"{folder} is being written or deleted, or was left so"
    try:
        check(folder)
        if not folder.children():
            return f"{folder} is empty"
    except CheckpointRefused as error:
        return str(error)
    except FileNotFoundError:
        return f"{folder} went away while it was looked at"
    if lost := lost_manifest(folder):
        return lost
    if state_item(folder, paths.item) is None:
        several = len(trees_of_orbax(folder)) > 1
        return (
            f"{folder} is not a checkpoint: it has neither {layout.MANIFEST} (Gracepoint's) nor "
            f"{paths.item}/{layout.TREE_METADATA} (Orbax's, in an item named {paths.item!r}"
            + (", and several other items with a tree)" if several else ")")
        )
    if not finished_by_orbax(folder):
        return f"{folder} was written by Orbax, and not finished"
    return None


def steps_instead(folder: StoragePath) -> str:
    """Returns a hint for errors: ``folder`` holds steps, and one of them was expected. Empty if it holds none."""
    steps = complete_steps(Layout(folder)) if folder.is_folder() else []
    return f". It has the steps of a run: give one of them, as {folder / str(steps[-1])}" if steps else ""


def lost_manifest(folder: StoragePath) -> str | None:
    """Returns why a folder without a manifest is not complete: it holds a part of one of Gracepoint's.

    None if Gracepoint did not write it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if signs := records.signs_of_ours(folder, [child.name for child in folder.children()]):
            return (
                f"{folder} is not complete: {signs[0]} shows that Gracepoint wrote it, but it has no "
                f"{layout.MANIFEST}. If a copy of it was broken off, copy it again"
            )
    return None


def state_item(folder: StoragePath, preferred: str = layout.STATE_ITEM) -> str | None:
    """Returns the name of the item that holds the train state of a step that Orbax wrote.

    It is ``preferred``, or else the only item with a tree of arrays. None if there is no such item.
    """
    if (folder / preferred / layout.TREE_METADATA).is_value():
        return preferred
    trees = trees_of_orbax(folder)
    return trees[0] if len(trees) == 1 else None


def trees_of_orbax(folder: StoragePath) -> list[str]:
    """Returns the names of the items of a step that hold a tree of arrays, sorted."""
    try:
        names = sorted(child.name for child in folder.children() if child.is_folder)
    except FileNotFoundError:
        return []
    return [name for name in names if (folder / name / layout.TREE_METADATA).is_value()]


def is_ours(folder: StoragePath, step: int) -> bool:
    """Returns whether ``folder`` is a complete checkpoint of ``step`` that Gracepoint wrote, in a known format."""
    return ours(folder, step) is not None


def ours(folder: StoragePath, step: int) -> str | None:
    """Returns the identifier of the checkpoint in ``folder`` (``Commit.standing``). None if ``is_ours`` is False."""
    try:
        manifest = records.manifest_fields(folder)
    except (CheckpointCorrupt, CheckpointTooNew):
        return None
    return records.identifier(manifest) if manifest is not None and manifest["step"] == step else None


def _sort_out(paths: Layout) -> Listing:
    """Returns the complete steps, why other folders are no checkpoints, and remarks on steps that are not finished."""
    steps: list[int] = []
    refused: list[str] = []
    unfinished: list[str] = []
    standing: dict[int, str] = {}
    for step, (reason, identifier) in _looks(paths).items():
        if reason is None:
            steps.append(step)
            if identifier:
                standing[step] = identifier
        elif commit.of(paths).is_unfinished(paths.step(step)):
            unfinished.append(reason)
        elif paths.step(step).is_folder():  # otherwise it was deleted meanwhile
            refused.append(reason)
    return Listing(tuple(steps), tuple(refused), tuple(unfinished), standing)


class _QuietTimes:
    """How long nothing of each save has changed.

    The storage's clock tells that at the first look. If a host's clock was wrong, a save may be dated later than now.
    So time also counts from the first look, by this process's own clock.

    Args:
        paths: Layout of the directory.
        clock: Returns monotonic seconds.
    """

    def __init__(self, paths: Layout, clock: Callable[[], float]) -> None:
        self._paths = paths
        self._clock = clock
        self._seen: dict[StoragePath, tuple[float, float]] = {}  # its last change, and since when it was the last
        self._commit = commit.of(paths)

    def counts_as_dead(self, temporary: Temporary) -> bool:
        """Returns whether its writer counts as dead. Logs the first time that it does not."""
        changed_s = self._commit.last_change_s(temporary)
        age_s = self._paths.root.now_s() - changed_s
        if age_s >= self._commit.quiet_s:
            return True
        is_new = temporary.path not in self._seen
        before_s, since_s = self._seen.setdefault(temporary.path, (changed_s, self._clock()))
        if is_new:
            ahead = f", though it is dated {-age_s:.0f} s ahead of the storage's clock" if age_s < -1.0 else ""
            logger.warning(
                "%s is incomplete, and another process may still be writing it: waiting until nothing of it has "
                "changed for %g s%s",
                temporary.path,
                self._commit.quiet_s,
                ahead,
            )
        elif changed_s != before_s:
            self._seen[temporary.path] = (changed_s, self._clock())
            return False
        return self._clock() - since_s >= self._commit.quiet_s


def _is_live(temporary: Temporary, quiet: _QuietTimes) -> bool:
    """Returns whether a process may still be writing a save."""
    try:
        if records.done_records(temporary.path) is not None:
            return False  # all processes have finished, and salvage did not commit it
    except CheckpointCorrupt:
        return False  # it can never become complete
    except CheckpointTooNew:
        pass  # a process of the newer version may still be writing it
    return not quiet.counts_as_dead(temporary)


def finished_by_orbax(folder: StoragePath) -> bool:
    """Returns False if a marker file, or the folder's name, shows that Orbax has not finished the checkpoint.

    Orbax writes its marker files before it gives the folder its final name. Older versions of Orbax, and its handlers
    when they are used alone, write none. Then only the name counts, and missing files are found when arrays are opened.
    """
    if UNFINISHED in folder.name or ((folder.parent / layout.STEP_METADATA).is_value() and _unfinished(folder.parent)):
        return False
    return not _unfinished(folder)


def _unfinished(folder: StoragePath) -> bool:
    """Returns whether Orbax's step metadata in ``folder`` has no commit time, and there is no success marker."""
    if (folder / layout.COMMIT_SUCCESS).is_value():
        return False
    try:
        metadata = json.loads((folder / layout.STEP_METADATA).read_bytes())
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return not isinstance(metadata, dict) or metadata.get("commit_timestamp_nsecs") is None
