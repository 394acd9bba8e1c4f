"""Asynchronous calls: run a function in a thread or in another process, and finish it in all processes together.

A training process schedules an ``AsyncRequest``, for example a save. A **caller** runs the request's function in the
background: ``ThreadAsyncCaller`` in a thread, ``TemporalAsyncCaller`` in a separate process for each call, and
``PersistentAsyncCaller`` in one process for all calls. ``AsyncCallsQueue`` keeps the calls in order, and runs the
finalize functions of a call in the training thread once the call has ended in *all* processes of the job.

The names are those of ``megatron.core.dist_checkpointing.strategies.async_utils``. ``docs/async-calls.md`` lists what
differs. This package needs the standard library alone. Arrays travel to a worker process through shared memory, as
out-of-band buffers of pickle protocol 5 (PEP 574).
"""

from gracepoint.async_calls.caller import AsyncCaller, AsyncRequest, ThreadAsyncCaller, gc_paused
from gracepoint.async_calls.queue import AsyncCallsQueue, PersistentAsyncCaller, TemporalAsyncCaller
from gracepoint.errors import AsyncCallFailed
from gracepoint.threads import Ending

__all__ = [
    "AsyncCallFailed",
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "Ending",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
    "ThreadAsyncCaller",
    "gc_paused",
]
