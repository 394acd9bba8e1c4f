"""What a save took: for forecasts, for logs, and for whoever listens to ``jax.monitoring``."""

from __future__ import annotations

import dataclasses
import logging

import jax

logger = logging.getLogger(__name__)

_EVENTS = "/jax/checkpoint/write/async"  # Orbax's names, so that what listens to those hears ours


@dataclasses.dataclass(frozen=True)
class Saved:
    """A committed save: ``bytes`` of the state over all processes, each counted once."""

    step: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class SaveStats:
    """How long the last committed save took in this process.

    Attributes:
        step: That was saved; None for a checkpoint that has a path to itself.
        bytes: Of the state over all processes.
        blocked_s: How long the caller waited: for the save before, and for the copy. All of it, if it waited for
            the commit.
        snapshot_s: The copy to host memory; 0 for an emergency, which streams.
        durable_s: From the begin of writing to this process's done-record on disk.
        committed_s: From the begin of writing to the commit.
    """

    step: int | None
    bytes: int
    blocked_s: float
    snapshot_s: float
    durable_s: float
    committed_s: float


def tell_blocked(blocked_s: float) -> None:
    """Records how long a caller of a background save was blocked."""
    jax.monitoring.record_event_duration_secs(f"{_EVENTS}/blocking_duration_secs", blocked_s)


def tell_background(stats: SaveStats, *, chunks: int, total_s: float | None) -> None:
    """Records the background part of a save.

    Args:
        stats: Of the save.
        chunks: How many this process wrote.
        total_s: From the call to the commit; None in all but the primary process, as in Orbax.
    """
    record = jax.monitoring.record_event_duration_secs
    record(f"{_EVENTS}/commit_future_count", chunks)  # a count: there are but events and durations, Orbax says
    record(f"{_EVENTS}/commit_duration_sec", stats.durable_s)
    record(f"{_EVENTS}/thread_duration_sec", stats.committed_s)
    if total_s is not None:
        record(f"{_EVENTS}/total_duration_secs", total_s)
    jax.monitoring.record_scalar(f"{_EVENTS}/bytes", stats.bytes)
    logger.info(
        "saved step=%s bytes=%d blocked_s=%.3f snapshot_s=%.3f durable_s=%.3f committed_s=%.3f",
        stats.step,
        stats.bytes,
        stats.blocked_s,
        stats.snapshot_s,
        stats.durable_s,
        stats.committed_s,
    )
