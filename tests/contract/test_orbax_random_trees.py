"""Random trees through Orbax and through Gracepoint: what one wrote, both restore in the same way.

The examples are the same in every run.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracepoint import checkpoint
from tests.contract.fakes.both import Gracepoint, Orbax, assert_same_result
from tests.unit.checkpoint.fakes.engine import Moments, assert_same, sharding

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

SHARDINGS = [(), ("x",), ("x", "y"), (None, "y"), (("x", "y"),)]
DTYPES = ["float32", "bfloat16", "int32", "uint8", "bool", "int4", "float8_e4m3fn", "complex64"]
NAMES = ["a", "b", "with space", "Größe", "0", "-"]


def array(dtype: str, shape: tuple[int, ...], spec: tuple[Any, ...]) -> jax.Array:
    values = (np.arange(np.prod(shape)) % 7).reshape(shape).astype(jnp.dtype(dtype))
    return jax.device_put(values, sharding(*spec[: len(shape)]))


def numpy_array(dtype: str, shape: tuple[int, ...]) -> Any:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def keys(seed: int, count: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count) if count else jax.random.key(seed)


SHAPES = st.sampled_from([(), (4,), (4, 8), (8, 4, 2)])
LEAVES = st.one_of(
    st.builds(array, st.sampled_from(DTYPES), SHAPES, st.sampled_from(SHARDINGS)),
    st.builds(numpy_array, st.sampled_from(["float64", "int64", "uint8", "bool"]), SHAPES),
    st.builds(keys, st.integers(0, 9), st.integers(0, 3)),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(max_size=5),
    st.none(),
    st.just({}),
    st.just([]),
)


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(st.sampled_from(NAMES), children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3),
        st.tuples(children, children),
        st.builds(Moments, children, children),
    )


TREES = st.dictionaries(st.sampled_from(NAMES), st.recursive(LEAVES, containers, max_leaves=8), min_size=1, max_size=4)
FORMS = st.sampled_from([{}, {"use_zarr3": True}, {"use_ocdbt": True}, {"use_ocdbt": True, "compression": "zstd"}])


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=TREES, form=FORMS)
def test_a_random_tree_is_the_same_through_both(tree: Any, form: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs"
        Gracepoint().save(ours, tree, options=checkpoint.WriteOptions(**form))
        Orbax().save(theirs, tree)
        for path in (ours, theirs):
            for like in (None, tree):
                assert_same_result(Gracepoint().restore(path, like), Orbax().restore(path, like))
            assert_same(Gracepoint().restore(path, tree), tree)
        assert checkpoint.verify(ours).damage == ()
