"""Durations and sizes of saves and restores, for the log and for listeners of ``jax.monitoring``."""

from __future__ import annotations

import dataclasses
import logging

import jax

logger = logging.getLogger(__name__)

# Orbax's names, so that listeners of Orbax's events receive Gracepoint's.
_EVENTS = "/jax/checkpoint/write/async"
_WRITE = "/jax/orbax/write"
_READ = "/jax/orbax/read"
_STORAGE = "other"  # Orbax's value for file systems
#: Gracepoint's own events: bytes per second of one read in this process; seconds that the primary replica read; seconds
#: of the broadcast of its values to the other replicas.
READ_EVENT = "/gracepoint/checkpoint/read/bytes_per_s"
REPLICA_READ_EVENT = "/gracepoint/checkpoint/read/primary_replica_s"
BROADCAST_EVENT = "/gracepoint/checkpoint/read/broadcast_s"
#: Of snapshots in the memory of nodes: seconds that the training waited for the copy; seconds from then until all parts
#: were there; bytes of this process's part; a snapshot that was due and is not there.
SNAPSHOT_BLOCKED_EVENT = "/gracepoint/checkpoint/snapshot/blocked_s"
SNAPSHOT_SENT_EVENT = "/gracepoint/checkpoint/snapshot/sent_s"
SNAPSHOT_BYTES_EVENT = "/gracepoint/checkpoint/snapshot/bytes"
SNAPSHOT_SKIPPED_EVENT = "/gracepoint/checkpoint/snapshot/skipped"
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Saved:
    """A committed save. ``bytes`` is the size of the state over all processes, with each byte counted once."""

    step: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class SaveStats:
    """How long the last committed save took in this process.

    Attributes:
        step: The step that was saved. None for a checkpoint that has a path to itself.
        bytes: Size of the state over all processes, in bytes.
        blocked_s: Seconds that the caller waited for the previous save and for the copy. If the caller waited for the
            commit: seconds of the whole save.
        snapshot_s: Seconds of the copy to host memory. 0 if the caller waited for the commit.
        durable_s: Seconds from the start of writing until this process's done-record was on disk.
        committed_s: Seconds from the start of writing to the commit.
    """

    step: int | None
    bytes: int
    blocked_s: float
    snapshot_s: float
    durable_s: float
    committed_s: float


def tell_started(*, in_background: bool) -> None:
    """Records that a save begins."""
    jax.monitoring.record_event(f"{_WRITE}/async/start" if in_background else f"{_WRITE}/start")


def tell_blocked(blocked_s: float, *, waited_s: float, snapshot_s: float) -> None:
    """Records how long a caller of a background save was blocked.

    Args:
        blocked_s: Seconds in all.
        waited_s: Seconds before the copy: mostly the wait for the previous save.
        snapshot_s: Seconds of the copy to host memory.
    """
    record = jax.monitoring.record_event_duration_secs
    for events in (_EVENTS, f"{_WRITE}/async"):
        record(f"{events}/blocking_duration_secs", blocked_s)
    for name in ("/jax/checkpoint/write/wait_for_prev_duration_secs", f"{_WRITE}/blocking_wait_prev_duration_secs"):
        record(name, waited_s)
    record(f"{_WRITE}/blocking_d2h_duration_secs", snapshot_s)


def tell_background(stats: SaveStats, path: object, *, chunks: int, total_s: float | None) -> None:
    """Records the background part of a save.

    Args:
        stats: Figures of the save.
        path: Path of the checkpoint.
        chunks: Number of chunks that this process wrote.
        total_s: Seconds from the call to the commit. None in all processes but the primary one, as in Orbax.
    """
    record = jax.monitoring.record_event_duration_secs
    record(f"{_EVENTS}/commit_future_count", chunks)  # a count, which older versions of Orbax record as a duration
    jax.monitoring.record_scalar(f"{_EVENTS}/commit_future_count", chunks)
    record(f"{_EVENTS}/commit_duration_sec", stats.durable_s)
    record(f"{_EVENTS}/thread_duration_sec", stats.committed_s)
    record(f"{_WRITE}/background_ts_duration_secs", stats.durable_s)
    record(f"{_WRITE}/background_duration_secs", stats.committed_s)
    record(f"{_WRITE}/background_finalize_secs", stats.committed_s - stats.durable_s)
    if total_s is not None:
        record(f"{_EVENTS}/total_duration_secs", total_s)
        record(f"{_WRITE}/async/total_duration_secs", total_s, storage_type=_STORAGE)
    _tell_saved(stats, path)


