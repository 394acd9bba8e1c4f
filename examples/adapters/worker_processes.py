"""A data loader with worker processes, which live until the save is done. Lines with a plus are
Gracepoint's, and a comment with a minus is the line that one replaces.

Some launchers send SIGTERM to the whole process group. Workers that it ends leave the training without data before the
step that all processes agree on. So workers ignore it. They end with the executor, which sends no signals.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from model import FEATURES, batch, squared_error

import gracepoint

#: Batches that are made ahead.
AHEAD = 4


def begin_worker() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@jax.jit
def train_step(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: squared_error(x @ w, y))(w)
    return w - 0.05 * gradient, loss


def batches(workers: ProcessPoolExecutor, first: int, last: int) -> Iterator[tuple[int, Any]]:
    """Yields the batches of the steps in order. Workers make the next ones meanwhile."""
    waiting = deque((step, workers.submit(batch, step)) for step in range(first, min(first + AHEAD, last + 1)))
    while waiting:
        step, made = waiting.popleft()
        if step + AHEAD <= last:
            waiting.append((step + AHEAD, workers.submit(batch, step + AHEAD)))
        yield step, made.result()


def main(directory: str, steps: int, report: Callable[[int, float], object] = print) -> None:
    workers = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), begin_worker)
    try:
        session = gracepoint.attach(directory)  # +
        # - w, first = jnp.zeros((FEATURES, 1)), 0
        w, first = session.restore(init=lambda: jnp.zeros((FEATURES, 1)))  # +
        for step, (x, y) in batches(workers, first + 1, steps):
            w, loss = train_step(w, x, y)
            report(step, float(loss))
            session.step(step, w)  # +
        session.close()
    finally:
        workers.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
