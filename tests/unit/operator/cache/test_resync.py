"""What lists of single namespaces find, over an API server in memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.relister import OWN, sweep
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.metrics import Metrics
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock


class Api(MemoryApi):
    """Refuses what is in some namespaces, as without a RoleBinding there."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.refused: set[str] = set()  # parts of paths
        self.unserved = ""  # likewise

    async def arrives(self, method: str, path: str, query: Mapping[str, str]) -> None:
        if any(part in path for part in self.refused):
            raise client.Refused(f"{method} {path}: forbidden")
        if self.unserved and self.unserved in path:
            raise client.NotFound(f"{method} {path}: 404 page not found")


def policy(namespace: str) -> client.JsonObject:
    made = objects.policy()
    made["metadata"] |= {"namespace": namespace, "uid": f"uid-{namespace}"}
    return made


@pytest.fixture
def api() -> Api:
    """A policy in each of three namespaces."""
    made = Api(Clock())
    for name in ("a", "b", "c"):
        made.add(kinds.NAMESPACES, objects.namespace(name))
        made.add(kinds.POLICIES, policy(name))
    made.add(kinds.NODES, objects.node())
    return made


@pytest.mark.parametrize("metadata_only", [False, True])
async def test_namespace_that_may_not_be_listed_keeps_what_is_known_of_it(api: Api, metadata_only: bool) -> None:
    cache, watches = ClusterCache(Clock()), WatchState(Metrics(), namespaces=["a", "b"])
    await sweep(api, cache, cache.drop, watches)
    assert cache.uids(kinds.POLICIES) == {"uid-a", "uid-b"}
    assert cache.uids(kinds.NODES), "which have no namespace"
    for name in ("a", "b"):
        api.remove(kinds.POLICIES, policy(name))
    api.refused = {"/namespaces/b/"}
    await sweep(api, cache, cache.drop, watches, metadata_only=metadata_only)
    assert cache.uids(kinds.POLICIES) == {"uid-b"}
    api.remove(kinds.NAMESPACES, {"metadata": {"name": "b"}})  # and its RoleBinding went with it
    await sweep(api, cache, cache.drop, watches, metadata_only=metadata_only)
    assert cache.uids(kinds.POLICIES) == set()


async def test_api_server_that_refuses_all_namespaces_at_once_is_an_error(api: Api) -> None:
    api.refused = {"/"}
    cache = ClusterCache(Clock())
    with pytest.raises(client.Refused):
        await sweep(api, cache, cache.drop, WatchState(Metrics(), namespaces=["a", "b"]))


@pytest.mark.parametrize("metadata_only", [False, True])
async def test_own_kinds_that_are_not_served_any_more_keep_what_is_known_of_them(api: Api, metadata_only: bool) -> None:
    """As after a roll-back of the CRDs: the objects are there, and no holds may end."""
    cache, watches = ClusterCache(Clock()), WatchState(Metrics())
    await sweep(api, cache, cache.drop, watches)
    known = cache.uids(kinds.POLICIES)
    api.unserved = kinds.POLICIES.prefix
    swept = await sweep(api, cache, cache.drop, watches, metadata_only=metadata_only)
    assert cache.uids(kinds.POLICIES) == known == {"uid-a", "uid-b", "uid-c"}
    assert swept.unlisted == OWN
