"""Arrays without a manifest: what is said of one that cannot be opened."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from gracepoint.checkpoint.reading.stored_arrays import open_arrays
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt


def array_with_metadata_at(folder: Path, key: str) -> Path:
    """Writes the array "w" in zarr 2, with its metadata at ``key``. Returns the file of the metadata."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/w/"}, "metadata_key": key}
    store = ts.open(spec, create=True, dtype=np.float32, shape=[3]).result()
    store.write(np.ones(3, np.float32)).result()
    return folder / "w" / key


def opened(folder: Path, timeout_s: float = 60.0) -> Mapping[str, Any]:
    deadline = Deadline.after(timeout_s, time.monotonic)
    return open_arrays(storage_path(folder), {}, {"w": "np.ndarray"}, deadline)[0]


@pytest.mark.parametrize("key", [".zarray", "mine"])
def test_a_damaged_array_is_named_whatever_its_metadata_is_named(tmp_path: Path, key: str) -> None:
    metadata = array_with_metadata_at(tmp_path, key)
    assert opened(tmp_path)["w"].shape == (3,)
    metadata.write_text('{"zarr_format": 2, "shape": "damaged"}')
    with pytest.raises(CheckpointCorrupt, match="array 'w' cannot be opened"):
        opened(tmp_path)


def test_an_array_that_is_not_opened_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array_with_metadata_at(tmp_path, "mine")
    real_open = ts.open
    pair: tuple[ts.Promise[Any], ts.Future[Any]] = ts.Promise.new()  # the future fails if the promise goes

    def slow(spec: Mapping[str, Any], **options: Any) -> ts.Future[Any]:
        return pair[1] if "metadata_key" in spec else real_open(spec, **options)

    monkeypatch.setattr(ts, "open", slow)
    with pytest.raises(TimeoutError, match="^leaf 'w'$"):
        opened(tmp_path, timeout_s=1.0)
