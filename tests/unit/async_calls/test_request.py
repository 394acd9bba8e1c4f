"""Requests are plain records, which are frozen when they are scheduled."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable

import pytest

from gracepoint.async_calls import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    gc_paused,
)


def test_a_request_runs_as_a_whole_in_this_thread() -> None:
    done: list[object] = []
    request = AsyncRequest(lambda *a, **k: done.append((a, k)), (1,), [lambda: done.append("f")], {"x": 2}, lambda: "p")
    request.add_finalize_fn(lambda: done.append("g"))
    request.execute_sync()
    assert done == [(("p", 1), {"x": 2}), "f", "g"]


def test_names_arguments_and_defaults_are_those_of_megatron() -> None:
    """As megatron.core.dist_checkpointing.strategies.async_utils documents them. Further arguments are keywords."""
    fields = ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn", "is_frozen", "call_idx")
    assert AsyncRequest._fields == fields
    defaults: dict[str, object] = {"async_fn_kwargs": {}, "preload_fn": None, "is_frozen": False, "call_idx": 0}
    assert AsyncRequest._field_defaults == defaults
    assert inspect.isabstract(AsyncCaller)
    for caller in (AsyncCaller, TemporalAsyncCaller, PersistentAsyncCaller):
        assert positional(caller.schedule_async_call) == {"async_req": None}
        assert positional(caller.is_current_async_call_done) == {"blocking": False, "no_dist": False}
        assert positional(caller.sync_all_async_calls) == {"is_alive": None}
        assert positional(caller.close) == {"abort": False}
        assert positional(caller.__del__) == {}
    assert positional(AsyncCallsQueue.__init__) == {"persistent": False}
    assert positional(AsyncCallsQueue.schedule_async_request) == {"async_request": None}
    assert positional(AsyncCallsQueue.maybe_finalize_async_calls) == {"blocking": False, "no_dist": False}
    assert positional(AsyncCallsQueue.close) == {"abort": False}
    for persistent, kind in ((False, TemporalAsyncCaller), (True, PersistentAsyncCaller)):
        queue = AsyncCallsQueue(persistent)
        assert isinstance(queue._get_async_caller(), kind)
        queue.close()


def positional(function: Callable[..., object]) -> dict[str, object]:
    """Returns the arguments that may be given by their place, with their defaults. None: there is none."""
    found = list(inspect.signature(function).parameters.values())[1:]
    places = [each for each in found if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return {each.name: None if each.default is inspect.Parameter.empty else each.default for each in places}


def test_nothing_can_be_added_to_a_frozen_request() -> None:
    request = AsyncRequest(None, (), [])
    frozen = request.freeze()
    assert (frozen.is_frozen, request.is_frozen) == (True, False)
    with pytest.raises(RuntimeError, match="frozen because it was scheduled"):
        frozen.add_finalize_fn(print)
    request.add_finalize_fn(print)
    assert frozen.finalize_fns == ()


def test_finalize_functions_are_added_to_a_list() -> None:
    with pytest.raises(TypeError, match="finalize_fns must be a list, found tuple"):
        AsyncRequest(None, (), ()).add_finalize_fn(print)


def test_garbage_is_not_collected_while_bytes_are_copied() -> None:
    seen: list[bool] = []
    AsyncRequest(None, (), [], {}, lambda: seen.append(gc.isenabled())).execute_sync()
    assert (seen, gc.isenabled()) == ([False], True)


def test_collection_continues_when_the_last_of_several_threads_is_done() -> None:
    entered, leave = threading.Barrier(2), threading.Event()

    def hold() -> None:
        with gc_paused():
            entered.wait(60)
            leave.wait(60)

    thread = threading.Thread(target=hold)
    with gc_paused():
        thread.start()
        entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join(60)
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
