"""Names and paths of everything in a folder of checkpoints.

Checkpoints of steps, below a separate root:

<root>/
  <step>/                                    a committed checkpoint
    _CHECKPOINT_METADATA, commit_success.txt   Orbax's marks of a finished step
    _GRACEPOINT                                Gracepoint's manifest: every file of the step with size and checksum
    done.process_<N>.json                      done-record: what process N has made durable
    _GRACEPOINT.process_<N>                    part of the manifest: the chunks of process N; only if there are many
    _GRACEPOINT_CHUNK_WRITERS                  which process wrote each chunk; only with such parts
    _GRACEPOINT_DAMAGED                        why a restore skipped this step; only if one did
    _GRACEPOINT_MORE_METADATA                  custom metadata, and the handlers of other items; only if there are some
    _GRACEPOINT_NOTE                           for which preemption the step was saved; only in such steps
    default/                                   the train state: Orbax's item of that name
      _METADATA, _sharding, array_metadatas/process_0, commit_success.txt
      _strings.json                              the leaves that are strings; only if there are some
      <leaf>/.zarray, <leaf>/<chunk>             by default: zarr2, uncompressed, one file per chunk
      manifest.ocdbt, d/, ocdbt.process_<N>/     in OCDBT, in place of these: the merged tree, the tree of each process
    host_state/                                the per-process state, a separate item
      metadata, process_<N>.json
    <item>/                                    an item that a handler of the user's wrote
  <step>.gracepoint-tmp.<attempt>.<ordinal>/ a save in progress, or the remains of one
  <step>.gracepoint-trash.<attempt>.<ordinal>/  being deleted
  <step>.gracepoint-aside.<attempt>.<ordinal>/  a foreign folder or a damaged step that was moved aside for a step
  .compiled-programs/                        compiled programs (JAX's persistent cache)
  .gracepoint-lease                          the job that uses the folder
  .gracepoint-throughput                     the measured throughput of saves
  .gracepoint-*                              probes and marks of readers, which are short-lived

In a store that cannot rename, the objects of a save lie below ``<step>/`` from the beginning, unless another save
stands there. The step is committed when ``_GRACEPOINT`` is a manifest and not a claim (``steps.object_steps``). The
done-records stay in the folder of the save, ``<step>.gracepoint-tmp.<attempt>.<ordinal>/``.

A checkpoint that has its own path is the train state alone, without items. Its folder holds the contents of
``default/`` above, and also the marks, the manifest and the done-records. Its temporary folders are its siblings:
``<name>.gracepoint-tmp.<attempt>.<ordinal>`` and so on.

Claims, manifests and the other JSON files name their format, and carry a checksum of their own bytes (``seal``).
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from gracepoint.checkpoint.storage.storage_path import Child, StoragePath
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew, SettingsError

STEP_METADATA = "_CHECKPOINT_METADATA"
COMMIT_SUCCESS = "commit_success.txt"
MANIFEST = "_GRACEPOINT"
DAMAGE_MARK = "_GRACEPOINT_DAMAGED"
STATE_ITEM = "default"
#: Used as the item's name if the train state is in the checkpoint's own folder.
NO_ITEM = ""
HOST_STATE_ITEM = "host_state"
#: What Orbax's metadata of this checkpoint has in addition. Only if there is something to add.
MORE_METADATA = "_GRACEPOINT_MORE_METADATA"
#: A text that the saving job leaves for the job that restores the step. Only if there is one.
NOTE = "_GRACEPOINT_NOTE"
#: Which process wrote each chunk. Only if the manifest is in parts.
CHUNK_WRITERS = "_GRACEPOINT_CHUNK_WRITERS"
TREE_METADATA = "_METADATA"
SHARDING = "_sharding"
STRINGS = "_strings.json"

#: Names of files next to the leaves' folders. The first part of a leaf's name must not be one of them.
_RESERVED = frozenset(
    {
        *(TREE_METADATA, SHARDING, "array_metadatas", COMMIT_SUCCESS, "manifest.ocdbt", STRINGS),
        *(STEP_METADATA, MANIFEST, MORE_METADATA, NOTE, CHUNK_WRITERS),
    }
)
_ARRAY_METADATA = re.compile(r"process_\d+", re.ASCII)
_OF_A_PROCESS = re.compile(
    r"done\.process_\d+\.json|_GRACEPOINT\.process_\d+|ocdbt\.process_\d+(\.[0-9a-f]+)?", re.ASCII
)

_SIGN = re.compile(r"done\.process_\d+\.json|_GRACEPOINT\.process_\d+", re.ASCII)
_OF_OCDBT = re.compile(r"manifest\.ocdbt$|d/[0-9a-f]+$|ocdbt\.process_\d+(\.[0-9a-f]+)?/", re.ASCII)
_PARTLY_WRITTEN = re.compile(r"\.__lock$|\.partial-[0-9a-f]+$", re.ASCII)

_HIDDEN = ".gracepoint-"
_STEP = r"0|[1-9]\d*"
_MARK = r"\.gracepoint-(?P<mark>tmp|trash|aside)\.(?P<attempt>[\w-]+)\.(?P<ordinal>\d+)"
_ATTEMPT = re.compile(r"[\w-]{1,128}", re.ASCII)
_ITEM = re.compile(r"(?!\.)[\w.-]{1,128}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Temporary:
    """The folder of a save that is not committed, or a folder that was moved aside.

    Attributes:
        path: Location of the folder.
        target: Location of the checkpoint once it is committed.
        step: The step that is saved. None if the checkpoint has its own path.
        attempt: The attempt of the job that saves.
        ordinal: Number of the save within the attempt.
    """

    path: StoragePath
    target: StoragePath
    step: int | None
    attempt: str
    ordinal: int

    @property
    def trash(self) -> StoragePath:
        """What is deleted in favour of this save."""
        return self.target.with_name(f"{self.target.name}.gracepoint-trash.{self.attempt}.{self.ordinal}")

    @property
    def what(self) -> str:
        """Describes what is saved, for messages."""
        return str(self.target) if self.step is None else f"step {self.step}"


class Layout:
    """The paths of the checkpoints below one folder: those of steps, or a single checkpoint with its own path.

    Attributes:
        root: The folder that contains checkpoints and temporary folders.
        item: Name of the train state's folder below the checkpoint's folder. ``NO_ITEM`` if they are the same folder.
    """

    def __init__(
        self,
        root: StoragePath,
        *,
        name: str | None = None,
        item: str = STATE_ITEM,
        listing: list[Child] | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        """Makes the layout of the steps below ``root``, with the train state in their item ``item``.

        With ``name``, makes the layout of the checkpoint ``root/name``, which has no items. ``listing`` is a listing of
        the root. None: the root is listed again each time. ``names`` has the folders of steps of another run whose
        names are not their numbers; such a layout is only read.
        """
        self.root = root
        self.item = item if name is None else NO_ITEM
        self._name = name
        final = _STEP if name is None else re.escape(name)
        self._final = re.compile(final, re.ASCII)
        self._marked_name = re.compile(f"(?P<final>{final}){_MARK}", re.ASCII)
        self._seen = listing
        self._names = names or {}

    def seen(self) -> Layout:
        """Returns this layout as it is now. All its methods that need a listing of the root use the same one.

        Raises:
            FileNotFoundError: There is no root.
        """
        return Layout(self.root, name=self._name, item=self.item, listing=self.root.children(), names=self._names)

    def step(self, step: int | None) -> StoragePath:
        """Returns the folder of a committed step. If ``step`` is None, that of the single checkpoint."""
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
        """Returns a new path for the mark of one reader."""
        return self.root / f"{_HIDDEN}reading.{step}.{secrets.token_hex(4)}"

    def reading_marks(self, step: int) -> list[StoragePath]:
        return self._named(f"{_HIDDEN}reading.{step}.")

    def hidden(self) -> list[StoragePath]:
        """Returns the lease, probes and marks, which are in use or were left by a crash. Not the throughput.

        Also such files, the throughput among them, that were partly written when their process ended.
        """
        return [path for path in self._named(_HIDDEN) if path != self.throughput()] + self._named(f".{_HIDDEN}")

    def _final_name(self, step: int | None) -> str:
        if (step is None) == (self._name is None):
            raise ValueError(f"step {step} in {self.root}: steps have numbers, and a checkpoint with a path has none")
        return self._name or self._names.get(step or 0) or str(step)

    def _marked(self, step: int | None, mark: str, attempt: str, ordinal: int) -> StoragePath:
        return self.root / f"{self._final_name(step)}.gracepoint-{mark}.{attempt}.{ordinal}"

    def steps(self) -> list[int]:
        """Returns the steps that have a folder, newest first. The contents of the folders are not checked."""
        return sorted((int(name) for name in self._folders() if self._final.fullmatch(name)), reverse=True)

    def temporaries(self) -> list[Temporary]:
        """Returns the saves that are not committed, newest step first."""
        return self._marked_folders("tmp")

    def set_aside(self) -> list[Temporary]:
        """Returns the folders that were moved aside, newest step first."""
        return self._marked_folders("aside")

    def trashed(self) -> list[StoragePath]:
        return [path for path, _ in self._matches("trash")]

    def foreign(self) -> list[Child]:
        """Returns what is in the root and neither hidden nor known, by name, links included. No link is followed."""
        children = [child for child in self._children() if not child.name.startswith(".") and not self._is_ours(child)]
        return sorted(children, key=lambda child: child.name)

    def _is_ours(self, child: Child) -> bool:
        """Returns whether ``child`` is or was a folder of Gracepoint. Others may rename or delete it meanwhile."""
        if not (self._final.fullmatch(child.name) or self._marked_name.fullmatch(child.name)):
            return False
        return not child.is_link and (child.is_folder or not (self.root / child.name).exists())

    def _marked_folders(self, mark: str) -> list[Temporary]:
        temporaries = []
        for path, match in self._matches(mark):
            step = None if self._name else int(match["final"])
            temporaries.append(Temporary(path, self.step(step), step, match["attempt"], int(match["ordinal"])))
        return sorted(temporaries, key=lambda t: (t.step or 0, t.ordinal, t.attempt), reverse=True)

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
        if self._seen is not None:
            return self._seen
        try:
            return self.root.children()
        except FileNotFoundError:
            return []


def checked_attempt(attempt: str) -> str:
    """Returns ``attempt`` if it can be part of a folder's name, else raises SettingsError."""
    if not _ATTEMPT.fullmatch(attempt):
        raise SettingsError(
            f"attempt {attempt!r}: expected 1 to 128 letters, digits, '-' or '_', as it names temporary folders"
        )
    return attempt


