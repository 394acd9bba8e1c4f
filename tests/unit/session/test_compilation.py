"""Functions that are compiled in the background, beside the restore."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gracepoint
from gracepoint.errors import SettingsError
from gracepoint.session.compilation import Compilations, ProgramWatch
from tests.unit.checkpoint.fakes.thread_limit import refuse_threads

pytestmark = pytest.mark.integration

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def compiled() -> Iterator[Counter[str]]:
    """How many programs were compiled, by their names."""
    found = Counter[str]()

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            found[str(kwargs["fun_name"])] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)


@contextlib.contextmanager
def stage(name: str, *, computes: bool = False) -> Iterator[None]:
    yield


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    watch = ProgramWatch()
    made = Compilations(stage, watch)
    yield made
    made.close(WAIT_S)
    watch.close()


def one_device() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())


def state() -> dict[str, jax.Array]:
    return {"w": jnp.arange(8.0), "count": jnp.int32(0)}


def form(sharding: Any = None) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), jax.eval_shape(state))


def fresh_step() -> Callable[..., Any]:
    """Returns a function that no earlier test has compiled."""

    def train_step(state: Any, batch: Any, scale: int = 1, *, key: Any = 0) -> Any:
        return {"w": state["w"] * scale + batch.sum() + key, "count": state["count"] + 1}

    return train_step


BATCH = np.ones((4,), np.float32)


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(contextlib.nullcontext, id="nothing set"),
        pytest.param(lambda: jax.set_mesh(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])), id="mesh"),
        pytest.param(functools.partial(jax.default_matmul_precision, "float32"), id="precision"),
    ],
)
def test_the_call_compiles_nothing_whatever_is_set_for_the_thread(
    compilations: Compilations, compiled: Counter[str], context: Callable[[], Any]
) -> None:
    with context():
        step = compilations.begin(fresh_step(), (state(), BATCH), {}, {"donate_argnums": 0})
        step.wait()
        assert compiled["jit(train_step)"] == 1
        begun = state()
        after = step(begun, BATCH)
        assert begun["w"].is_deleted(), "the state is donated"
        step(after, BATCH)
        assert compiled["jit(train_step)"] == 1


def test_shardings_of_the_forms_are_those_of_the_program(compilations: Compilations, compiled: Counter[str]) -> None:
    where = one_device()
    batch = jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype, sharding=where)
    step = compilations.begin(fresh_step(), (form(where), batch), {}, {})
    step.wait()
    begun = jax.device_put(state(), where)
    programs = compiled.total()
    assert step(begun, jax.device_put(BATCH, where))["w"].sharding == where
    assert compiled.total() == programs


def test_static_and_keyword_arguments_are_those_of_the_call(compilations: Compilations, compiled: Counter[str]) -> None:
    jitted = jax.jit(fresh_step(), static_argnums=2)
    step = compilations.begin(jitted, (state(), BATCH, 3), {"key": np.float32(0)}, {})
    after = step(state(), BATCH, 3, key=np.float32(1))
    assert float(after["w"][1]) == 1.0 * 3 + 4 + 1
    assert compiled["jit(train_step)"] == 1


def test_arrays_that_are_announced_can_be_deleted(compilations: Compilations) -> None:
    announced = state()
    step = compilations.begin(fresh_step(), (announced, BATCH), {}, {})
    jax.tree.map(lambda array: array.delete(), announced)
    assert int(step(state(), BATCH)["count"]) == 1


def test_a_call_as_not_announced_is_compiled_again_and_said(
    compilations: Compilations, compiled: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    step = compilations.begin(fresh_step(), (form(), BATCH), {}, {})
    assert int(step(state(), np.ones((5,), np.float32))["count"]) == 1
    assert compiled["jit(train_step)"] == 2
    assert "compiled again, as the call differs from the one that was given to compile()" in caplog.text
    assert "argument [1]: expected float32[4], found float32[5]" in caplog.text


def test_an_error_of_the_compiler_comes_at_each_call(compilations: Compilations) -> None:
    options = {"no_such_option_of_xla": True}
    step = compilations.begin(fresh_step(), (form(), BATCH), {}, {"compiler_options": options})
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option_of_xla") as raised:
            step(state(), BATCH)
        assert any("backend_compile" in frame.name for frame in raised.traceback), "where it was compiled"


def test_an_error_of_the_function_comes_at_once(compilations: Compilations) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        compilations.begin(lambda state: state["w"] + "text", (form(),), {}, {})


def test_options_of_a_jitted_function_are_refused(compilations: Compilations) -> None:
    with pytest.raises(SettingsError, match=r"with donate_argnums, found one that jax\.jit returned"):
        compilations.begin(jax.jit(fresh_step()), (form(), BATCH), {}, {"donate_argnums": 0})


def test_functions_are_compiled_in_the_order_of_the_calls(compilations: Compilations) -> None:
    order: list[str] = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            order.append(str(kwargs["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        functions = []
        for name in ("first", "second", "third"):
            function = fresh_step()
            function.__name__ = name
            functions.append(compilations.begin(function, (form(), BATCH), {}, {}))
        for step in functions:
            step.wait()
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert order == ["jit(first)", "jit(second)", "jit(third)"]
    assert all(step.done for step in functions)


def test_a_restore_continues_while_a_function_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    stages = jax.stages.Lowered
    real = stages.compile

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        assert goes_on.wait(WAIT_S)
        return real(self, *args, **options)

    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        monkeypatch.setattr(stages, "compile", slow)
        step = session.compile(fresh_step(), form(), BATCH, donate_argnums=0)
        begun, number = session.restore(like=state())
        assert not step.done
        goes_on.set()
        session.step(number + 1, step(begun, BATCH))
    with pytest.raises(SettingsError, match="the session is closed"):
        session.compile(fresh_step(), form(), BATCH)


def test_closing_waits_for_what_is_being_compiled(
    compilations: Compilations, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    real = jax.stages.Lowered.compile

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        begun.set()
        assert goes_on.wait(WAIT_S)
        return real(self, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    caplog.set_level(logging.WARNING, "gracepoint")
    step = compilations.begin(fresh_step(), (form(), BATCH), {}, {})
    dropped = compilations.begin(fresh_step(), (form(), BATCH), {}, {})
    assert begun.wait(WAIT_S)
    compilations.close(0.01)
    assert "a compilation is still in progress" in caplog.text
    goes_on.set()
    compilations.close(WAIT_S)
    assert step.done
    assert int(dropped(state(), BATCH)["count"]) == 1, "the call compiles it"


def test_random_keys_are_compiled_for_also_within_a_state(compilations: Compilations, compiled: Counter[str]) -> None:
    def keyed(state: Any, key: jax.Array) -> Any:
        return state["w"] + jax.random.normal(jax.random.fold_in(state["key"], 1), (8,)) + jax.random.uniform(key)

    arguments = ({**state(), "key": jax.random.key(7)}, jax.random.key(8))
    step = compilations.begin(keyed, arguments, {}, {})
    step.wait()
    before = compiled["jit(keyed)"]
    step(*arguments)
    assert compiled["jit(keyed)"] == before == 1


def test_a_compiled_function_has_what_the_jitted_one_has(compilations: Compilations) -> None:
    step = compilations.begin(fresh_step(), (form(), jax.ShapeDtypeStruct((2,), jnp.float32)), {}, {})
    assert "stablehlo" in step.lower(state(), jnp.zeros(2)).as_text()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = step.no_such_thing


def test_without_a_thread_the_call_compiles(compilations: Compilations, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        refuse_threads(patched)
        step = compilations.begin(fresh_step(), (form(), jax.ShapeDtypeStruct((2,), jnp.float32)), {}, {})
    assert step(state(), jnp.ones(2))["count"] == 1
    later = compilations.begin(fresh_step(), (form(), jax.ShapeDtypeStruct((2,), jnp.float32)), {}, {})
    later.wait()  # a thread again
