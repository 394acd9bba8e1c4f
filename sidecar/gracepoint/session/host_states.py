"""Per-process state that is not in the train state, such as a data iterator or a host's RNG.

Belongs to the training thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

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

    def register(
        self,
        name: str,
        get: Callable[[], Any],
        set: Callable[[Any], None],
        reshard: Callable[..., Any] | None,
    ) -> None:
        """Registers an item, as ``Session.host_state``.

        Raises:
            SettingsError: The name is taken.
        """
        if name in self._values:
            raise SettingsError(f"host_state({name!r}): registered before")
        self._values[name] = _Value(get, set, reshard)

    def register_iterator(self, iterator: DataIterator) -> None:
        """Registers a data iterator, as ``Session.restore``.

        Raises:
            SettingsError: The name ``data`` is taken.
        """
        self.register(DATA, iterator.get_state, iterator.set_state, _the_same_in_all)

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
    def reshard(self) -> dict[str, Callable[..., Any]]:
        """The functions that convert values to another number of processes, by name."""
        return {name: value.reshard for name, value in self._values.items() if value.reshard is not None}


def _the_same_in_all(states: Sequence[Any], process_index: int, process_count: int) -> Any:
    """Returns the iterator's state for another number of processes.

    Raises:
        CheckpointMismatch: The processes that saved were not all at the same state.
    """
    for index, state in enumerate(states):
        if not _equal(state, states[0]):
            raise CheckpointMismatch(
                f"the data iterator: found a checkpoint of {len(states)} processes, of which process {index} was not "
                f"at the state of process 0, expected one state for all, as there are {process_count} processes now: "
                f"register it by host_state({DATA!r}, ..., reshard=...)"
            )
    return states[0]


def _equal(one: Any, other: Any) -> bool:
    """True if two values of a host state are equal, arrays included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if getattr(one, "shape", ()) != getattr(other, "shape", ()):
        return False
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)
