"""Replicas of the operator for a test, and the cluster that they see; and tests under ``jax.set_mesh``.

With CONTRACT_MESH=auto or explicit (``make test-set-mesh``), every test and its fixtures run under ``jax.set_mesh`` of
the mesh that the states are spread over, of CONTRACT_DEVICES devices; and values leave CPU devices as they leave
accelerators: through pinned memory, in slices wherever a shard has several chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import jax
import pytest
import trustme

from gracepoint.checkpoint.saving import device_copy, host_snapshot
from tests.contract.fakes.replicas import Replica, bound_cluster, replicas
from tests.jax_settings import CONTRACT_MESHES, mesh_of_states
from tests.unit.operator.fakes.api import MemoryApi


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def start(authority: trustme.CA, tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Starts replicas; stops them all in the end."""
    with replicas(authority, tmp_path) as make:
        yield make


@pytest.fixture
def api() -> MemoryApi:
    """A cluster that trains, and the tokens of its pods."""
    return bound_cluster()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Sets the mesh around a test and its fixtures, if one is asked for."""
    mesh = os.environ.get("CONTRACT_MESH")
    if mesh is None:
        return (yield)
    if mesh not in CONTRACT_MESHES:
        pytest.exit(f"CONTRACT_MESH is {mesh!r}; expected one of {', '.join(CONTRACT_MESHES)}", returncode=2)
    with pytest.MonkeyPatch.context() as patched, jax.set_mesh(mesh_of_states()):
        for module in (device_copy, host_snapshot):
            patched.setattr(module, "is_far", lambda data, options: isinstance(data, jax.Array))
        patched.setattr(device_copy, "_WHOLE_BYTES", 0)
        return (yield)
