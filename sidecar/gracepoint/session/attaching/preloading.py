"""Loads beside the joining of the JAX cluster what ``attach`` and the restore need after it: modules and files.

A process waits while it joins: for process 0, and for the last process. The **preloading thread**
("gracepoint-preload", daemon) uses that time. It imports modules, has the system read the newest checkpoint into its
page cache or makes a connection to the object store ready, and ends. Nothing waits for it but an import of the same
module. What fails here is done again by ``attach`` and ``restore``, which raise the error.
"""

from __future__ import annotations

import importlib
import logging
import threading

from gracepoint import trace
from gracepoint.multihost import global_state
from gracepoint.settings import Settings

log = logging.getLogger(__name__)

_MODULES = (
    "gracepoint.checkpoint.checkpointers.step_checkpointer",
    "gracepoint.compile_cache.opening",
    "gracepoint.checkpoint.loading.start_state",
)


def begin(settings: Settings) -> threading.Thread | None:
    """Begins to load. Returns the thread, or None if this process does not wait for others while it joins."""
    if settings.process_count in (None, 1) or global_state.initialized:
        return None
    thread = threading.Thread(target=_load, args=(settings,), name="gracepoint-preload", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the system has no more threads
        log.info("nothing is loaded ahead error=%s", error)
        return None
    return thread


def _load(settings: Settings) -> None:
    try:
        for name in _MODULES:
            with trace.span(f"import {name}"):
                importlib.import_module(name)
        if settings.directory is not None:
            from gracepoint.checkpoint.reading.read_ahead import read_ahead

            with trace.span("begin to read ahead"):
                begun_bytes = read_ahead(settings.directory, settings.process_id)
            log.info("reading ahead what this process saved last bytes=%d", begun_bytes)
    except Exception as error:  # noqa: BLE001 - raised again by what needs it
        log.info("not everything was loaded ahead error=%s", error)
