"""What callers hand to the public functions: checks of what no type checker sees, and how a value is shown in an error.

An error shows a value that is short. Of all others, such as a state in the place of another argument, it names the
type: the values of a thousand arrays would fill the log.
"""

from __future__ import annotations

import logging
import operator
import os
import sys
from typing import Any

from gracepoint.errors import SettingsError
from gracepoint.jax_isolation import to_numpy

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 100

_said: set[str] = set()  # the functions of which it was said that they wait for devices


def shown(value: Any) -> str:
    """Returns a value for an error: itself if it is short and simple, else what it is."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | os.PathLike):
        text = repr(value)
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    jax = sys.modules.get("jax")
    kind = "jax.Array" if jax is not None and isinstance(value, jax.Array) else type(value).__qualname__
    kind = f"{'an' if kind[:1].lower() in ('a', 'e', 'i', 'o', 'u') else 'a'} {kind}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return f"{kind} of {dtype}{list(shape)}" if isinstance(shape, tuple) and dtype is not None else kind


def step_number(call: str, step: Any) -> int:
    """Returns a step as a plain ``int``. One of numpy or JAX cannot be written as JSON, and is slow to compare.

    Warns once of a step on a device. ``call`` is the public function with its arguments, for messages.

    Raises:
        SettingsError: It is no number of steps.
    """
    jax = sys.modules.get("jax")
    number = step
    if jax is not None and isinstance(step, jax.Array) and step.ndim == 0:
        if call not in _said:
            _said.add(call)
            logger.warning(
                "%s: the step is on a device, so each call waits until the device has computed it, and none runs "
                "ahead: count the steps with a Python int, and pass that",
                call,
            )
        number = to_numpy(step) if jax.numpy.issubdtype(step.dtype, jax.numpy.integer) else None
    try:
        number = operator.index(number)
    except TypeError:
        number = -1
    if number < 0:
        raise SettingsError(
            f"{call}: expected how many steps the state has seen, an integer from 0, found {shown(step)}"
        )
    return number


def check_state(call: str, state: Any) -> None:
    """Checks that what is given as the train state is one: another argument may have taken its place.

    Raises:
        SettingsError: It is None, a number or a text.
    """
    if state is None or isinstance(state, bool | int | float | str | os.PathLike):
        raise SettingsError(f"{call}: expected the train state, found {shown(state)}")


def check_kind(call: str, value: Any, kind: type) -> None:
    """Checks that an argument is of the class that it must be of. None is none.

    Raises:
        SettingsError: It is of another class.
    """
    if value is not None and not isinstance(value, kind):
        raise SettingsError(f"{call}: expected {kind.__qualname__}(...), found {shown(value)}")
