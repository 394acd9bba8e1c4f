"""Keras 3 on JAX: a callback saves and restores; the call of ``fit`` gets it. Lines with a plus are Gracepoint's, and
a comment with a minus is the line that one replaces.

``KERAS_BACKEND=jax python keras_fit.py DIRECTORY STEPS``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
from model import FEATURES
from model import batch as batch_of

import gracepoint

STEPS_PER_EPOCH = 5


class GracepointCallback(keras.callbacks.Callback):
    """Saves and restores the variables of a model and its optimizer.

    Args:
        directory: See ``gracepoint.attach``.
        model: A compiled and built model. It is restored at once.

    Attributes:
        step: Number of batches that the model has been trained with.
    """

    def __init__(self, directory: str, model: keras.Model) -> None:
        super().__init__()
        model.optimizer.build(model.trainable_variables)
        self._variables = [*model.variables, *model.optimizer.variables]
        self._session = gracepoint.attach(directory)
        state, self.step = self._session.restore(like=self._state(), donate=False)
        for variable, value in zip(self._variables, state, strict=True):
            variable.assign(value)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        # While fit runs, the newest values are the trainer's own.
        self.model.jax_state_sync()
        self._session.step(self.step, self._state())

    def on_train_end(self, logs: Any = None) -> None:
        self._session.close()

    def _state(self) -> list[Any]:
        return [variable.value for variable in self._variables]


class Report(keras.callbacks.Callback):
    """Tells the loss after each batch, and stops after a number of batches. fit's own loss is the mean of an epoch,
    and an epoch begins anew with a restart."""

    def __init__(self, first: int, steps: int, report: Callable[[int, float], object]) -> None:
        super().__init__()
        self._step, self._steps, self._report = first, steps, report

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        self.model.jax_state_sync()
        x, y = batch_of(self._step)
        weights, bias = self.model.get_weights()
        self._report(self._step, float(((x @ weights + bias - y) ** 2).mean()))
        self.model.stop_training = self._step >= self._steps


def batches(first: int) -> Iterator[tuple[Any, Any]]:
    step = first
    while True:
        step += 1
        yield batch_of(step)


def main(directory: str, steps: int, report: Callable[[int, float], object] = print) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    saves = GracepointCallback(directory, model)  # +
    model.fit(
        # - batches(0),
        batches(saves.step),  # +
        epochs=steps // STEPS_PER_EPOCH + 1,
        steps_per_epoch=STEPS_PER_EPOCH,
        verbose=0,
        # - callbacks=[Report(0, steps, report)],
        callbacks=[Report(saves.step, steps, report), saves],  # +
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
