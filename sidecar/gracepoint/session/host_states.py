"""Per-process state that is not in the train state, such as a data iterator or a host's RNG.

Belongs to the training thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from gracepoint.errors import CheckpointMismatch, SettingsError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Value:
    get: Callable[[], Any]
    set: Callable[[Any], None]
    reshard: Callable[..., Any] | None


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
