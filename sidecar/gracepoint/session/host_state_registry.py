"""Per-process state that is not in the train state, such as a data iterator or a host's RNG.

Belongs to the training thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gracepoint.arguments import shown
from gracepoint.elastic import ElasticData, same_in_all
from gracepoint.errors import CheckpointMismatch, SettingsError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Value:
    get: Callable[[], Any]
    set: Callable[[Any], None]
    reshard: Callable[..., Any] | None


class DataIterator(Protocol):
    """An iterator whose place can be saved, such as Grain's."""

    def get_state(self) -> Any:
        """Returns where it is: JSON values, numpy arrays, bytes."""

    def set_state(self, state: Any, /) -> None:
        """Goes to where it was when ``get_state`` returned this."""


#: Name of the item that ``Session.restore(data=...)`` registers.
DATA = "data"


class HostStates:
    """The registered functions, by name."""

    def __init__(self) -> None:
        self._values: dict[str, _Value] = {}
        self._iterator: DataIterator | None = None

    def register(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],
        reshard: Callable[..., Any] | None,
    ) -> None:
        """Registers an item, as ``Session.host_state``.

        Raises:
            SettingsError: The name is taken, or ``get`` or ``set`` is no function.
        """
        if not isinstance(name, str):
            raise SettingsError(f"host_state(name, get, set): expected a name, found {shown(name)}")
        if name in self._values:
            raise SettingsError(f"host_state({name!r}): registered before")
        if not (callable(get) and callable(set)):
            raise SettingsError(
                f"host_state({name!r}): expected functions that get and set the value, found {shown(get)} and "
                f"{shown(set)}"
            )
        self._values[name] = _Value(get, set, reshard)

    def register_iterator(self, iterator: DataIterator) -> None:
        """Registers a data iterator, as ``Session.restore``.

        Raises:
            SettingsError: The name ``data`` is taken, or ``iterator`` has no ``get_state`` or no ``set_state``.
        """
        if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
            raise SettingsError(
                f"restore(data=...): expected an iterator with get_state and set_state, found a "
                f"{type(iterator).__qualname__}. For other iterators there is host_state({DATA!r}, get, set)"
            )
        self.register(DATA, iterator.get_state, iterator.set_state, _iterator_state)
        self._iterator = iterator

    def get(self) -> dict[str, Any]:
        """Returns the current values."""
        return {name: value.get() for name, value in self._values.items()}

    def set(self, restored: Mapping[str, Any], step: int) -> None:
        """Passes the restored values to the registered functions.

        Raises:
            CheckpointMismatch: The checkpoint lacks a registered name.
        """
        missing = sorted(self._values.keys() - restored.keys())
        if missing:
            raise CheckpointMismatch(
                f"host_state {missing[0]!r} is not in the checkpoint of step {step}, which has "
                f"{sorted(restored) or 'none'}: register the names that it was saved with"
            )
        for name in sorted(restored.keys() - self._values.keys()):
            log.warning("a host_state of the checkpoint is not registered and was dropped name=%s", name)
        for name, value in self._values.items():
            value.set(restored[name])

    @property
    def changed(self) -> tuple[str, ...]:
        """What is different for the data since the checkpoint, in words. Empty if the data is no ``ElasticData``."""
        said = self._iterator.changed if isinstance(self._iterator, ElasticData) else ""
        return (said,) if said else ()

    @property
    def reshard(self) -> dict[str, Callable[..., Any]]:
        """The functions that convert values to another number of processes, by name."""
        return {name: value.reshard for name, value in self._values.items() if value.reshard is not None}


def _iterator_state(states: Sequence[Any], process_index: int, process_count: int) -> Any:
    """Returns the iterator's state for another number of processes.

    Raises:
        CheckpointMismatch: The processes that saved were not all at the same state.
    """
    try:
        return same_in_all(states, process_index, process_count)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(
            f"the data iterator: {error}: register it by host_state({DATA!r}, ..., reshard=...)"
        ) from None
