"""A process that joins a job as an injected pod does, and what may happen on the way; the first argument says what."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

import gracepoint
from gracepoint import multihost
from gracepoint.multihost import distributed, rendezvous
from gracepoint.session import attach as attach_module
from gracepoint.settings import Settings
from tests.multiprocess.launcher import here

#: Seconds from one line that says who is missing to the next.
rendezvous.SAY_EVERY_S = 0.2


def _as_injected() -> None:
    """The test's address stands for the name of the pod of process 0, which no DNS knows here."""
    address = here().coordinator
    Settings.coordinator_address = property(lambda self: address)  # type: ignore[method-assign,assignment]


def attach() -> None:
    """Trains a step, and says in which attempt."""
    _as_injected()
    if late := os.environ.get("TEST_COMES_AFTER"):
        while not Path(late).exists():
            time.sleep(0.02)
    with gracepoint.attach(sys.argv[2]):
        print("attached", jax.process_index(), jax.process_count(), flush=True)


def dies() -> None:
    """One process dies when all have met, and before JAX has joined them."""
    real = jax.distributed.initialize

    def initialize(*arguments: Any, **options: Any) -> None:
        if os.environ.get("TEST_DIES"):
            os._exit(3)
        real(*arguments, **options)

    jax.distributed.initialize = initialize
    if os.environ.get("TEST_DIES"):
        setattr(distributed, "wait_for_coordinator", lambda address, timeout_s: None)  # noqa: B010
    attach()


def dies_in_attach() -> None:
    """One process dies when JAX has joined all, and before they have exchanged their names."""

    def meet(*arguments: Any, **options: Any) -> Any:
        if os.environ.get("TEST_DIES"):
            os._exit(3)
        return multihost.meet(*arguments, **options)

    setattr(attach_module, "meet", meet)  # noqa: B010
    attach()


def own_cluster() -> None:
    """The training script joins JAX's cluster itself, before ``attach``."""
    here().initialize_jax(shutdown_timeout_s=20)
    began_s = time.monotonic()
    try:
        gracepoint.attach(sys.argv[2])
    finally:
        print(f"after {time.monotonic() - began_s:.1f} s", flush=True)


def initialize() -> None:
    """Joins with ``gracepoint.multihost.initialize`` alone."""
    place = here()
    multihost.initialize(place.coordinator, place.process_count, place.process_index, initialization_timeout=2)
    multihost.sync_global_processes("joined", timeout=60)
    print("joined", flush=True)
    multihost.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stdout)
    {part.__name__: part for part in (attach, dies, dies_in_attach, own_cluster, initialize)}[sys.argv[1]]()
