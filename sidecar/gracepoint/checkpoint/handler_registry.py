"""Type handlers: the protocol of a handler, and the registry of handlers by type."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from gracepoint.checkpoint.options import RestoreArgs, SaveArgs
from gracepoint.errors import SettingsError

if TYPE_CHECKING:
    from gracepoint.machine import LocalPath

# Types of leaves that checkpointers save without a handler, and the names of these types in a checkpoint's metadata.
_OWN_TYPES = (jax.Array, np.ndarray, np.generic, bool, int, float, str)
_OWN_NAMES = frozenset(
    {"jax.Array", "np.ndarray", "scalar", "string", "Dict", "List", "Tuple", "NamedTuple", "None"},
)


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Where a leaf is stored.

    Attributes:
        name: Name of the leaf; unique in its folder.
        parent_dir: Folder of the tree that the leaf belongs to. All leaves of one call have the same.
        keypath: JAX's key path of the leaf, which callbacks receive. Empty: callbacks receive the name only.
    """

    name: str
    parent_dir: LocalPath
    keypath: tuple[Any, ...] = ()

    @property
    def path(self) -> LocalPath:
        """The leaf's own folder or file. A handler that a checkpointer calls writes only there."""
        return self.parent_dir / self.name


class TypeHandler(Protocol):
    """Saves and restores leaves of one type. Every process of the job makes the same calls in the same order.

    A checkpointer calls ``serialize`` and ``deserialize`` in every process, ``finalize`` in process 0 alone, and
    ``metadata`` in each process that asks for it. A handler that a checkpointer calls writes only to ``ParamInfo.path``
    and below.
    """

    @property
    def typestr(self) -> str:
        """Name of the type in the checkpoint's metadata. For types that Orbax knows, it is Orbax's."""

    def serialize(
        self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs] | None = None
    ) -> Sequence[Future[None]]:
        """Copies ``values`` as far as needed, and writes them while the caller continues.

        After this returns, the caller may change the values.

        Returns:
            Futures that are done when this process's part is written. The tree is complete when they are done in all
            processes and one process has called ``finalize``.
        """

    def finalize(self, directory: LocalPath) -> None:
        """Merges the parts of all processes below ``directory``. May be called again."""

    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None) -> Sequence[Any]:
        """Returns the restored leaves."""

    def metadata(self, infos: Sequence[ParamInfo]) -> Sequence[Any]:
        """Returns the metadata of the leaves, without reading their values."""

    def memory_size(self, values: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Returns for each leaf the number of bytes that this process writes, and the number that it reads."""


class ItemHandler(Protocol):
    """Saves and restores one item of a step: a folder next to the train state. Orbax's ``CheckpointHandler`` is one.

    If it also has ``finalize(directory)``, one process calls that once all processes have saved.
    """

    def save(self, directory: Any, args: Any) -> None:
        """Writes the item to ``directory``, which exists. Every process calls it, and returns when it has written."""

    def restore(self, directory: Any, args: Any) -> Any:
        """Returns the item. Every process calls it. ``args`` is what the caller of the restore gave, or None."""


class HandlerRegistry:
    """Maps types to handlers. If several handlers match a type, the one that was added first is used.

    Pass one to ``AsyncCheckpointer``, ``CheckpointManager``, ``save`` or ``restore`` for leaves of types of your own.
    """

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
            leaf_type: Type of the leaves.
            handler: Handler of these leaves.
            matches: Returns whether the handler is for a type. None: it is for ``leaf_type`` and its subclasses.
            override: Whether to replace the handler that ``leaf_type`` already has.

        Raises:
            SettingsError: ``leaf_type`` already has a handler, and ``override`` is False.
        """
        entry = (leaf_type, matches or (lambda other: issubclass(other, leaf_type)), handler)
        for position, (other_type, _, _) in enumerate(self._entries):
            if other_type is leaf_type:
                if not override:
                    raise SettingsError(
                        f"{leaf_type.__qualname__} has a handler already; pass override=True to replace"
                    )
                self._entries[position] = entry
                return
        self._entries.append(entry)

    def get(self, leaf_type: type | str) -> TypeHandler:
        """Returns the handler of a type, or of a type's name in Orbax (``typestr``).

        Raises:
            SettingsError: The type has no handler.
        """
        for _, matches, handler in self._entries:
            if handler.typestr == leaf_type if isinstance(leaf_type, str) else matches(leaf_type):
                return handler
        name = leaf_type if isinstance(leaf_type, str) else leaf_type.__qualname__
        names = ", ".join(sorted({handler.typestr for _, _, handler in self._entries}))
        raise SettingsError(f"leaves of type {name} have no handler; there are some for {names}")

    def has(self, leaf_type: type | str) -> bool:
        """Returns whether a type, or a type's name in Orbax, has a handler."""
        try:
            self.get(leaf_type)
        except SettingsError:
            return False
        return True

    def check_for_trees(self) -> None:
        """Checks that a checkpointer can save trees with these handlers.

        Raises:
            SettingsError: A handler is for a type that checkpointers save without a handler.
        """
        for leaf_type, _, handler in self._entries:
            if handler.typestr in _OWN_NAMES or issubclass(leaf_type, _OWN_TYPES):
                raise SettingsError(
                    "handlers: expected only types that checkpointers do not save themselves, found "
                    f"{leaf_type.__qualname__} (typestr {handler.typestr!r}): leave it out; options= says how such "
                    "leaves are written"
                )
