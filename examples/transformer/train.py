"""Trains a small transformer on the Python standard library's sources, and survives preemptions.

    python examples/transformer/train.py --steps 200 --directory /tmp/checkpoints

The lines that make it survive are those with ``session``. Under a JobSet with a CheckpointPolicy no flag is
needed for them: the settings come from the environment that the operator injects.
"""

from __future__ import annotations

import argparse
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import data
import jax
import model
import record
import state as train_state

import gracepoint


def main() -> None:
    """Trains until ``--steps``, or until a preemption ends it."""
    flags = _flags()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("gracepoint").setLevel(logging.INFO)
    config = model.Config(length=flags.length, width=flags.width, layers=flags.layers)
    session = gracepoint.attach(flags.directory, save_every_steps=flags.save_every)

    process, processes = jax.process_index(), jax.process_count()
    mesh = train_state.mesh()
    init_state = train_state.init(config, mesh, flags.seed)
    rows = train_state.batch_sharding(mesh)
    batch = jax.ShapeDtypeStruct((flags.batch, config.length + 1), "uint8", sharding=rows)
    # Compiled, or loaded, while the text and the checkpoint are read.
    train_step = session.compile(
        train_state.train_step(config, mesh, flags.learning_rate), jax.eval_shape(init_state), batch
    )

    text = data.standard_library(flags.text_bytes)
    loader = data.Loader(
        data.windows(text, config.length, process_index=process, process_count=processes),
        flags.batch // processes,
        seed=flags.seed,
        place=functools.partial(jax.make_array_from_process_local_data, rows),
    )

    session.host_state("data", loader.state, loader.restore)
    state, step = session.restore(init=init_state)

    losses = record.Losses(flags.output, process, on_step=_progress(flags.print_every, flags.steps))
    try:
        while step < flags.steps:
            due_s = time.monotonic() + flags.pace
            state, loss = train_step(state, next(loader))
            step += 1
            losses.add(step, loss, loader.digest)
            session.step(step, state)
            time.sleep(max(0.0, due_s - time.monotonic()))
        jax.block_until_ready(state)  # so that every loss is there to be recorded, however long it takes
    finally:  # also when session.step raises Preempted, which ends the script with the policy's exit code
        losses.close()
        loader.close()

    record.write_result(flags.output, process, {"step": step, "digest": train_state.digest(state)})
    session.close()


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer that survives preemptions.")
    parser.add_argument("--directory", help="where checkpoints go (default: as the policy says)")
    parser.add_argument("--save-every", type=int, help="steps between saves (default: as the policy says)")
    parser.add_argument("--output", type=Path, default=Path("build/transformer"), help="folder of losses and results")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="examples a step, over all processes")
    parser.add_argument("--length", type=int, default=64, help="bytes an example")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-bytes", type=int, default=4_000_000)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--print-every", type=int, default=20, help="steps between lines of progress")
    return parser.parse_args()


def _progress(every: int, steps: int) -> Callable[[int, float], None]:
    """Returns what prints a line every ``every`` steps."""
    last_s, last_step = time.monotonic(), 0

    def on_step(step: int, loss: float) -> None:
        nonlocal last_s, last_step
        if step % every and step != steps:
            return
        now_s = time.monotonic()
        took = f", {(now_s - last_s) / (step - last_step) * 1000:.0f} ms a step" if last_step else ""
        print(f"step {step} of {steps}: loss {loss:.4f}{took}", flush=True)
        last_s, last_step = now_s, step

    return on_step


if __name__ == "__main__":
    main()
