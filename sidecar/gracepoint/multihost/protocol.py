"""The agreement on one sync point, as plain steps: no threads, no clock, no network.

Every process passes the same sequence of sync points, numbered from 1, at its own pace (hosts run ahead of each
other and of their devices). When a notice comes, all must stop at the same one, and none may have passed it.

Two threads of a process take part, and the whole protocol rests on the order of their steps:

    training thread, at each sync point          background thread, once an epoch
    1. ``ordinal += 1``                           1. ``open_epoch`` (now the training thread is held)
    2. is an epoch open? no: train on             2. read ``ordinal``, publish it: "frozen"
       yes: wait for ``agreed``, then             3. when every process has published:
       ``verdict``                                   ``agreed = max(published) + 1``

Each side first writes its own word and then reads the other's. So if the background thread did not see an
ordinal, the training thread sees the epoch and waits there: no process can be past what it published before
``agreed`` is known. Hence ``agreed`` lies ahead of, or is, the point where each process is held. All compute
it from the same published numbers: there is no leader.

Training ends with one more sync point, ``finish``; its ordinal counts as published for every later epoch. An
agreed point at or beyond it means that training was over: there is nothing to save (state that no sync point
was given), and the epoch ends as Retracted.

The attributes are plain and written by one thread each (``ordinal`` by training; ``epoch`` and ``agreed`` by
the background thread, but for ``end_epoch``, which training calls when both are at rest).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Verdict(enum.Enum):
    """What a process does at a sync point of an open epoch."""

    WAIT = "wait"  # the agreed point is not known: go nowhere
    GO_ON = "go on"  # it lies ahead
    SAVE = "save"  # this is it
    OVER = "over"  # training is finished: this epoch has nothing to save


class Seat:
    """One process's place in the agreement."""

    __slots__ = ("agreed", "epoch", "finished", "ordinal")

    def __init__(self) -> None:
        self.ordinal = 0  # the sync point begun last
        self.epoch: int | None = None  # the open epoch; None: nothing is wrong
        self.agreed: int | None = None  # the open epoch's agreed sync point
        self.finished = False  # ``ordinal`` is the last there will be

    # The background thread's steps.

    def open_epoch(self, epoch: int) -> None:
        """Holds the training thread from its next sync point on."""
        if self.epoch is not None:
            raise RuntimeError(f"epoch {epoch} was opened while epoch {self.epoch} is open")
        self.epoch = epoch

    def settle(self, published: Mapping[int, int]) -> int:
        """Computes the agreed sync point from what every process has published."""
        self.agreed = max(published.values()) + 1
        return self.agreed

    # The training thread's steps.

    def begin(self) -> int:
        """Arrives at the next sync point."""
        self.ordinal += 1
        return self.ordinal

    def finish(self) -> int:
        """Arrives at the last sync point."""
        self.finished = True
        return self.begin()

    def verdict(self) -> Verdict:
        """What to do at the current sync point while an epoch is open."""
        if self.agreed is None:
            return Verdict.WAIT
        if self.ordinal > self.agreed:
            raise RuntimeError(f"passed sync point {self.ordinal}, beyond the agreed {self.agreed}")
        if self.finished:
            return Verdict.OVER
        return Verdict.SAVE if self.ordinal == self.agreed else Verdict.GO_ON

    def end_epoch(self) -> None:
        """Training goes on (a drill, a retraction): the seat is ready for the next epoch."""
        self.agreed = None
        self.epoch = None
