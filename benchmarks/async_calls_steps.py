"""The training step of ``benchmarks.async_calls``, and where its time goes: on a core, and waiting for one."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

_STEP_S = 0.005


@dataclasses.dataclass(frozen=True)
class Steps:
    """What steps took, in seconds for each step.

    Attributes:
        median_s: The median.
        ran_s: CPU time of this process.
        waited_s: Time for which threads of this process were ready to run and had no core, of all threads together.
    """

    median_s: float
    ran_s: float
    waited_s: float

    def over(self, before: Steps, after: Steps) -> SlowDown:
        """Compares with the mean of what steps took alone."""
        return SlowDown(
            2 * self.median_s / (before.median_s + after.median_s),
            2 * self.ran_s / (before.ran_s + after.ran_s),
            self.waited_s - (before.waited_s + after.waited_s) / 2,
        )


@dataclasses.dataclass(frozen=True)
class SlowDown:
    """How much slower steps are beside a save.

    Attributes:
        median: Ratio of the medians.
        ran: Ratio of the CPU times.
        waits_s: Seconds that a step waits for a core in addition.
    """

    median: float
    ran: float
    waits_s: float


def make_step() -> Callable[[], None]:
    """Returns a training step that takes about 5 ms alone."""
    x = jnp.ones((256, 256))

    def multiply(x: Any, times: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, y: jnp.tanh(y @ x) * 0.5, x)

    run = jax.jit(multiply)
    jax.block_until_ready(run(x, 10))
    began = time.monotonic()
    jax.block_until_ready(run(x, 200))
    times = max(1, round(200 * _STEP_S / (time.monotonic() - began)))
    return lambda: jax.block_until_ready(run(x, times))


def repeat(step: Callable[[], None], ended: Callable[[], bool], at_most_s: float) -> Steps:
    """Repeats a step until ``ended``, or until so many seconds have passed."""
    durations, began = [], time.monotonic()
    ran_before_s, waited_before_s = _cpu()
    while True:
        before = time.monotonic()
        step()
        after = time.monotonic()
        durations.append(after - before)
        if ended() or after - began > at_most_s:
            break
    ran_s, waited_s = _cpu()
    count = len(durations)
    return Steps(statistics.median(durations), (ran_s - ran_before_s) / count, (waited_s - waited_before_s) / count)


def _cpu() -> tuple[float, float]:
    """Returns the seconds that the threads of this process have run, and have waited for a core."""
    ran_ns = waited_ns = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return ran_ns / 1e9, waited_ns / 1e9
