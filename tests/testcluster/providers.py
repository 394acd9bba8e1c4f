"""Choosing a provider: an existing cluster only when its context is named. Starts no thread.

Processes: ``docker info`` or ``podman info``, to their ends.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from tests.testcluster import engines, kind, parts, runs
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.existing import ExistingCluster
from tests.testcluster.kind import KindCluster
from tests.testcluster.local import LocalCluster
from tests.testcluster.system import why_not_local

CONTEXT_VARIABLE = "TESTCLUSTER_CONTEXT"
PROVIDER_VARIABLE = "TESTCLUSTER_PROVIDER"
"""Who makes the clusters of the tests: LOCAL, the default, or KIND."""
LOCAL = "local"
KIND = "kind"
AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """Who makes a cluster.

    Attributes:
        provider: LOCAL or KIND.
        text: Which it is, why, and how long that takes.
    """

    provider: str
    text: str


def pick(wanted: str = AUTO) -> Choice:
    """Chooses: kind if an engine, kind and its tools work here, else the cluster from sources.

    Args:
        wanted: LOCAL, KIND, or AUTO for either.

    Raises:
        ClusterError: KIND is wanted and cannot run here; the message says why.
    """
    if wanted == LOCAL:
        return Choice(LOCAL, _local())
    if wanted not in (KIND, AUTO):
        raise ClusterError(f"CLUSTER={wanted}: expected {KIND} or {LOCAL}")
    reason = kind.why_not_kind()
    if reason is None:
        engine = engines.find()[0]
        first = "about 8 minutes on 2 cores for cluster and demo, and 2 GB of downloads the first time"
        other = f"; CLUSTER={LOCAL} makes one from sources" if wanted == AUTO else ""
        return Choice(KIND, f"a cluster by kind, in containers of {engine.name if engine else 'none'}: {first}{other}")
    if wanted == KIND:
        raise ClusterError(f"kind cannot run here: {reason}")
    return Choice(LOCAL, f"{_local()} (not by kind: {reason})")


def _local() -> str:
    unbuilt = ", ".join(part.name for part in parts.missing())
    if unbuilt:
        return f"a cluster from sources: about 20 minutes to build {unbuilt}, once; then 4 to 6 minutes on 2 cores"
    return "a cluster from sources, which are built: 1 to 6 minutes on 2 cores"


def provider() -> str:
    """Who makes clusters unless a caller says it."""
    return os.environ.get(PROVIDER_VARIABLE) or LOCAL


def why_not() -> str | None:
    """Why the provider of ``provider`` cannot make a cluster here; None if it can."""
    return kind.why_not_kind() if provider() == KIND else why_not_local()


def open(
    *,
    nodes: int = 2,
    context: str | None = None,
    name: str | None = None,
    bound: bool = True,
    by: str | None = None,
) -> Cluster:
    """Get a cluster; use it as a context manager.

    Args:
        nodes: How many worker nodes a new cluster has.
        context: The context of an existing cluster to use instead; ``TESTCLUSTER_CONTEXT`` by default.
        name: Name of a new cluster; made up by default.
        bound: A new cluster ends with this process, however that ends (by kind: with ``close``). If false it stays
            until ``down``.
        by: Who makes it, LOCAL or KIND; ``provider()`` by default.

    Raises:
        ClusterError: No cluster can be had; the message says why.
    """
    context = context or os.environ.get(CONTEXT_VARIABLE)
    if context:
        return ExistingCluster(context)
    name = name or f"bound-{secrets.token_hex(3)}"
    if (by or provider()) == KIND:
        return KindCluster.create(name, nodes=nodes, bound=bound)
    reason = why_not_local()
    if reason:
        raise ClusterError(f"the local cluster cannot run here: {reason}")
    return LocalCluster.create(name, nodes=nodes, bound=bound)


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