def is_reserved(name: str) -> bool:
    """True if a leaf's folder must not have ``name``, because a file next to it may have that name."""
    return name in _RESERVED or _OF_A_PROCESS.fullmatch(name) is not None


def is_sign_of_ours(name: str) -> bool:
    """Returns whether a file ``name`` in the folder of a checkpoint shows that Gracepoint wrote the checkpoint."""
    return name in (MANIFEST, MORE_METADATA, NOTE, CHUNK_WRITERS) or _SIGN.fullmatch(name) is not None


def is_beside_manifest(path: str, item: str) -> bool:
    """Returns whether a committed checkpoint has a file ``path`` that its manifest does not name.

    These are the marks, the done-records, what merging in OCDBT adds, and what a crash has left of a single write.
    ``item`` is the item of the train state.
    """
    if path in (STEP_METADATA, COMMIT_SUCCESS) or is_sign_of_ours(path) or _PARTLY_WRITTEN.search(path):
        return True
    return path.startswith(in_item(item, "")) and _OF_OCDBT.match(path.removeprefix(in_item(item, ""))) is not None


def checked_item(name: str) -> str:
    """Returns ``name`` if an item can have it, else raises SettingsError."""
    if not _ITEM.fullmatch(name) or is_reserved(name) or name in (HOST_STATE_ITEM, DAMAGE_MARK):
        raise SettingsError(
            f"item {name!r}: expected 1 to 128 letters, digits, '-', '_' or '.', not beginning with '.', and none of "
            f"the names that Gracepoint and Orbax use in a step's folder, as {HOST_STATE_ITEM}"
        )
    return name


