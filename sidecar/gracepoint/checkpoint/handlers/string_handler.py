"""Type handler of strings. All strings of a folder are in one file, in Orbax's format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from gracepoint.checkpoint.format import layout, orbax_metadata, pytree
from gracepoint.checkpoint.handler_registry import ParamInfo
from gracepoint.checkpoint.handlers.call_checks import check_primary_host, folder_of, is_primary, leaf_args
from gracepoint.checkpoint.handlers.dispatcher import Dispatcher, InProcessDispatcher
from gracepoint.checkpoint.metadata import LeafMetadata
from gracepoint.checkpoint.options import RestoreArgs, SaveArgs
from gracepoint.checkpoint.orbax_objects import save_args_of
from gracepoint.checkpoint.reading.stored_tree import text_of
from gracepoint.checkpoint.storage.storage_path import UserPath
from gracepoint.errors import CheckpointCorrupt, CheckpointRefused


class StringHandler:
    """Saves and restores strings. Every process has the same strings, and the primary process writes them to one file.

    Args:
        primary_host: ``jax.process_index()`` of the process that writes. None: every process writes, to storage of its
            own.
        dispatcher: Runs the work. None: it runs in this process.
    """

    typestr = pytree.STRING

    def __init__(self, *, primary_host: int | None = 0, dispatcher: Dispatcher | None = None) -> None:
        self._primary_host = primary_host
        self._dispatcher = dispatcher or InProcessDispatcher()

    def serialize(
        self, values: Sequence[str], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> list[Future[None]]:
        """Writes strings while the caller goes on. All strings of a folder must be passed in one call.

        Raises:
            CheckpointRefused: ``args`` ask for a type or for chunks, which strings do not have.
        """
        folder = folder_of(infos, values, args)
        for info, arg in zip(infos, args or (), strict=False):
            if save_args_of(arg, f"leaf {info.name!r}") != SaveArgs():
                raise CheckpointRefused(f"leaf {info.name!r}: strings have neither type nor chunks, found {arg}")
        check_primary_host(self._primary_host)
        leaves = [
            pytree.Leaf(info.name, ((info.name, pytree.MAPPING),), self.typestr, None, value)
            for info, value in zip(infos, values, strict=True)
        ]
        data = orbax_metadata.strings(leaves) if is_primary(self._primary_host) else None

        def write(_: Sequence[Any]) -> None:
            if data is not None:
                folder.make_folder_durably()
                (folder / layout.STRINGS).put(data)

        return [self._dispatcher.dispatch("writing strings", write, [])]

    def finalize(self, directory: UserPath) -> None:
        """Does nothing, as one process writes all strings."""

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> list[str]:
        """Returns the strings.

        Raises:
            CheckpointCorrupt: A string is missing; names the leaf.
            CheckpointRefused: ``args`` ask for another type.
        """
        folder = folder_of(infos, args)
        for info, arg in zip(infos, leaf_args(infos, args), strict=True):
            if arg not in (RestoreArgs(), RestoreArgs(restore_type=str)):
                raise CheckpointRefused(f"leaf {info.name!r}: strings are restored as str, found {arg}")
        try:
            strings = json.loads((folder / layout.STRINGS).read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise CheckpointCorrupt(f"{folder / layout.STRINGS} cannot be read: {error!r}") from error
        return [text_of(strings, info.name, folder) for info in infos]

    def metadata(self, infos: Sequence[ParamInfo]) -> list[LeafMetadata]:
        """Returns the metadata of the leaves: their names and type."""
        return [LeafMetadata(info.name, self.typestr) for info in infos]

    def memory_size(self, values: Sequence[str]) -> list[tuple[int, int]]:
        """Returns for each string the bytes that this process writes, and the bytes that it reads."""
        writes = is_primary(self._primary_host)
        sizes = [len(value.encode()) for value in values]
        return [(size if writes else 0, size) for size in sizes]
