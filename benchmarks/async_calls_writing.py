"""What ``benchmarks.async_calls`` runs in the background. The worker imports it, so it imports nothing large."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(arrays: Mapping[str, Any], path: str) -> None:
    """Writes arrays one after the other to a file, and syncs it."""
    with Path(path).open("wb", buffering=0) as out:
        for array in arrays.values():
            left = memoryview(array).cast("B")
            while left:
                left = left[out.write(left[: 16 << 20]) :]
        os.fsync(out.fileno())


def write_memory(path: str) -> None:
    """Writes how many bytes of memory this process has for itself, and whether JAX is loaded."""
    import sys

    rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    private_kib = sum(int(rollup[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
    shared_kib = int(rollup.get("Pss_Shmem", "0 kB").split()[0])
    Path(path).write_text(f"{(private_kib - shared_kib) * 1024} {int('jax' in sys.modules)}")


def _write_when_told() -> None:
    """Reads the path and the arrays' sizes from the command line, says that it is ready, and writes at each line."""
    import sys

    path, sizes = sys.argv[1], [int(size) for size in sys.argv[2:]]
    arrays = {str(n): bytearray(b"\1" * size) for n, size in enumerate(sizes)}
    print("ready", flush=True)
    for _ in sys.stdin:
        write(arrays, path)
        print("written", flush=True)


if __name__ == "__main__":
    _write_when_told()
