"""The storage formats, each with the options of a save that writes it."""

from __future__ import annotations

import pytest

from gracepoint.checkpoint.options import WriteOptions

FORMATS = {
    f"zarr{zarr}{', OCDBT' * tree}{', zstd' * zstd}": WriteOptions(
        use_zarr3=zarr == 3, use_ocdbt=bool(tree), compression="zstd" if zstd else None
    )
    for zarr in (2, 3)
    for tree in (0, 1)
    for zstd in (0, 1)
}


each_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
