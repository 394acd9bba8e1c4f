"""States of every kind, restored in every form of a request, through Orbax and through Gracepoint: the same results.

What both of them wrote is restored by both. All states are one checkpoint, as most of what a checkpoint costs it costs
once; a failure names the leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gracepoint.checkpoint import AsyncCheckpointer
from tests.contract.fakes.both import Gracepoint, Library, Orbax, assert_same_result
from tests.contract.fakes.states import STATES
from tests.unit.checkpoint.fakes.engine import sharding

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

LIBRARIES: dict[str, Library] = {"Orbax's": Orbax(), "Gracepoint's": Gracepoint()}


def every_state() -> dict[str, Any]:
    """Returns all states but what Orbax's checkpointers refuse: strings and numpy's numbers, and empty arrays."""
    state = {name: make() for name, make in STATES.items() if name not in ("arrays without elements", "strings")}
    del state["scalars"]["numpy"]
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    for writer, library in LIBRARIES.items():
        library.save(root / writer, every_state())
    return {writer: root / writer for writer in LIBRARIES}


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: ocp.utils.to_shape_dtype_struct(leaf) if is_array(leaf) else leaf, state)


def without_shardings(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf, state)


def for_arrays(make: Callable[[jax.Array], Any]) -> Callable[[Any], Any]:
    """Returns a function from a state to arguments: ``make`` of each ``jax.Array``, and the defaults of the others."""
    return lambda state: jax.tree.map(
        lambda leaf: make(leaf) if isinstance(leaf, jax.Array) else ocp.RestoreArgs(), state
    )


def casts(state: Any) -> Any:
    """Returns arguments that cast some arrays. Orbax compiles a cast for each shape."""
    args = for_arrays(lambda leaf: ocp.RestoreArgs())(state)
    to_bfloat16 = for_arrays(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=jnp.bfloat16))
    return args | {"shardings": to_bfloat16(state["shardings"])}


args_of = ocp.checkpoint_utils.construct_restore_args
# Each form of a request: from a state to ``like`` and Orbax's restore arguments.
REQUESTS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "nothing": lambda state: (None, None),
    "the state, with arguments": lambda state: (state, args_of(state)),
    "abstract arrays": lambda state: (abstract(state), None),
    "abstract arrays without shardings": lambda state: (
        without_shardings(state),
        args_of(without_shardings(state)),
    ),
    "default arguments": lambda state: (state, for_arrays(lambda leaf: ocp.RestoreArgs())(state)),
    "numpy": lambda state: (state, for_arrays(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray))(state)),
    "replicated": lambda state: (state, for_arrays(lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding()))(state)),
    "cast": lambda state: (state, casts(state)),
}


@pytest.mark.parametrize("writer", LIBRARIES)
@pytest.mark.parametrize("request_for", REQUESTS.values(), ids=REQUESTS)
def test_the_same_request_gives_the_same_state(
    saved: dict[str, Path], writer: str, request_for: Callable[[Any], tuple[Any, Any]]
) -> None:
    like, args = request_for(every_state())
    found = Gracepoint().restore(saved[writer], like, args)
    assert_same_result(found, Orbax().restore(saved[writer], like, args))


@pytest.mark.parametrize("writer", LIBRARIES)
@pytest.mark.parametrize("form", [abstract, without_shardings], ids=["abstract", "abstract, without shardings"])
def test_the_standard_request_gives_the_same_state(
    saved: dict[str, Path], writer: str, form: Callable[[Any], Any]
) -> None:
    like = form(every_state())
    with ocp.StandardCheckpointer() as theirs, AsyncCheckpointer() as ours:
        found, expected = (
            ours.restore(saved[writer], args=ocp.args.StandardRestore(like)),
            theirs.restore(saved[writer], like),
        )
    if form is without_shardings:  # arrays of one device go to the default device, see docs/checkpoint.md
        del found["shardings"]["single"], expected["shardings"]["single"]
    assert_same_result(found, expected)