def in_item(item: str, name: str) -> str:
    """Returns the path of ``name`` in ``item``, relative to the checkpoint's folder."""
    return f"{item}/{name}" if item else name


def array_metadata_files(item: StoragePath) -> list[StoragePath]:
    """Returns the array metadata files of all processes (see ``array_metadata``).

    TensorStore writes each file under a temporary name first. A crash may leave such files, which are not returned.
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


def manifest_part(process_index: int) -> str:
    return f"{MANIFEST}.process_{process_index}"


def host_state_file(process_index: int) -> str:
    return f"{HOST_STATE_ITEM}/process_{process_index}.json"


# The last entry: the checksum of all bytes before it.
_CHECKSUM = b', "checksum": '


def seal(form: str, fields: Mapping[str, Any]) -> bytes:
    """Returns ``fields`` as JSON, with the name of their format and a checksum."""
    body = json.dumps({"format": form, **fields}).removesuffix("}").encode()
    return body + _CHECKSUM + str(crc32(body)).encode() + b"}"


def is_whole(data: bytes) -> bool:
    """True if the contents of a file, in any format, match the checksum that they carry."""
    body, _, checksum = data.rpartition(_CHECKSUM)
    return checksum == str(crc32(body)).encode() + b"}"


def unsealed(forms: Sequence[str], data: bytes, where: str) -> dict[str, Any]:
    """Returns the fields that were sealed.

    Args:
        forms: The formats that can be read, the newest one last.
        data: The contents of a file.
        where: Names the file in errors.

    Raises:
        CheckpointCorrupt: The fields cannot be read.
        CheckpointTooNew: This version does not know their format.
    """
    if not is_whole(data):
        raise CheckpointCorrupt(f"{where} cannot be read: its checksum does not fit its contents")
    try:
        value = dict(json.loads(data.rpartition(_CHECKSUM)[0] + b"}"))
        actual = value.pop("format")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorrupt(f"{where} cannot be read: {error!r}") from error
    if actual not in forms:
        form = forms[-1]
        if _is_newer(actual, form):
            raise CheckpointTooNew(
                f"{where} was written by a newer Gracepoint: found format {actual!r}, expected {form!r}. Install in "
                "the image the version of gracepoint that wrote it, or train in another directory; it is left as it is"
            )
        raise CheckpointCorrupt(f"{where}: found format {actual!r}, expected {form!r}")
    return value


def _is_newer(value: Any, form: str) -> bool:
    name, _, version = form.partition("/")
    number = value.removeprefix(f"{name}/") if isinstance(value, str) else ""
    return number.isdecimal() and int(number) > int(version)


@dataclasses.dataclass(frozen=True)
class Claim:
    """Stands in place of a step's manifest in a store that cannot rename, while a save or a deletion owns the step.

    Attributes:
        attempt: The attempt of the job that saves. In the claim of a deletion: ``deletes``.
        ordinal: Number of the save within the attempt. In the claim of a deletion: 0.
        begun_ns: When the save or the deletion began, in nanoseconds since the epoch by the store's clock.
        trash: Name of the trash of a step that is deleted. None in the claim of a save.
        nonce: Makes the contents unique, as some stores distinguish versions by their contents.
        swept_ns: When the process that deletes the objects last renewed the claim, in nanoseconds since the epoch by
            the store's clock. 0 if no process deletes them yet.
    """

    attempt: str
    ordinal: int
    begun_ns: int
    trash: str | None = None
    nonce: str = dataclasses.field(default_factory=lambda: Claim.new_nonce())
    swept_ns: int = 0

    FORMAT: ClassVar[str] = "gracepoint.claim/1"

    @staticmethod
    def new_nonce() -> str:
        return secrets.token_hex(8)

    @property
    def note(self) -> str:
        """The note that the save leaves with each object that it writes."""
        return f"{self.attempt} {self.ordinal} {self.begun_ns}"

    @classmethod
    def noted(cls, note: str) -> Claim | None:
        """Returns the save that left a note. None if Gracepoint did not leave it."""
        attempt, _, rest = note.partition(" ")
        numbers = rest.split(" ")
        if not attempt or len(numbers) < 2 or not all(number.isdecimal() for number in numbers[:2]):
            return None
        return cls(attempt, int(numbers[0]), int(numbers[1]))

    def is_same(self, other: Claim) -> bool:
        """Returns whether both are of one save."""
        return (self.attempt, self.ordinal) == (other.attempt, other.ordinal)

    def is_later(self, other: Claim) -> bool:
        """Returns whether this save began after ``other``."""
        if self.attempt == other.attempt:
            return self.ordinal > other.ordinal
        return self.begun_ns > other.begun_ns

    def to_bytes(self) -> bytes:
        return seal(self.FORMAT, dataclasses.asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        return cls(**unsealed((cls.FORMAT,), data, where))


def is_claim(data: bytes) -> bool:
    """Returns whether ``data`` is a claim of any version, and not a manifest."""
    return data.startswith(b'{"format": "gracepoint.claim/')
