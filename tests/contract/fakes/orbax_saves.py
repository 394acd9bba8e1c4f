"""Steps that Orbax saves, in each of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

FORMS: dict[str, dict[str, Any]] = {
    "default (OCDBT, zstd)": {},
    "OCDBT, zarr3": {"use_ocdbt": True, "use_zarr3": True},
    "zarr2 files, zstd": {"use_ocdbt": False},
    "zarr2 files, uncompressed": {"use_ocdbt": False, "use_compression": False},
    "zarr3 files": {"use_ocdbt": False, "use_zarr3": True},
}


def save_with_orbax(root: Path, step: int, state: Any, **form: Any) -> None:
    with ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler(**form)) as manager:
        manager.save(step, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
