"""What a start does with what died before it: commits every save that is durable, and undoes what was half done.

Any number of processes may do so at once, and be stopped anywhere; ``commit`` says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import is_whole, merge
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.checks import check_size, must_not_write
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew

logger = logging.getLogger(__name__)


def salvage(paths: Layout) -> list[str]:
    """Commits every durable save whose process died before it could; returns remarks on the others, in words.

    First what a salvager had moved away when it died gets its name back. Only a save whose step has no folder yet, or a
    damaged one, or the very one that it was to replace, is made visible. Saves with missing done-records are left
    alone, and all are where this process may only read.
    """
    remarks: list[str] = []
    for aside in paths.set_aside():
        with _remarking(aside.path, remarks):
            _put_back(aside)
    durable = []
    for temporary in paths.temporaries():
        with _remarking(temporary.path, remarks):
            records = commit.done_records(temporary.path)
            if records is None:
                remarks.append(f"{temporary.path} is incomplete: not all processes finished writing")
            else:
                durable.append((temporary, records))
    # Of several starts' saves to one place the last one counts; the others were to replace what it has replaced.
    for temporary, records in sorted(durable, key=lambda found: found[1][0].begun_ns, reverse=True):
        with _remarking(temporary.path, remarks):
            for path, file in merge(records).files.items():
                check_size(temporary.path / path, file.bytes)
            if commit.finalize(paths, temporary, replace=False) or _take_its_place(
                paths, temporary, records[0].replaces
            ):
                logger.warning("salvaged %s: %s was complete, not committed", temporary.what, temporary.path)
            else:
                remarks.append(f"{temporary.path} is left, as there is a folder for {temporary.what} already")
    return remarks


@contextlib.contextmanager
def _remarking(folder: StoragePath, remarks: list[str]) -> Iterator[None]:
    """Lets the others be salvaged where one cannot be, and says why."""
    try:
        yield
    except (CheckpointCorrupt, CheckpointTooNew) as error:
        remarks.append(f"{folder} is not salvaged: {error}")
    except FileNotFoundError:
        # Another process committed or cleared it between two of our steps.
        logger.info("%s went away while it was looked at", folder)
    except OSError as error:
        if not must_not_write(error):
            raise
        remarks.append(f"{folder} is not salvaged: {error}")


def is_damaged(folder: StoragePath) -> bool:
    """True if the checkpoint in ``folder`` is known to be damaged: a restore went back from it, or its manifest is.

    One that another version wrote, and this one cannot read, is not.
    """
    manifest = commit.manifest_bytes(folder)
    return (manifest is not None and not is_whole(manifest)) or (folder / layout.DAMAGE_MARK).exists()


def _gives_way(folder: StoragePath, replaces: str | None) -> bool:
    """True if a durable save that ``replaces`` what was there when it was made may take the place of ``folder``."""
    return is_damaged(folder) or (replaces is not None and commit.standing(folder) == replaces)


def _take_its_place(paths: Layout, temporary: Temporary, replaces: str | None) -> bool:
    """Commits a durable save in the place of what is damaged, or was to give way; False if neither is there.

    Another salvager may do the same meanwhile, so that what was moved away is looked at again, and put back if it is
    something else: it is trash only then, and not even then where Gracepoint did not write it. Whoever dies between the
    two leaves that to the next salvager.
    """
    if not _gives_way(temporary.target, replaces):
        return False
    aside = dataclasses.replace(temporary, path=paths.aside(temporary.step, temporary.attempt, temporary.ordinal))
    temporary.target.publish(aside.path)
    if not _gives_way(aside.path, replaces):
        _put_back(aside)
        return commit.is_committed(paths, temporary)
    logger.warning("%s is damaged or was to be replaced, and gives way to %s", temporary.target, temporary.path)
    if (aside.path / layout.MANIFEST).exists():
        commit.discard(aside.path, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))
    return commit.finalize(paths, temporary, replace=False)


def _put_back(aside: Temporary) -> None:
    """Gives a checkpoint of ours that was moved away, and is good, its name back, if nothing has it by now."""
    if not (aside.path / layout.MANIFEST).exists() or is_damaged(aside.path):
        return
    try:
        aside.path.publish(aside.target)
    except FileNotFoundError:
        return  # another process did
    except FileExistsError:
        logger.warning("%s stays where it is, as there is a folder %s", aside.path, aside.target)
        return
    aside.target.parent.sync()
    logger.warning("%s is %s again", aside.path, aside.target)
