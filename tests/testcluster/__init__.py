"""A real Kubernetes cluster for tests: see docs/testing.md.

    with testcluster.open(nodes=2) as cluster:
        cluster.kubectl("get", "nodes")

Importing this starts no thread and no process.
"""

from tests.testcluster.api import Cluster, ClusterError, NotSupported
from tests.testcluster.providers import attach, open, running, why_not
from tests.testcluster.system import why_not_local

__all__ = ["Cluster", "ClusterError", "NotSupported", "attach", "open", "running", "why_not", "why_not_local"]
