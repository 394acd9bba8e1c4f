"""What needs a device of its own, in one command: tests on a GPU, and figures of saves and restores there.

    python -m benchmarks.accelerator [--directory DIR] [--cpu-mib 240] [--json FILE]

It needs JAX, numpy, TensorStore, Orbax and pytest, and installs nothing: the library is taken from this tree. It ends
within eight minutes. Where there is no GPU, the same code runs on the CPU, and the goals are not judged.

One process after the other runs: the tests that have a GPU beside the CPU, the tests of whole loops, the figures. Each
has its time; what it has told until then is in the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.report import Better, Figure
from tests import accelerators

#: What the lines of the process that measures begin with.
FIGURE, DEVICE = "figure ", "device "
_ROOT = Path(__file__).parents[1]
_TESTS = {
    "tests on a GPU beside the CPU": (
        "cpu,cuda",
        ["tests/unit/checkpoint/test_devices.py", "tests/unit/checkpoint/saving/test_device_to_host.py"],
    ),
    "tests of loops: interrupts, set_mesh, transfer guard": ("cuda,cpu", ["tests/accelerator"]),
}
#: Seconds of each process.
_TESTS_S, _FIGURES_S = 110.0, 240.0
#: Of the device's memory; JAX takes it at the start.
_MEMORY_FRACTION = "0.9"


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--directory", type=Path, help="folder for checkpoints, on the disk that counts")
    parser.add_argument("--cpu-mib", type=int, default=240, help="size of the larger state where there is no GPU")
    given = parser.parse_args()
    found = [_tested(name, platforms, paths) for name, (platforms, paths) in _TESTS.items()]
    with tempfile.TemporaryDirectory(prefix="gracepoint-accelerator-", dir=given.directory) as folder:
        device, lines, complete = _measured(Path(folder), given.cpu_mib)
    found += figures(lines, on_cpu=not accelerators.has_gpu())
    print(f"\n{device}")
    report.publish(found, given.json, device=device)
    if not complete:
        print("the figures are not complete: see the error above")
    return 0 if complete and all(figure.met is not False for figure in found) else 1


def figures(lines: Sequence[Mapping[str, float | str | None]], *, on_cpu: bool) -> list[Figure]:
    """Returns what the process has told, with goals that are judged on accelerators alone."""
    found = []
    for line in lines:
        goal = line.get("at_most", line.get("at_least"))
        better = Better.MORE if "at_least" in line else Better.LESS
        found.append(
            Figure(
                str(line["name"]),
                None if line["value"] is None else float(line["value"]),
                str(line["unit"]),
                None if goal is None else float(goal),
                better,
                "on cpu" if on_cpu else "",
            )
        )
    return found


def _environment(platforms: str) -> dict[str, str]:
    """Returns the environment of a process: the library of this tree, and the platforms that are there."""
    there = platforms if accelerators.has_gpu() else "cpu"
    paths = [str(_ROOT), str(_ROOT / "sidecar"), str(_ROOT / "operator"), os.environ.get("PYTHONPATH", "")]
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("GRACEPOINT_")}
    return chosen | {"JAX_PLATFORMS": there, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _tested(name: str, platforms: str, paths: list[str]) -> Figure:
    """Runs tests with pytest alone: none of the plugins and settings that the project's own runs have."""
    print(f"\n{name}: {' '.join(paths)}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as settings:
        settings.write("[pytest]\nmarkers =\n    integration: see pyproject.toml\n    long: see pyproject.toml\n")
        settings.flush()
        options = ["-q", "-ra", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(_ROOT), "-c", settings.name]
        began_s = time.monotonic()
        code = _run(
            [sys.executable, "-m", "pytest", *options, *paths],
            _environment(platforms) | {"JAX_NUM_CPU_DEVICES": "4"},
            _TESTS_S,
        )
    took_s = time.monotonic() - began_s
    return Figure(f"{name}: exit code after {took_s:.0f} s", float(code), "", 0.0)


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> int:
    try:
        return subprocess.run(command, cwd=_ROOT, env=environment, timeout=timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"ended, as it took {timeout_s:g} s", flush=True)
        return 124


def _measured(folder: Path, cpu_mib: int) -> tuple[str, list[dict[str, float | str | None]], bool]:
    """Runs the process that measures. Returns the device, the figures, and whether all are there."""
    print("\nfigures", flush=True)
    log = folder / "log"
    with log.open("w") as out:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "benchmarks.accelerator_figures", str(folder), str(cpu_mib)],
                cwd=_ROOT,
                env=_environment("cuda,cpu") | {"XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY_FRACTION},
                stdout=out,
                timeout=_FIGURES_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"ended, as it took {_FIGURES_S:g} s", flush=True)
            ended = 124
    told = log.read_text().splitlines()
    device = next((line.removeprefix(DEVICE) for line in told if line.startswith(DEVICE)), "no device")
    lines = [json.loads(line.removeprefix(FIGURE)) for line in told if line.startswith(FIGURE)]
    return device, lines, ended == 0


if __name__ == "__main__":
    sys.exit(main())
