"""What the API server says of everything, for the logs of a cluster that did not come up.

Processes: kubectl, to its ends. Threads: none.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.testcluster.api import Cluster, ClusterError

_QUERIES = (
    ("get", "nodes,pods", "-A", "-o", "wide"),
    ("get", "events", "-A"),
    ("describe", "nodes,pods", "-A"),
)


def write(cluster: Cluster, folder: Path) -> None:
    """Writes the answers into files in the folder. What is not answered is left out."""
    for query in _QUERIES:
        with contextlib.suppress(ClusterError):
            answer = cluster.kubectl(*query, timeout_s=10, check=False)
            (folder / f"kubectl-{query[0]}-{query[1]}.txt").write_text(answer.stdout + answer.stderr)
