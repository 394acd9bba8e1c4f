"""Leaves that handlers stored in a folder: what is said of damaged files beside them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, open_leaves
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(b'{"dw==": ', id="half of it"),
        pytest.param(b"\xff", id="no text"),
        pytest.param(b"[1]", id="no object"),
        pytest.param(b'{"dw==": "{"}', id="half of a sharding"),
    ],
)
def test_a_damaged_file_of_shardings_is_named(tmp_path: Path, damaged: bytes) -> None:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"}}
    ts.open(spec, create=True, dtype=np.float32, shape=[3]).result()
    (tmp_path / layout.SHARDING).write_bytes(damaged)
    leaf = StoredLeaf("w", (("w", 2),), "jax.Array")
    with pytest.raises(CheckpointCorrupt, match=rf"{layout.SHARDING} cannot be read"):
        open_leaves(storage_path(tmp_path), [leaf], Deadline.after(60.0, time.monotonic))