def tell_now(stats: SaveStats, path: object) -> None:
    """Records a save that the caller waited for."""
    for name in ("blocking_duration_secs", "total_duration_secs"):
        jax.monitoring.record_event_duration_secs(f"{_WRITE}/{name}", stats.blocked_s, storage_type=_STORAGE)
    _tell_saved(stats, path)


def tell_written(size_bytes: int, duration_s: float, folder: object) -> None:
    """Records in the log and for listeners how fast this process wrote its part."""
    gib, gib_per_s = size_bytes / _GIB, size_bytes / _GIB / max(duration_s, 1e-9)
    logger.info(
        "process %d wrote %d bytes in %.3f s (%.3f GiB/s) to %s",
        jax.process_index(),
        size_bytes,
        duration_s,
        gib_per_s,
        folder,
    )
    jax.monitoring.record_scalar(f"{_WRITE}/gbytes", gib)
    jax.monitoring.record_scalar(f"{_WRITE}/gbytes_per_sec", gib_per_s)
    _tell_worker(f"{_WRITE}/worker", gib, duration_s)


def tell_read(size_bytes: int, duration_s: float, folder: object) -> None:
    """Records in the log and for listeners how fast this process read its part."""
    duration_s = max(duration_s, 1e-9)
    gib, rate = size_bytes / _GIB, size_bytes / duration_s
    logger.info(
        "process %d read %d bytes of %s in %.3f s, %.3g bytes/s",
        jax.process_index(),
        size_bytes,
        folder,
        duration_s,
        rate,
    )
    jax.monitoring.record_scalar(READ_EVENT, rate)
    jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", gib)
    jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", gib / duration_s)
    _tell_worker(f"{_READ}/worker", gib, duration_s)


def tell_replica_read(duration_s: float) -> None:
    """Records the seconds until this process has read its part of the shared arrays. Other replicas read nothing."""
    for event in (REPLICA_READ_EVENT, "/jax/checkpoint/read/primary_replica_deserialization_duration_secs"):
        jax.monitoring.record_event_duration_secs(event, duration_s)


def tell_broadcast(duration_s: float) -> None:
    """Records how long it took to send the primary replica's values to the others."""
    for event in (BROADCAST_EVENT, "/jax/checkpoint/read/broadcast_duration_secs"):
        jax.monitoring.record_event_duration_secs(event, duration_s)


def tell_snapshot_taken(blocked_s: float) -> None:
    """Records how long the training waited for a snapshot."""
    jax.monitoring.record_event_duration_secs(SNAPSHOT_BLOCKED_EVENT, blocked_s)


def tell_snapshot_safe(sent_s: float, part_bytes: int) -> None:
    """Records that all parts of a snapshot are there."""
    jax.monitoring.record_event_duration_secs(SNAPSHOT_SENT_EVENT, sent_s)
    jax.monitoring.record_scalar(SNAPSHOT_BYTES_EVENT, part_bytes)


def tell_snapshot_skipped() -> None:
    """Records that a snapshot was due and is not there."""
    jax.monitoring.record_event(SNAPSHOT_SKIPPED_EVENT)


def tell_restore_started() -> None:
    """Records that a checkpoint is about to be read."""
    jax.monitoring.record_event(f"{_READ}/start")


def tell_restored(duration_s: float) -> None:
    """Records that a checkpoint was restored, and how long that took."""
    for name in ("blocking_duration_secs", "total_duration_secs"):
        jax.monitoring.record_event_duration_secs(f"{_READ}/{name}", duration_s, storage_type=_STORAGE)
    jax.monitoring.record_event(f"{_READ}/success")


def _tell_worker(events: str, gib: float, duration_s: float) -> None:
    jax.monitoring.record_event_duration_secs(f"{events}/total_duration_secs", duration_s, storage_type=_STORAGE)
    jax.monitoring.record_scalar(f"{events}/io/requested/gbytes", gib, storage_type=_STORAGE)
    rate = gib / max(duration_s, 1e-9)
    jax.monitoring.record_scalar(f"{events}/io/requested/throughput/gbytes_per_sec", rate, storage_type=_STORAGE)


def _tell_saved(stats: SaveStats, path: object) -> None:
    jax.monitoring.record_event(f"{_WRITE}/success")
    jax.monitoring.record_scalar(f"{_EVENTS}/bytes", stats.bytes)
    logger.info(
        "saved %s step=%s bytes=%d blocked_s=%.3f snapshot_s=%.3f durable_s=%.3f committed_s=%.3f",
        path,
        stats.step,
        stats.bytes,
        stats.blocked_s,
        stats.snapshot_s,
        stats.durable_s,
        stats.committed_s,
    )
