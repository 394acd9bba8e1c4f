"""What the operator keeps of each object: bytes of memory for a node, a pod, a Job, a JobSet and an old record.

    python -m benchmarks.operator_memory [--count 2000] [--json FILE]

The cache reads objects as they are in ``benchmarks.operator_scale``, and Python's allocator counts what stays. Memory
that the allocator cannot give back is not counted; ``benchmarks.operator_scale`` shows the whole process.
"""

from __future__ import annotations

import collections
import gc
import json
import sys
import time
import tracemalloc

from benchmarks import report
from benchmarks.operator_scale_objects import Size, stored
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import objects
from gracepoint_operator.workloads import JOBSETS

#: How the keys in etcd name the kinds.
_KINDS = {
    "minions": objects.NODES,
    "checkpointpolicies": objects.POLICIES,
    "jobsets": JOBSETS,
    "jobs": objects.JOBS,
    "pods": objects.PODS,
    "preemptions": objects.PREEMPTIONS,
}
_TOLD = {"minions": "node", "pods": "pod", "jobs": "Job", "jobsets": "JobSet", "preemptions": "old record"}


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--count", type=int, default=2000, help="pods (%(default)s)")
    flags = parser.parse_args()
    report.publish(figures(flags.count), flags.json, pods=flags.count)
    return 0


def figures(count: int) -> list[report.Figure]:
    """In the order of the table."""
    size = Size(nodes=count // 4, pods=count, jobsets=count // 40, unrelated=0, records=count // 4, big=count // 5)
    cache = ClusterCache(time.time)
    by_plural: dict[str, list[bytes]] = collections.defaultdict(list)
    for key, value in stored(size, time.time()):
        plural = next((part for part in key.split("/") if part in _KINDS), None)
        if plural is not None:
            by_plural[plural].append(value)
    found = []
    version = 0
    tracemalloc.start()
    for plural, kind in _KINDS.items():
        values = by_plural[plural]
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for value in values:
            version += 1
            body = json.loads(value)
            body["metadata"]["resourceVersion"] = str(version)
            cache.put(kind, body, listed=True)
        del body
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
        if plural in _TOLD:
            found.append(report.Figure(f"memory for a {_TOLD[plural]}", kept / len(values), "bytes"))
            whole = sum(map(len, values)) / len(values)
            found.append(report.Figure(f"the {_TOLD[plural]} itself, in JSON", whole, "bytes"))
    return found


if __name__ == "__main__":
    sys.exit(main())
