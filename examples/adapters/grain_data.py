"""Grain: the iterator's state is saved with the arrays. Lines with a plus are
Gracepoint's, and a comment with a minus is the line that one replaces.

Process p of N takes every N-th record from p on, in batches of the global batch's N-th part. Batch b of all processes
together is then the same records for every N, and the state, the number of batches, is the same in all processes. So a
restarted job with another number of processes goes on with the next batch, and each record is used once. If the global
batch shall follow the number of processes, use ``gracepoint.elastic.ElasticData``, which counts records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import grain
import jax
import jax.numpy as jnp
from model import BATCH, FEATURES, batch, squared_error

import gracepoint

RECORDS = 64 * BATCH


def records(process: int, processes: int) -> grain.DatasetIterator:
    """Returns this process's part of every global batch."""
    source = grain.MapDataset.source(range(RECORDS)).shuffle(seed=7).repeat()
    return iter(source[process::processes].batch(BATCH // processes).to_iter_dataset())


@jax.jit
def train_step(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: squared_error(x @ w, y))(w)
    return w - 0.05 * gradient, loss


def main(directory: str, steps: int, report: Callable[[int, float], object] = print) -> None:
    session = gracepoint.attach(directory)  # +
    data = records(jax.process_index(), jax.process_count())
    # - w, first = jnp.zeros((FEATURES, 1)), 0
    w, first = session.restore(init=lambda: jnp.zeros((FEATURES, 1)), data=data)  # +
    for step in range(first + 1, steps + 1):
        x, y = batch(int(next(data).sum()))
        w, loss = train_step(w, x, y)
        report(step, float(loss))
        session.step(step, w)  # +
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
