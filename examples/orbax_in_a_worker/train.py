"""Trains a small model and saves it with Orbax in a worker process, so that training steps are not slowed down.

    python train.py DIRECTORY [STEPS]

``gracepoint.async_calls`` copies the state into shared memory, and the worker saves it from there. The copy is all that
the training waits for. What was copied is saved even if this process is killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import saving  # type: ignore[import-not-found]  # the module beside this one

from gracepoint.async_calls import AsyncCallsQueue, AsyncRequest

SAVE_EVERY = 10


@jax.jit
def train_step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"w": state["w"] * 0.99 + 0.01, "step": state["step"] + 1}


def main(directory: Path, steps: int) -> None:
    queue = AsyncCallsQueue(persistent=True)
    state = {"w": jnp.zeros((256, 256)), "step": jnp.zeros((), jnp.int32)}
    for step in range(1, steps + 1):
        state = train_step(state)
        if step % SAVE_EVERY == 0:
            target = directory / str(step)
            queue.schedule_async_request(
                AsyncRequest(
                    saving.save,
                    (str(target),),
                    [lambda target=target: print("saved", target, flush=True)],
                    preload_fn=lambda state=state: jax.device_get(state),
                )
            )
        queue.maybe_finalize_async_calls()  # the same answer in all processes, and no wait
    queue.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 30)
