"""Orbax's metadata of shardings stays small on meshes of thousands of devices."""

from __future__ import annotations

import json

import pytest
from jax.sharding import PartitionSpec

from gracepoint.checkpoint.format import orbax_metadata
from tests.unit.checkpoint.fakes import gang_arrays


@pytest.mark.parametrize(("devices", "listed"), [(8, True), (16384, False)], ids=["few devices", "many devices"])
def test_devices_of_large_meshes_are_not_listed_for_every_array(devices: int, listed: bool) -> None:
    mesh = gang_arrays.mesh((2, devices // 2), ("r", "f"), 4)
    leaves = [gang_arrays.leaf(f"l{i}", (devices, 4), mesh, PartitionSpec("f")) for i in range(50)]
    data = orbax_metadata.sharding(leaves)
    found = orbax_metadata.recorded_shardings(json.loads(data), "here")
    assert found["l7"]["partition_spec"] == ["f"]
    assert ("device_mesh" in found["l7"]) is listed
    assert len(data) < 50 * 2000
