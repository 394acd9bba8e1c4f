"""What a handler of one type of leaves does, and which handler a type has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax

from gracepoint.checkpoint.leaf_args import RestoreArgs, SaveArgs
from gracepoint.checkpoint.storage.storage_path import LocalPath, StoragePath, UserPath, storage_path
from gracepoint.errors import CheckpointRefused, SettingsError


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Where a leaf is stored.

    Attributes:
        name: Of the leaf; unique in its folder.
        parent_dir: The folder of the tree that it belongs to, the same for all leaves of a call.
        keypath: JAX's, which callbacks are given; empty: the name alone.
    """

    name: str
    parent_dir: LocalPath
    keypath: tuple[Any, ...] = ()

    @property
    def path(self) -> LocalPath:
        """The leaf's own folder, where it has one."""
        return self.parent_dir / self.name


class TypeHandler(Protocol):
    """Saves and restores leaves of one type. Every process of the job makes the same calls in the same order."""

    @property
    def typestr(self) -> str:
        """Orbax's word for the type, by which it is recorded."""

    def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Future[None]]:
        """Copies what must be copied before ``values`` change, and writes while the caller goes on.

        Returns:
            What is done when this process's part is on the disk, durably. The tree is complete when it is so in all
            processes and one of them has called ``finalize``.
        """

    def finalize(self, directory: UserPath) -> None:
        """Makes the parts of all processes below ``directory`` one; may be called again."""

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> Sequence[Any]:
        """Returns the restored leaves."""

    def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Returns what is known of the leaves without reading their values."""

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Returns bytes that this process writes, and reads, of each leaf."""


class HandlerRegistry:
    """Which handler a type has: of those that match it, the one that was added first."""

    def __init__(self) -> None:
        self._entries: list[tuple[type, Callable[[type], bool], TypeHandler]] = []

    def add(
        self,
        leaf_type: type,
        handler: TypeHandler,
        *,
        matches: Callable[[type], bool] | None = None,
        override: bool = False,
    ) -> None:
        """Adds a handler.

        Args:
            leaf_type: Of the leaves.
            handler: For them.
            matches: Says whether it is for a type; None: for ``leaf_type`` and types derived from it.
            override: It takes the place of the one that ``leaf_type`` has.

        Raises:
            SettingsError: There is one already.
        """
        entry = (leaf_type, matches or (lambda found: issubclass(found, leaf_type)), handler)
        for position, (taken, _, _) in enumerate(self._entries):
            if taken is leaf_type:
                if not override:
                    raise SettingsError(
                        f"{leaf_type.__qualname__} has a handler already; pass override=True to replace"
                    )
                self._entries[position] = entry
                return
        self._entries.append(entry)

    def get(self, leaf_type: type | str) -> TypeHandler:
        """Returns the handler of a type, or of Orbax's word for it.

        Raises:
            SettingsError: It has none.
        """
        for _, matches, handler in self._entries:
            if handler.typestr == leaf_type if isinstance(leaf_type, str) else matches(leaf_type):
                return handler
        name = leaf_type if isinstance(leaf_type, str) else leaf_type.__qualname__
        known = ", ".join(sorted({handler.typestr for _, _, handler in self._entries}))
        raise SettingsError(f"leaves of type {name} have no handler; there are some for {known}")

    def has(self, leaf_type: type | str) -> bool:
        try:
            self.get(leaf_type)
        except SettingsError:
            return False
        return True


def folder_of(infos: Sequence[ParamInfo], *others: Sequence[Any] | None) -> StoragePath:
    """Returns the folder of all ``infos``, which ``others`` are as many as."""
    if not infos:
        raise CheckpointRefused("expected at least one leaf, found none")
    if wrong := [len(other) for other in others if other is not None and len(other) != len(infos)]:
        raise CheckpointRefused(f"expected as many values and args as there are infos, {len(infos)}, found {wrong[0]}")
    folders = {info.parent_dir for info in infos}
    if len(folders) > 1:
        raise CheckpointRefused(f"expected leaves of one folder, found {', '.join(map(str, sorted(folders)))}")
    return storage_path(infos[0].parent_dir)


def is_primary(primary_host: int | None) -> bool:
    """True if this process writes what is written once; None: each does, into storage of its own."""
    return primary_host is None or primary_host == jax.process_index()


def check_primary_host(primary_host: int | None) -> None:
    """Raises SettingsError if there is no such process, so that nothing would be written."""
    if primary_host is not None and not 0 <= primary_host < jax.process_count():
        raise SettingsError(
            f"primary_host is {primary_host!r}; expected one of the process indices 0 to {jax.process_count() - 1}, or "
            "None where every process has storage of its own"
        )
