"""A training loop as MaxText has it: Orbax's CheckpointManager with the items ``items`` and ``iter``.

python examples/from_orbax/with_orbax.py /tmp/run 8
"""

from __future__ import annotations

import sys

import jax
import orbax.checkpoint as ocp
import parts
from iterator_item import IteratorHandler, IteratorRestore, IteratorSave


def create_manager(directory: str, save_every: int) -> ocp.CheckpointManager:
    """Returns the manager of all checkpoints of a run."""
    return ocp.CheckpointManager(
        directory,
        item_names=("items", "iter"),
        item_handlers={"items": ocp.PyTreeCheckpointHandler(), "iter": IteratorHandler()},
        options=ocp.CheckpointManagerOptions(save_interval_steps=save_every, max_to_keep=3),
    )


def restore(manager: ocp.CheckpointManager, form: parts.State, batches: parts.Batches) -> parts.State | None:
    """Returns the newest state, and moves ``batches`` to where they were. Returns None if there is none."""
    step = manager.latest_step()
    if step is None:
        return None
    args = ocp.checkpoint_utils.construct_restore_args(form)
    found = manager.restore(
        step,
        args=ocp.args.Composite(items=ocp.args.PyTreeRestore(form, restore_args=args), iter=IteratorRestore(batches)),
    )
    return dict(found["items"])


def save(
    manager: ocp.CheckpointManager, step: int, state: parts.State, batches: parts.Batches, *, force: bool = False
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
            if manager.reached_preemption(step):
                break
        if manager.latest_step() != int(state["step"]):
            save(manager, int(state["step"]), state, batches, force=True)
        manager.wait_until_finished()
    return losses, state


if __name__ == "__main__":
    print(*train(sys.argv[1], int(sys.argv[2]))[0], sep="\n")
