"""The loop of with_orbax.py with Gracepoint's CheckpointManager. It continues what the other has saved.

python examples/from_orbax/with_gracepoint.py /tmp/run 16
"""

from __future__ import annotations

import sys

import jax
import orbax.checkpoint as ocp
import parts
from iterator_item import IteratorHandler, IteratorRestore, IteratorSave

from gracepoint import multihost
from gracepoint.checkpoint import CheckpointManager, CheckpointNotFound


def create_manager(directory: str, save_every: int) -> CheckpointManager:
    """Returns the manager of all checkpoints of a run."""
    return CheckpointManager(
        directory,
        item_name="items",
        item_handlers={"iter": IteratorHandler()},
        save_every_steps=save_every,
        keep_last=3,
    )


def restore(manager: CheckpointManager, form: parts.State, batches: parts.Batches) -> parts.State | None:
    """Returns the newest state, and moves ``batches`` to where they were. Returns None if there is none."""
    args = ocp.args.Composite(items=ocp.args.PyTreeRestore(form), iter=IteratorRestore(batches))
    try:
        return dict(manager.restore(args=args)["items"])  # without a step: goes back over steps that are damaged
    except CheckpointNotFound:  # damage raises something else, and training does not begin again
        return None


def save(
    manager: CheckpointManager, step: int, state: parts.State, batches: parts.Batches, *, force: bool = False
) -> None:
    """Saves if it is time, or if ``force`` is set."""
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=2 << 30), state)
    items = ocp.args.PyTreeSave(state, save_args=save_args)
    manager.save(step, args=ocp.args.Composite(items=items, iter=IteratorSave(batches)), force=force)


def train(directory: str, steps: int, *, save_every: int = 4, seed: int = 0) -> tuple[list[float], parts.State]:
    """Trains up to ``steps``, from the newest checkpoint if there is one. Returns the losses and the state."""
    batches, losses = parts.Batches(seed), []
    with create_manager(directory, save_every) as manager:
        state = restore(manager, parts.form(seed), batches)
        if state is None:
            state = parts.first_state(seed)
        for step in range(int(state["step"]) + 1, steps + 1):
            state, loss = parts.train_step(state, next(batches))
            losses.append(float(loss))
            save(manager, step, state, batches)
            if multihost.reached_preemption(step, if_unknown=False):
                break
        manager.wait_until_finished()
        if manager.latest_step() != int(state["step"]):
            save(manager, int(state["step"]), state, batches, force=True)
    return losses, state


if __name__ == "__main__":
    print(*train(sys.argv[1], int(sys.argv[2]))[0], sep="\n")
