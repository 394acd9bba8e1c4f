"""Names and paths of what a folder of checkpoints holds, and nothing else.

Checkpoints of steps, in a root of their own:

<root>/
  <step>/                                    a committed checkpoint
    _CHECKPOINT_METADATA, commit_success.txt   Orbax's marks of a finished step
    _GRACEPOINT                                ours: every file of the step with its size and checksum
    done.process_<N>.json                      what process N said that it had made durable
    _GRACEPOINT_DAMAGED                        only if a restore went back from this step: why
    default/                                   the train state: Orbax's item of that name
      _METADATA, _sharding, array_metadatas/process_0, commit_success.txt
      <leaf>/.zarray, <leaf>/<chunk>             zarr2, uncompressed, one file per chunk
    host_state/                                the per-process state: an item of its own
      metadata, process_<N>.json
  <step>.gracepoint-tmp.<attempt>.<ordinal>/ a save under way, or what is left of one
  <step>.gracepoint-trash.<attempt>.<ordinal>/  being deleted
  <step>.gracepoint-aside.<attempt>.<ordinal>/  what stood where a step had to go: a foreign folder, a damaged one
  .gracepoint-lease                          which job uses the folder
  .gracepoint-throughput                     how fast saves have been
  .gracepoint-*                              probes, and marks of readers, gone in a moment

A checkpoint that has a path to itself is the train state alone, without items: what lies below ``default/`` above
lies in its own folder, with the marks, the manifest and the done-records. Its temporary folders are its siblings,
``<name>.gracepoint-tmp.<attempt>.<ordinal>`` and so on.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator

from gracepoint.checkpoint.storage.backend import Child
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import SettingsError

STEP_METADATA = "_CHECKPOINT_METADATA"
COMMIT_SUCCESS = "commit_success.txt"
MANIFEST = "_GRACEPOINT"
DAMAGE_MARK = "_GRACEPOINT_DAMAGED"
STATE_ITEM = "default"
#: In the place of an item's name where the train state is the checkpoint's own folder.
NO_ITEM = ""
HOST_STATE_ITEM = "host_state"
TREE_METADATA = "_METADATA"
SHARDING = "_sharding"
STRINGS = "_strings.json"

#: Names beside the leaves' folders, which a leaf of the state must not take as its first.
_RESERVED = frozenset(
    {
        TREE_METADATA,
        SHARDING,
        "array_metadatas",
        COMMIT_SUCCESS,
        "manifest.ocdbt",
        STRINGS,
        STEP_METADATA,
        MANIFEST,
    }
)
_ARRAY_METADATA = re.compile(r"process_\d+", re.ASCII)
_OF_A_PROCESS = re.compile(r"done\.process_\d+\.json|ocdbt\.process_\d+", re.ASCII)

_HIDDEN = ".gracepoint-"
_STEP = r"0|[1-9]\d*"
_MARK = r"\.gracepoint-(?P<mark>tmp|trash|aside)\.(?P<attempt>[\w-]+)\.(?P<ordinal>\d+)"
_ATTEMPT = re.compile(r"[\w-]{1,128}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Temporary:
    """The folder of one save that is not committed, or that was moved aside.

    Attributes:
        path: Of the folder.
        target: Its name once it is committed.
        step: That is saved; None where the checkpoint has a path to itself.
        attempt: Of the gang that saves.
        ordinal: Counts the saves of the attempt.
    """

    path: StoragePath
    target: StoragePath
    step: int | None
    attempt: str
    ordinal: int

    @property
    def what(self) -> str:
        """What is saved, in words."""
        return str(self.target) if self.step is None else f"step {self.step}"


class Layout:
    """The paths of the checkpoints below one folder: those of steps, or the one with a path to itself.

    Attributes:
        root: The folder that checkpoints and temporary folders lie in.
        item: The train state's folder below a checkpoint's; ``NO_ITEM`` where they are one.
    """

    def __init__(self, root: StoragePath, *, name: str | None = None) -> None:
        """Paths of the steps below ``root``; with ``name``, of the checkpoint ``root/name``."""
        self.root = root
        self.item = STATE_ITEM if name is None else NO_ITEM
        self._name = name
        final = _STEP if name is None else re.escape(name)
        self._final = re.compile(final, re.ASCII)
        self._marked_name = re.compile(f"(?P<final>{final}){_MARK}", re.ASCII)

    def step(self, step: int | None) -> StoragePath:
        """The folder of a committed step; of the one checkpoint there is for None."""
        return self.root / self._final_name(step)

    def temporary(self, step: int | None, attempt: str, ordinal: int) -> Temporary:
        return Temporary(self._marked(step, "tmp", attempt, ordinal), self.step(step), step, attempt, ordinal)

    def trash(self, step: int | None, attempt: str, ordinal: int) -> StoragePath:
        return self._marked(step, "trash", attempt, ordinal)

    def aside(self, step: int | None, attempt: str, ordinal: int) -> StoragePath:
        return self._marked(step, "aside", attempt, ordinal)

    def probe(self, attempt: str, process_index: int) -> StoragePath:
        return self.root / f"{_HIDDEN}probe.{attempt}.{process_index}"

    def shared_probe(self, attempt: str) -> StoragePath:
        return self.root / f"{_HIDDEN}shared.{attempt}"

    def lease(self) -> StoragePath:
        return self.root / f"{_HIDDEN}lease"

    def throughput(self) -> StoragePath:
        return self.root / f"{_HIDDEN}throughput"

    def damage_mark(self, step: int) -> StoragePath:
        return self.step(step) / DAMAGE_MARK

    def reading_mark(self, step: int) -> StoragePath:
        """A new mark of one reader."""
        return self.root / f"{_HIDDEN}reading.{step}.{secrets.token_hex(4)}"

    def reading_marks(self, step: int) -> list[StoragePath]:
        return self._named(f"{_HIDDEN}reading.{step}.")

    def hidden(self) -> list[StoragePath]:
        """Probes and marks, in use or left by a crash."""
        return [path for path in self._named(_HIDDEN) if path != self.throughput()]

    def _final_name(self, step: int | None) -> str:
        if (step is None) == (self._name is None):
            raise ValueError(f"step {step} in {self.root}: steps have numbers, and a checkpoint with a path has none")
        return str(step) if self._name is None else self._name

    def _marked(self, step: int | None, mark: str, attempt: str, ordinal: int) -> StoragePath:
        return self.root / f"{self._final_name(step)}.gracepoint-{mark}.{attempt}.{ordinal}"

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first, whatever is in it."""
        return sorted((int(name) for name in self._folders() if self._final.fullmatch(name)), reverse=True)

    def temporaries(self) -> list[Temporary]:
        """The saves that are not committed, newest step first."""
        return self._marked_folders("tmp")

    def set_aside(self) -> list[Temporary]:
        """The folders that were moved out of the way, newest step first."""
        return self._marked_folders("aside")

    def trashed(self) -> list[StoragePath]:
        return [path for path, _ in self._matches("trash")]

    def strangers(self) -> list[str]:
        """Names of what is none of all these and not hidden, links among them: they are never followed."""
        return sorted(
            child.name for child in self.root.children() if not child.name.startswith(".") and not self._is_ours(child)
        )

    def _is_ours(self, child: Child) -> bool:
        """Returns whether ``child`` is a folder of ours, or was one: others rename and delete meanwhile."""
        if not (self._final.fullmatch(child.name) or self._marked_name.fullmatch(child.name)):
            return False
        return not child.is_link and (child.is_folder or not (self.root / child.name).exists())

    def _marked_folders(self, mark: str) -> list[Temporary]:
        found = []
        for path, match in self._matches(mark):
            step = None if self._name else int(match["final"])
            found.append(Temporary(path, self.step(step), step, match["attempt"], int(match["ordinal"])))
        return sorted(found, key=lambda t: (t.step or 0, t.ordinal, t.attempt), reverse=True)

    def _matches(self, mark: str) -> Iterator[tuple[StoragePath, re.Match[str]]]:
        for name in self._folders():
            match = self._marked_name.fullmatch(name)
            if match and match["mark"] == mark:
                yield self.root / name, match

    def _folders(self) -> list[str]:
        return [child.name for child in self._children() if child.is_folder]

    def _named(self, prefix: str) -> list[StoragePath]:
        return [self.root / child.name for child in self._children() if child.name.startswith(prefix)]

    def _children(self) -> list[Child]:
        try:
            return self.root.children()
        except FileNotFoundError:
            return []


