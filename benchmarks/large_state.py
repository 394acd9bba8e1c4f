"""States of terabytes over thousands of processes: plan, manifest and listing; and the memory that a restore needs.

    python -m benchmarks.large_state [--processes 4096] [--layers 48] [--mib 512] [--directory DIR] [--json FILE]

The first part (``large_state_gang``) is about a gang that is not there: the plan, the records of all processes, the
manifest and the listing are real files and the library's own code, and the arrays have no values. All of it runs in one
process. The second part (``large_state_restore``) restores a real state in a process with four CPU devices, or a GPU if
there is one, into the arrays of a start, and watches the memory.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import large_state_gang, large_state_restore, report
from benchmarks.large_state_gang import Times
from benchmarks.large_state_restore import Memory
from benchmarks.report import Figure

_DIRECTORY = Path(__file__).parents[1] / "build" / "benchmarks"
_MIB = 1 << 20


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--processes", type=int, default=4096, help="of the gang that is not there (%(default)s)")
    parser.add_argument("--layers", type=int, default=48, help="of its model; 21 arrays of many chunks (%(default)s)")
    parser.add_argument("--mib", type=int, default=512, help="the state that is restored (%(default)s)")
    parser.add_argument("--directory", type=Path, default=_DIRECTORY, help="on the disk to measure (%(default)s)")
    flags = parser.parse_args()
    load = os.getloadavg()[0]
    flags.directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="large-state-", dir=flags.directory))
    try:
        (root / "gang").mkdir()
        times = large_state_gang.measure(root / "gang", flags.processes, flags.layers)
        memory = large_state_restore.measure(root / "restore", flags.mib * _MIB)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    told = [*figures_of_gang(times, flags.processes), *figures_of_restore(memory)]
    print(f"load average before: {load:.1f}")
    report.publish(told, flags.json, load_average=load)
    return 1 if any(figure.met is False for figure in told) else 0


def figures_of_gang(times: Times, processes: int) -> list[Figure]:
    """Returns what a gang of ``processes`` would take."""
    return [
        Figure(f"chunks of the state over {processes} processes", times.chunks, "chunks"),
        Figure("chunks of one process", times.own_chunks, "chunks"),
        Figure("planned by a process that sees the state first", times.planned, "s", 1.0),
        Figure("planned by it, CPU time", times.planned_cpu, "s"),
        Figure("planned by process 0, with the metadata of all arrays", times.planned_by_first, "s"),
        Figure("described for the comparison with other processes", times.compared, "s"),
        Figure("part of the manifest and done-record of one process written", times.part_written, "s"),
        Figure("committed from all done-records", times.committed, "s"),
        Figure("all done-records", times.records_bytes / _MIB, "MiB"),
        Figure("manifest", times.manifest_bytes / _MIB, "MiB"),
        Figure("all parts of the manifest", times.parts_bytes / _MIB, "MiB"),
        Figure("listed", times.listed, "s", 0.05),
        Figure("listed, CPU time", times.listed_cpu, "s"),
        Figure("opened, with what is known of a process's own chunks", times.read, "s", 1.0),
        Figure("opened, CPU time", times.read_cpu, "s"),
    ]


def figures_of_restore(memory: Memory) -> list[Figure]:
    """Returns the memory that a restore took, as parts of the size of the state."""
    return [
        Figure("device memory while restoring, most", memory.device_bytes / memory.state_bytes, "x the state", 1.1),
        Figure("resident memory while restoring, most", memory.resident_bytes / memory.state_bytes, "x the state"),
        Figure("device memory without donation, most", memory.kept_bytes / memory.state_bytes, "x the state"),
    ]


if __name__ == "__main__":
    sys.exit(main())
