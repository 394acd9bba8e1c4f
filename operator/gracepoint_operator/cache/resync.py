"""Lists the API server's objects, instead of waiting for its watches.

``sweep`` lists all kinds, or some. At start, it tells when this replica knows the cluster. Later it finds what was
deleted while a watch had lost its place, which no watch ever reports. It also finds that the API server has gone back
to an older state, as after etcd was restored from a backup: then known versions are higher than the newest ones.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping

from gracepoint.wire import names
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.resource_versions import version_of
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.kube import client, kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.observability.logs import about
from gracepoint_operator.workloads import BY_PLACE, MEMBER_LABEL

log = logging.getLogger(__name__)

#: The watched kinds, each with the label that its objects must have. Preemptions come before what they explain.
SELECTORS: dict[kinds.Kind, str | None] = {
    kinds.PREEMPTIONS: None,
    kinds.POLICIES: None,
    **dict.fromkeys(BY_PLACE, names.LABEL_POLICY),
    kinds.JOBS: MEMBER_LABEL,
    kinds.NODES: None,
    kinds.NODE_CLAIMS: None,
    kinds.KUEUE_WORKLOADS: None,
    kinds.PODS: MEMBER_LABEL,
}


#: Kinds of other projects, which a cluster may not have. A failure of one of them delays nothing else.
OPTIONAL: frozenset[kinds.Kind] = frozenset({kinds.NODE_CLAIMS, kinds.KUEUE_WORKLOADS})


@dataclasses.dataclass(frozen=True)
class Swept:
    """The result of a sweep.

    Attributes:
        left_out: The optional kinds that could not be listed. Their known objects stay.
        rewound: True if the API server has gone back to an older state.
    """

    left_out: frozenset[kinds.Kind]
    rewound: bool


async def sweep(
    api: KubeClient,
    cache: ClusterCache,
    drop: Callable[[str], object],
    watches: WatchState,
    wanted: Collection[kinds.Kind] = SELECTORS.keys(),
) -> Swept:
    """Lists kinds into ``cache``. A kind that the cluster does not have yet has no objects.

    Args:
        api: The API server.
        cache: Stores what is listed.
        drop: Called with the UID of each object that no longer exists.
        watches: Has the version up to which each kind was watched. Is told of failures.
        wanted: The kinds to list.

    Raises:
        kube.KubeError: The API server cannot be asked for a kind that is not optional.
    """
    left_out: set[kinds.Kind] = set()
    rewound = False
    for kind in (kind for kind in SELECTORS if kind in wanted):
        before, seen_version = cache.versions_of(kind), watches.version(kind)
        try:
            found = await api.list(kind, label_selector=SELECTORS[kind])
        except client.NotFound:
            found = client.ObjectList([], {})
            watches.absent(kind)
        except client.KubeError as error:
            if kind not in OPTIONAL:
                raise
            watches.failed(kind, str(error), optional=True)
            left_out.add(kind)
            continue
        if _is_older(found, before, seen_version):
            log.warning(
                "the API server has gone back to an older state, and all is listed and watched anew",
                extra=about(kind=kind.plural, found=version_of(found.metadata), known=seen_version),
            )
            cache.versions.rewind()
            watches.rewind()
            rewound = True
        for uid in before.keys() - {body["metadata"]["uid"] for body in found.items}:
            drop(uid)
        for body in found.items:
            # Fresh: an object that seemed deleted while its kind was not served is back in the same version.
            cache.put(kind, body, listed=True, fresh=True)
        if found.metadata:
            watches.listed_at(kind, version_of(found.metadata))
    return Swept(frozenset(left_out), rewound)


def _is_older(found: client.ObjectList, before: Mapping[str, int], seen_version: int) -> bool:
    """True if the list is older than what was known at the time of the request. Versions fall only by a restore.

    ``before`` has the known versions of the objects, by UID. ``seen_version`` is the highest known version.
    """
    version = version_of(found.metadata)
    if 0 < version < max([seen_version, *before.values()]):
        return True
    return any(version_of(body["metadata"]) < before.get(body["metadata"]["uid"], 0) for body in found.items)
