"""What the training loop has set for JAX does not reach what the library asks of JAX.

The source of the whole library is searched for what would: calls that compute, place or copy, outside of ``isolated``.
"""

from __future__ import annotations

import ast
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gracepoint
from gracepoint.jax_isolation import isolated, jit, setting, to_numpy
from tests.jax_settings import SETTINGS

PACKAGE = Path(gracepoint.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "jax_isolation.py")
#: Calls of ``jax`` that depend on what is set. Those of ``jax.lax``, ``jax.numpy`` and ``jax.random`` do, too.
OF_JAX = {
    "device_get", "device_put", "device_put_replicated", "device_put_sharded", "eval_shape", "grad", "jit",
    "make_array_from_callback", "make_array_from_process_local_data", "make_array_from_single_device_arrays",
    "make_jaxpr", "pmap", "pure_callback", "set_mesh", "shard_map", "value_and_grad", "vmap",
}  # fmt: skip
#: What only says something of types or of keys, and computes nothing.
TELLS = {"bool_", "complexfloating", "finfo", "floating", "iinfo", "integer", "issubdtype", "key_impl", "ndarray"}
#: What modules use otherwise, and why.
EXCEPTIONS = {
    "checkpoint/restoring/placement.py": {"bitcast_convert_type", "complex"},  # of a function that ``jit`` traces
    "checkpoint/restoring/start_state.py": {"eval_shape"},  # of the user's ``init``, as the user has set JAX
    "session/compilation.py": {"jit"},  # of the user's step, likewise
}


class Search(ast.NodeVisitor):
    """Finds uses of JAX that are not isolated, and isolated blocks that other code could run within."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[str] = []
        self._traced = {
            name.id
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "jit"
            for argument in call.args
            for name in ast.walk(argument)
            if isinstance(name, ast.Name)
        }
        self._inside = 0
        self.visit(tree)

    def visit_With(self, node: ast.With) -> None:
        isolates = any(_is_isolated(item.context_expr) for item in node.items)
        self._visit_within(node, isolates=isolates)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        isolates = node.name in self._traced or any(map(_is_isolated, node.decorator_list))
        self._visit_within(node, isolates=isolates)

    def _visit_within(self, node: ast.AST, *, isolates: bool) -> None:
        self._inside += isolates
        self.generic_visit(node)
        self._inside -= isolates

    def visit_Yield(self, node: ast.Yield) -> None:
        if self._inside:
            self.found.append("yield within isolated: whoever runs then is isolated, too")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        where = ast.unparse(node.value)
        of_jax = where == "jax" and node.attr in OF_JAX
        computes = where in ("jnp", "jax.lax", "jax.numpy", "jax.random") and node.attr not in TELLS
        if (of_jax or computes or node.attr == "copy_to_host_async") and not self._inside:
            self.found.append(node.attr)
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        names = {name.name for name in node.names}
        if node.module == "jax" and names & (OF_JAX | {"lax", "numpy", "random"}):
            self.found.append(ast.unparse(node))


def _is_isolated(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isolated"


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_the_library_uses_jax_only_where_it_is_isolated(module: Path) -> None:
    found = Search(ast.parse((PACKAGE / module).read_text())).found
    assert set(found) == EXCEPTIONS.get(module.as_posix(), set()), "use gracepoint.jax_isolation, or name it here"


@pytest.mark.parametrize(
    "source",
    [
        "jax.device_put(x)",
        "y = jnp.asarray(x)",
        "jax.lax.add(x, x)",
        "f = jax.jit(g)",
        "from jax import lax",
        "x.copy_to_host_async()",
        "with isolated():\n    pass\njax.device_put(x)",
        "@isolated()\ndef f():\n    yield jax.device_put(x)",
        "def f():\n    return jax.random.key_data(x)\nf()",
    ],
)
def test_the_search_finds_what_is_not_isolated(source: str) -> None:
    assert Search(ast.parse(source)).found


@pytest.mark.parametrize(
    "source",
    [
        "with isolated():\n    jax.device_put(x)",
        "with other(), isolated():\n    jnp.asarray(x)",
        "@isolated()\ndef f():\n    return jax.random.key_data(x)",
        "def f(x):\n    return jnp.sum(x)\ng = jit(functools.partial(f, 2))",
        "jnp.issubdtype(x.dtype, jnp.integer)",
    ],
)
def test_the_search_accepts_what_is_isolated(source: str) -> None:
    assert Search(ast.parse(source)).found == []


def first_of(values: jax.Array) -> jax.Array:
    return jnp.array(values.reshape(-1)[0], copy=True)


@contextlib.contextmanager
def set_as(name: str) -> Iterator[None]:
    with SETTINGS[name]():
        yield


@pytest.mark.integration
@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_that_is_set_changes_what_is_computed_or_compiles_it_again(name: str) -> None:
    on_one_device = jax.device_put(np.array([np.nan, 1.0], np.float32), jax.devices()[1])
    traced = []

    @jit
    def first(values: jax.Array) -> jax.Array:
        traced.append(values)
        return first_of(values)

    alone = to_numpy(first(on_one_device))
    with set_as(name):
        assert to_numpy(first(on_one_device)).tobytes() == alone.tobytes()
        with isolated():
            there = jax.device_put(np.ones(2), jax.sharding.SingleDeviceSharding(jax.devices()[2]))
    assert there.dtype == np.float64, "numbers of 64 bits keep their width"
    assert len(traced) == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_what_was_set_is_set_again_afterwards_also_after_an_error(name: str) -> None:
    def is_set() -> list[object]:
        flags = [value for flag, value in sorted(jax.config.values.items())]
        return [*flags, jax.sharding.get_mesh(), jax.sharding.get_abstract_mesh()]

    with set_as(name):
        before = is_set()
        with isolated():
            pass
        with contextlib.suppress(ZeroDivisionError), isolated():
            raise ZeroDivisionError
        assert is_set() == before


def test_other_threads_are_not_isolated() -> None:
    found = []
    jax.config.update("jax_debug_nans", True)
    try:
        with isolated():
            thread = threading.Thread(target=lambda: found.append(setting("jax_debug_nans")))
            thread.start()
            thread.join(10)
            assert not setting("jax_debug_nans")
    finally:
        jax.config.update("jax_debug_nans", False)
    assert found == [True]
