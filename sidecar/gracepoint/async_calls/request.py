"""One asynchronous call: what runs in the background, what runs before, and what runs after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gracepoint.async_calls.gc_pause import gc_paused


class AsyncRequest(NamedTuple):
    """A call to schedule.

    Attributes:
        async_fn: Runs in the background. None: nothing runs, and the call ends at once. For a worker process it must be
            a function that can be imported by its name: no lambda, no function inside a function, and not from
            ``__main__``.
        async_fn_args: Positional arguments of ``async_fn``.
        finalize_fns: Run in the training thread, in this order and without arguments, once the call has ended in all
            processes.
        async_fn_kwargs: Keyword arguments of ``async_fn``.
        preload_fn: Runs in the training process before ``schedule_async_request`` returns, without arguments. It copies
            from the devices to the host. What it returns becomes the first positional argument of ``async_fn``, before
            ``async_fn_args``. JAX arrays in it arrive as NumPy arrays.
        is_frozen: True once the request is scheduled. Finalize functions can no longer be added.
        call_idx: Number of the call in its queue, from 0. Set when the request is scheduled.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: Sequence[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a function that runs after the existing finalize functions.

        Raises:
            RuntimeError: The request is frozen.
            TypeError: ``finalize_fns`` is not a list.
        """
        if self.is_frozen:
            raise RuntimeError(
                "add_finalize_fn: the request is frozen because it was scheduled; add the function before scheduling it"
            )
        if not isinstance(self.finalize_fns, list):
            raise TypeError(f"add_finalize_fn: finalize_fns must be a list, found {type(self.finalize_fns).__name__}")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Runs the whole call in this thread: preload, function, finalize functions.

        It does not meet other processes. A function that needs them to have finished meets them itself.
        """
        arguments = self.preloaded_args()
        if self.async_fn is not None:
            self.async_fn(*arguments, **self.async_fn_kwargs)
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """Returns a copy to which no finalize function can be added."""
        return self._replace(finalize_fns=tuple(self.finalize_fns), is_frozen=True)

    def preloaded_args(self) -> tuple[Any, ...]:
        """Runs ``preload_fn`` without garbage collection. Returns the positional arguments of ``async_fn``."""
        if self.preload_fn is None:
            return tuple(self.async_fn_args)
        with gc_paused():
            return (self.preload_fn(), *self.async_fn_args)
