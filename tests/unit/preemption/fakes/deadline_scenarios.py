"""What the deadline plan chooses, as a table. docs/deadline.md has some of it in words."""

from __future__ import annotations

from typing import NamedTuple

from gracepoint.deadline import Choice, Evacuation, NewestSnapshot, Situation, SnapshotState

GB = 1_000_000_000
STEP = 1000
_IN_FLIGHT = 2  # steps that drain, beside the one that is computed


class Scenario(NamedTuple):
    """One row.

    Attributes:
        state_gb: The state, over all processes.
        gb_per_s: How fast saves have been; None: none was measured.
        left_s: Until everything must be done.
        step_s: A step.
        behind: How many steps the newest snapshot is older than the current one; None: there is none.
        snapshot: Where it is.
        done: Which part of its save is on the disk.
        choice: What is expected.
        lost: Steps.
        sends: Seconds in which all processes send their parts to two snapshot servers; None: there are no servers.
    """

    state_gb: float
    gb_per_s: float | None
    left_s: float
    step_s: float
    behind: int | None
    snapshot: SnapshotState | None
    done: float
    choice: Choice
    lost: int
    sends: float | None = None

    def situation(self, processes: int = 16, margin: float = 1.2) -> Situation:
        newest = None
        if self.behind is not None and self.snapshot is not None:
            share = round(self.state_gb * GB / processes)
            done_bytes = round(share * self.done)
            elapsed_s = self.state_gb * self.done / (self.gb_per_s or 1.6)
            newest = NewestSnapshot(
                step=STEP - self.behind,
                state=self.snapshot,
                done_bytes=done_bytes,
                left_bytes=share - done_bytes,
                elapsed_s=elapsed_s,
            )
        bytes_per_s = None if self.gb_per_s is None else self.gb_per_s * GB
        evacuation = None
        if self.sends is not None:
            part_bytes = round(self.state_gb * GB / processes)
            evacuation = Evacuation(part_bytes=part_bytes, copies=2, bytes_per_s=2 * part_bytes / self.sends)
        return Situation(
            step=STEP,
            left_s=self.left_s,
            state_bytes=round(self.state_gb * GB),
            process_count=processes,
            drain_s=(_IN_FLIGHT + 1) * self.step_s,
            streamed_bytes_per_s=bytes_per_s,
            snapshot_bytes_per_s=bytes_per_s,
            snapshot=newest,
            margin=margin,
            evacuation=evacuation,
        )


W, C, H, G = SnapshotState.WRITING, SnapshotState.COMMITTED, SnapshotState.HELD, SnapshotState.GONE

SCENARIOS = [
    # Spot with 30 s: whether the state fits.
    Scenario(16, 4, 27, 0.2, None, None, 0, Choice.SAVE_NOW, 0),
    Scenario(100, 4, 27, 0.2, None, None, 0, Choice.SAVE_NOW, 0),
    Scenario(160, 4, 27, 0.2, None, None, 0, Choice.IMPOSSIBLE, 0),
    Scenario(16, 4, 27, 10, None, None, 0, Choice.IMPOSSIBLE, 0),
    Scenario(16, None, 27, 0.2, None, None, 0, Choice.SAVE_NOW, 0),
    Scenario(100, None, 27, 0.2, None, None, 0, Choice.IMPOSSIBLE, 0),
    # A periodic save is under way.
    Scenario(16, 4, 27, 0.2, 10, W, 0.5, Choice.FINISH_IN_FLIGHT, 0),
    Scenario(80, 4, 27, 0.2, 10, W, 0.95, Choice.FINISH_IN_FLIGHT, 0),
    Scenario(80, 4, 27, 0.2, 10, W, 0.2, Choice.CANCEL_AND_SAVE, 0),
    Scenario(100, 4, 27, 0.2, 10, W, 0.95, Choice.FINISH_IN_FLIGHT, 0),
    Scenario(100, 4, 27, 0.2, 10, W, 0.5, Choice.PROMOTE, 10),
    Scenario(160, 4, 27, 0.2, 25, W, 0.9, Choice.PROMOTE, 25),
    Scenario(100, 4, 27, 0.2, 10, W, 0.05, Choice.CANCEL_AND_SAVE, 0),
    Scenario(160, 4, 27, 0.2, 25, W, 0.1, Choice.IMPOSSIBLE, 0),
    Scenario(16, 4, 27, 10, 2, W, 0.5, Choice.PROMOTE, 2),
    Scenario(160, 4, 27, 0.2, 0, W, 0.9, Choice.FINISH_IN_FLIGHT, 0),
    Scenario(160, None, 27, 0.2, 25, W, 0.9, Choice.PROMOTE, 25),
    # The periodic save has ended, well or not.
    Scenario(16, 4, 27, 0.2, 10, C, 1, Choice.SAVE_NOW, 0),
    Scenario(160, 4, 27, 0.2, 0, C, 1, Choice.SAVE_NOW, 0),
    Scenario(16, 4, 27, 0.2, 10, H, 0.5, Choice.SAVE_NOW, 0),
    Scenario(16, 4, 27, 10, 10, H, 0.5, Choice.PROMOTE, 10),
    Scenario(16, 4, 27, 10, 10, G, 0.5, Choice.IMPOSSIBLE, 0),
    # A snapshot is not promoted if it is committed, or if a newer step is: such a snapshot counts as committed.
    Scenario(89, 4, 27, 0.2, 10, H, 0.5, Choice.PROMOTE, 10),
    Scenario(89, 4, 27, 0.2, 10, C, 0.5, Choice.SAVE_NOW, 0),
    # There are snapshot servers.
    Scenario(16, 4, 27, 0.2, None, None, 0, Choice.SAVE_NOW, 0, 3),
    Scenario(160, 4, 27, 0.2, None, None, 0, Choice.EVACUATE, 0, 12),
    Scenario(100, 4, 27, 0.2, 10, W, 0.5, Choice.EVACUATE, 0, 12),
    Scenario(100, 4, 27, 0.2, 10, W, 0.05, Choice.CANCEL_AND_SAVE, 0, 24),
    Scenario(160, 4, 27, 0.2, 25, W, 0.9, Choice.PROMOTE, 25, 24),
    Scenario(160, 4, 27, 0.2, None, None, 0, Choice.EVACUATE, 0, 24),
    Scenario(160, 4, 27, 0.2, None, None, 0, Choice.EVACUATE, 0, 30),
    # A maintenance event an hour ahead; a grace period of a second.
    Scenario(1000, 4, 3600, 10, 50, W, 0.1, Choice.FINISH_IN_FLIGHT, 0),
    Scenario(1, 4, 1, 0.01, None, None, 0, Choice.SAVE_NOW, 0),
    Scenario(1, 4, 0, 0.01, None, None, 0, Choice.IMPOSSIBLE, 0),
]
