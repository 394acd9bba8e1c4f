"""How much memory a restore needs, in a process of its own.

    python benchmarks/large_state_restore.py DIRECTORY BYTES

The process saves a state, and restores it twice into the arrays of a start: once into their memory, as a session does,
and once beside them. Meanwhile a thread adds up the arrays that exist. On a GPU, the device's own peak is told.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_DEVICES = 4
_ARRAYS = 64
_LOOK_EVERY_S = 0.0005
_TIMEOUT_S = 600.0


@dataclasses.dataclass
class Memory:
    """What was measured, in bytes.

    Attributes:
        state_bytes: Size of the state.
        device_bytes: The most that all devices held while the state was restored into the arrays of the start.
        resident_bytes: The most that the process had resident meanwhile, less what it had without the state. On CPU
            devices that holds their memory, too.
        kept_bytes: As ``device_bytes``, if the arrays of the start are kept.
    """

    state_bytes: int
    device_bytes: int
    resident_bytes: int
    kept_bytes: int


def measure(directory: Path, state_bytes: int) -> Memory:
    """Returns what the process measured."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    command = [sys.executable, __file__, str(directory), str(state_bytes)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if ran.returncode:
        raise RuntimeError(f"the process that restores ended with {ran.returncode}\n{ran.stdout}\n{ran.stderr}")
    return Memory(**json.loads(ran.stdout.splitlines()[-1]))


class Watch:
    """Adds up the arrays of JAX until the block ends. Its thread ends with the block."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        import jax

        while True:
            buffers: dict[int, int] = {}
            for array in jax.live_arrays():
                try:
                    for shard in array.addressable_shards:
                        buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
                except RuntimeError:  # deleted meanwhile
                    continue
            self.most_bytes = max(self.most_bytes, sum(buffers.values()))
            if self._ended.wait(_LOOK_EVERY_S):
                return


def main(directory: Path, state_bytes: int) -> Memory:
    """Saves a state, and restores it."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from gracepoint.checkpoint import RestoreOptions, restore, save

    devices = jax.devices()
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    rows = state_bytes // _ARRAYS // 4 // 256

    def state(value: float) -> dict[str, Any]:
        made = {
            f"w{number}": jax.device_put(np.full((rows, 256), value + number, np.float32), sharding)
            for number in range(_ARRAYS)
        }
        jax.block_until_ready(made)
        return made

    before_bytes = resident_bytes()
    save(directory / "state", state(1.0))

    def restored(*, donate: bool) -> tuple[int, int]:
        like = state(0.0)
        _forget_peak()
        with Watch() as watch:
            found = restore(directory / "state", like, options=RestoreOptions(donate=donate))
            jax.block_until_ready(found)
        assert float(found["w3"][0, 0]) == 4.0
        peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices]
        return max(watch.most_bytes, sum(peaks)), resident_bytes(peak=True) - before_bytes

    device_bytes, resident = restored(donate=True)
    kept_bytes, _ = restored(donate=False)
    return Memory(rows * 256 * 4 * _ARRAYS, device_bytes, resident, kept_bytes)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(*, peak: bool = False) -> int:
    """Returns the resident memory of this process; with ``peak``, the most since the last ``_forget_peak``."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(main(Path(sys.argv[1]), int(sys.argv[2])))))
