"""Choosing a provider: an existing cluster only when its context is named. Starts no thread and no process."""

from __future__ import annotations

import os
import secrets

from tests.testcluster import runs
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.existing import ExistingCluster
from tests.testcluster.local import LocalCluster
from tests.testcluster.system import why_not_local

CONTEXT_VARIABLE = "GRACEPOINT_CONTEXT"


def open(*, nodes: int = 2, context: str | None = None, name: str | None = None, bound: bool = True) -> Cluster:
    """Get a cluster; use it as a context manager.

    Args:
        nodes: How many worker nodes a new cluster has.
        context: The context of an existing cluster to use instead; ``GRACEPOINT_CONTEXT`` by default.
        name: Name of a new cluster; made up by default.
        bound: A new cluster ends with this process, however that ends. If false it stays until ``down``.

    Raises:
        ClusterError: No cluster can be had; the message says why.
    """
    context = context or os.environ.get(CONTEXT_VARIABLE)
    if context:
        return ExistingCluster(context)
    reason = why_not_local()
    if reason:
        raise ClusterError(f"the local cluster cannot run here: {reason}")
    return LocalCluster.create(name or f"bound-{secrets.token_hex(3)}", nodes=nodes, bound=bound)


def attach(name: str = runs.DEFAULT_NAME) -> Cluster:
    """Use the cluster that ``python -m tests.testcluster up`` has started.

    Raises:
        ClusterError: It is not running.
    """
    return LocalCluster.attach(name)


def running(name: str = runs.DEFAULT_NAME) -> bool:
    """Whether ``attach`` would find a cluster."""
    try:
        LocalCluster.attach(name)
    except ClusterError:
        return False
    return True
