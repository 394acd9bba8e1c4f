"""Names and paths of what a checkpoint directory holds, and nothing else.

<root>/
  <step>/                                    a committed checkpoint
    _CHECKPOINT_METADATA, commit_success.txt   Orbax's marks of a finished step
    _GRACEPOINT                                ours: every file of the step with its size and checksum
    done.process_<N>.json                      what process N said that it had made durable
    default/                                   the train state: Orbax's item of that name
      _METADATA, _sharding, array_metadatas/process_0, commit_success.txt
      <leaf>/.zarray, <leaf>/<chunk>             zarr2, uncompressed, one file per chunk
    host_state/                                the per-process state: an item of its own
      metadata, process_<N>.json
  <step>.gracepoint-tmp.<attempt>.<ordinal>/ a save under way, or what is left of one
  <step>.gracepoint-trash.<attempt>.<ordinal>/  being deleted
  <step>.gracepoint-aside.<attempt>.<ordinal>/  a foreign folder that stood where a step had to go
  .gracepoint-*                              probes, gone in a moment
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gracepoint.errors import SettingsError

STEP_METADATA = "_CHECKPOINT_METADATA"
COMMIT_SUCCESS = "commit_success.txt"
MANIFEST = "_GRACEPOINT"
STATE_ITEM = "default"
HOST_STATE_ITEM = "host_state"
TREE_METADATA = "_METADATA"
SHARDING = "_sharding"
ARRAY_METADATA = "array_metadatas/process_0"
ARRAY_SPEC = ".zarray"

#: First names below ``default/`` that a leaf of the state must not take.
RESERVED_LEAF_NAMES = frozenset(
    {TREE_METADATA, SHARDING, "array_metadatas", COMMIT_SUCCESS, "manifest.ocdbt", "_strings.json"}
)

_HIDDEN = ".gracepoint-"
_STEP_NAME = re.compile(r"0|[1-9]\d*")
_MARKED_NAME = re.compile(
    r"(?P<step>0|[1-9]\d*)\.gracepoint-(?P<mark>tmp|trash|aside)\.(?P<attempt>[\w-]+)\.(?P<ordinal>\d+)",
    re.ASCII,
)
_ATTEMPT = re.compile(r"[\w-]{1,128}", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Temporary:
    """The folder of one save that is not committed: ``ordinal`` counts the saves of the attempt."""

    path: Path
    step: int
    attempt: str
    ordinal: int


class Layout:
    """The paths below one checkpoint directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def step(self, step: int) -> Path:
        return self.root / str(step)

    def temporary(self, step: int, attempt: str, ordinal: int) -> Temporary:
        return Temporary(self._marked(step, "tmp", attempt, ordinal), step, attempt, ordinal)

    def trash(self, step: int, attempt: str, ordinal: int) -> Path:
        return self._marked(step, "trash", attempt, ordinal)

    def aside(self, step: int, attempt: str, ordinal: int) -> Path:
        return self._marked(step, "aside", attempt, ordinal)

    def probe(self, attempt: str, process_index: int) -> Path:
        return self.root / f"{_HIDDEN}probe.{attempt}.{process_index}"

    def shared_probe(self, attempt: str) -> Path:
        return self.root / f"{_HIDDEN}shared.{attempt}"

    def clock_probe(self) -> Path:
        return self.root / f"{_HIDDEN}now.{os.uname().nodename}.{os.getpid()}"

    def hidden(self) -> list[Path]:
        """Probes, under way or left by a crash."""
        return list(self.root.glob(f"{_HIDDEN}*"))

    def _marked(self, step: int, mark: str, attempt: str, ordinal: int) -> Path:
        return self.root / f"{step}.gracepoint-{mark}.{attempt}.{ordinal}"

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first, whatever is in it."""
        return sorted((int(p.name) for p in self._folders() if _STEP_NAME.fullmatch(p.name)), reverse=True)

    def temporaries(self) -> list[Temporary]:
        """The saves that are not committed, newest step first."""
        found = [Temporary(path, int(m["step"]), m["attempt"], int(m["ordinal"])) for path, m in self._matches("tmp")]
        return sorted(found, key=lambda t: (t.step, t.ordinal, t.attempt), reverse=True)

    def trashed(self) -> list[Path]:
        return [path for path, _ in self._matches("trash")]

    def strangers(self) -> list[str]:
        """Names of what is none of all these and not hidden, links among them: they are never followed."""
        folders = {p.name for p in self._folders()}
        return sorted(
            p.name
            for p in self.root.iterdir()
            if not p.name.startswith(".")
            and not (p.name in folders and (_STEP_NAME.fullmatch(p.name) or _MARKED_NAME.fullmatch(p.name)))
        )

    def _matches(self, mark: str) -> Iterator[tuple[Path, re.Match[str]]]:
        for path in self._folders():
            match = _MARKED_NAME.fullmatch(path.name)
            if match and match["mark"] == mark:
                yield path, match

    def _folders(self) -> list[Path]:
        try:
            return [p for p in self.root.iterdir() if p.is_dir() and not p.is_symlink()]
        except FileNotFoundError:
            return []


def root_of(directory: str) -> Path:
    """Returns the local path of ``directory``, a path or a ``file://`` URI.

    Raises:
        SettingsError: It is another kind of URI, or not absolute.
    """
    if "://" in directory:
        parts = urlsplit(directory)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise SettingsError(
                f"checkpoint directory {directory!r}: expected a path or a file:///path URI on a file system that "
                f"all processes share; {parts.scheme}:// is not supported"
            )
        directory = unquote(parts.path)
    root = Path(directory)
    if not root.is_absolute():
        raise SettingsError(f"checkpoint directory {directory!r}: expected an absolute path")
    return root


def checked_attempt(attempt: str) -> str:
    """Returns ``attempt`` if it can be part of a folder's name."""
    if not _ATTEMPT.fullmatch(attempt):
        raise SettingsError(
            f"attempt {attempt!r}: expected 1 to 128 letters, digits, '-' or '_', as it names temporary folders"
        )
    return attempt


def done_record(process_index: int) -> str:
    return f"done.process_{process_index}.json"


def host_state_file(process_index: int) -> str:
    return f"{HOST_STATE_ITEM}/process_{process_index}.json"