def checked_attempt(attempt: str) -> str:
    """Returns ``attempt`` if it can be part of a folder's name."""
    if not _ATTEMPT.fullmatch(attempt):
        raise SettingsError(
            f"attempt {attempt!r}: expected 1 to 128 letters, digits, '-' or '_', as it names temporary folders"
        )
    return attempt


def is_reserved(name: str) -> bool:
    """True if a leaf's folder must not have ``name``, as there may be a file of that name beside it."""
    return name in _RESERVED or _OF_A_PROCESS.fullmatch(name) is not None


def in_item(item: str, name: str) -> str:
    """Returns the path below a checkpoint's folder of ``name`` in one of its items."""
    return f"{item}/{name}" if item else name


def array_metadata_files(item: StoragePath) -> list[StoragePath]:
    """Returns the files that ``array_metadata`` names, of all processes.

    TensorStore writes each under another name first, which a crash may leave there.
    """
    folder = item / "array_metadatas"
    try:
        return sorted(folder / child.name for child in folder.children() if _ARRAY_METADATA.fullmatch(child.name))
    except FileNotFoundError:
        return []


def array_metadata(process_index: int) -> str:
    return f"array_metadatas/process_{process_index}"


def done_record(process_index: int) -> str:
    return f"done.process_{process_index}.json"


def host_state_file(process_index: int) -> str:
    return f"{HOST_STATE_ITEM}/process_{process_index}.json"
