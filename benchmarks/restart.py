"""What a start of the example's two trainers takes until the first step is done, with and without kept programs.

    python -m benchmarks.restart [--cache on off] [--json FILE]

Starts the job twice with each setting of the compilation cache, on this machine and without Kubernetes: first anew,
then from its checkpoint. Seconds of processor time are those of one process. They say what a restart costs also on a
machine that is busy with other things; the seconds of the clock do not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import Figure
from gracepoint.wire.names import COMPILATION_CACHE_OFF, COMPILATION_CACHE_ON, Env
from tests.ports import hold_coordinator_port

_PROCESS = Path(__file__).with_name("restart_process.py")
_STEPS = 20
_WITHIN_S = 300.0
_STARTS = ("first start", "restart")


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    settings = [COMPILATION_CACHE_OFF, COMPILATION_CACHE_ON]
    parser.add_argument("--cache", nargs="+", choices=settings, default=settings, help="settings of the cache")
    flags = parser.parse_args()
    told = [figure for cache in flags.cache for figure in _measure(cache)]
    report.publish(told, flags.json, load_average=os.getloadavg())
    return 1 if any(figure.met is False for figure in told) else 0


def _measure(cache: str) -> list[Figure]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(_STARTS, start=1):
            told = _start(Path(folder), cache, _STEPS * number)
            goal = 0 if cache == COMPILATION_CACHE_ON and number > 1 else None
            words = f"cache {cache}, {name}"
            found += [
                Figure(f"{words}: programs compiled", max(item["compiled"] for item in told), "", goal),
                Figure(f"{words}: processor time of a process", max(item["cpu_s"] for item in told), "s"),
                Figure(f"{words}: from the start of Python to the first step", max(i["wall_s"] for i in told), "s"),
            ]
    return found


def _start(folder: Path, cache: str, steps: int) -> list[dict[str, Any]]:
    """Starts both processes, waits for their end, and returns what they said."""
    flags = [f"--steps={steps}", f"--output={folder / 'output'}", f"--directory={folder / 'checkpoints'}"]
    environment = {**os.environ, Env.COMPILATION_CACHE: cache, "JAX_PLATFORMS": "cpu"}
    with hold_coordinator_port() as held:
        address, began = f"localhost:{held.getsockname()[1]}", f"{time.time():.6f}"
        processes = [
            subprocess.Popen(
                [sys.executable, str(_PROCESS), address, str(index), began, *flags, f"--save-every={_STEPS // 2}"],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(2)
        ]
        outputs = [process.communicate(timeout=_WITHIN_S)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed:\n" + "\n\n".join(outputs))
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("told ")]
    return [json.loads(line.removeprefix("told ")) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
