"""Switches the cache of compiled programs on for a session. If that fails, one line in the log says why."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gracepoint import machine
from gracepoint.checkpoint.storage.storage_path import StoragePath, storage_path
from gracepoint.compile_cache.cleaning import Bounds
from gracepoint.compile_cache.jax_hooks import CannotInstall, JaxHooks
from gracepoint.compile_cache.listing import list_programs, tell_nothing
from gracepoint.compile_cache.program_cache import ProgramCache
from gracepoint.compile_cache.program_folders import IN_CHECKPOINTS, Platform, folder_of
from gracepoint.wire.names import COMPILATION_CACHE_OFF, COMPILATION_CACHE_ON

if TYPE_CHECKING:
    from gracepoint.multihost import Meeting
    from gracepoint.settings import Settings

logger = logging.getLogger(__name__)

_LISTING_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 30.0
_DAY_S = 86_400.0


class CompileCache:
    """The cache of a session. ``close`` takes it out of JAX."""

    def __init__(self, programs: ProgramCache, hooks: JaxHooks) -> None:
        self._programs = programs
        self._hooks = hooks

    def close(self, *, well: bool) -> None:
        """Ends the cache. Never raises.

        Args:
            well: True to wait for programs that are being written, for half a minute at most. False: no wait.
        """
        self._hooks.uninstall()
        self._programs.close(_CLOSE_TIMEOUT_S if well else 0.0)


def open_compile_cache(settings: Settings, meeting: Meeting, directory: str) -> CompileCache | None:
    """Makes JAX keep compiled programs, if the settings say so. Call it before the first compilation.

    Args:
        settings: The settings.
        meeting: The processes, and the key-value store that they share. All of them call this function.
        directory: The directory of the checkpoints.

    Returns:
        The cache. None if it is off, or cannot be used; a line in the log says why it cannot.
    """
    if settings.compilation_cache in (None, COMPILATION_CACHE_OFF):
        return None
    try:
        return _open(settings, meeting, _top(settings.compilation_cache, directory))
    except CannotInstall as error:
        logger.warning("gracepoint keeps no compiled programs: %s", error)
    except Exception as error:  # noqa: BLE001 - training goes on without
        logger.warning("gracepoint keeps no compiled programs: %s: %s", type(error).__name__, error)
    tell_nothing(meeting.gang.process_index, meeting.gang.process_count, meeting.store)
    return None


def _open(settings: Settings, meeting: Meeting, top: StoragePath) -> CompileCache:
    gang = meeting.gang
    folder = folder_of(_platform(gang.process_count))
    programs = ProgramCache(
        top,
        folder,
        functools.partial(
            list_programs,
            top / folder,
            gang.process_index,
            gang.process_count,
            meeting.store,
            timeout_s=_LISTING_TIMEOUT_S,
        ),
        Bounds(settings.compilation_cache_bytes, settings.compilation_cache_days * _DAY_S),
        gang.process_index,
    )
    hooks = JaxHooks(programs)
    hooks.install()
    programs.start()
    logger.info("compiled programs are kept directory=%s", top / folder)
    return CompileCache(programs, hooks)


def _top(setting: str | None, directory: str) -> StoragePath:
    if setting == COMPILATION_CACHE_ON:
        return storage_path(directory) / IN_CHECKPOINTS
    assert setting is not None
    return storage_path(setting)


def _platform(process_count: int) -> Platform:
    import jax
    import jaxlib

    devices = jax.devices()
    kinds = [device.device_kind for device in devices]
    platform = devices[0].platform
    return Platform(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        platform=platform,
        platform_version=str(devices[0].client.platform_version),
        devices={kind: kinds.count(kind) for kind in set(kinds)},
        processes=process_count,
        host=machine.processor() if platform == "cpu" else "",
        fingerprint=_fingerprint(devices),
    )


def _fingerprint(devices: Sequence[Any]) -> str:
    """Returns a digest of what JAX's keys of programs contain of the topology. Empty if it is not known.

    Versions of JAX hash the topology in different ways, so JAX's own function is called.
    """
    import numpy as np

    hashed = hashlib.sha256()
    try:
        from jax._src import cache_key

        cache_key._hash_accelerator_config(hashed, np.array(devices))  # noqa: SLF001
    except Exception as error:  # noqa: BLE001 - processes are then taken to have equal keys
        logger.debug("what JAX hashes of the topology is not known: %s", error)
        return ""
    return hashed.hexdigest()
