"""What is watched: which resources, in which versions, with which settings."""

from __future__ import annotations

from typing import cast

import kopf
import pytest
from kopf._cogs.structs import references

from gracepoint_operator import watches as event_handlers
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.relister import SELECTORS, sweep
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.workloads import JOBSETS, LONE_JOBS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock


def test_the_api_server_filters_what_is_no_part_of_a_jobset() -> None:
    selectors = {
        str(key): value for key, value in event_handlers.settings(watched={kinds.JOBS}).watching.label_selectors.items()
    }
    assert list(selectors.values()) == ["jobset.sigs.k8s.io/jobset-uid"]
    assert SELECTORS[JOBSETS] == SELECTORS[kinds.PODS] == "gracepoint.dev/policy"


def test_jobs_alone_are_watched_apart_from_those_of_jobsets() -> None:
    selectors = event_handlers.settings(watched={LONE_JOBS}).watching.label_selectors
    assert list(selectors.values()) == ["gracepoint.dev/policy,!jobset.sigs.k8s.io/jobset-uid"]
    path = "/apis/batch/v1/jobs"
    assert [event_handlers.kind_at(path, {kind}) for kind in (LONE_JOBS, kinds.JOBS)] == [LONE_JOBS, kinds.JOBS]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/api/v1/pods", (kinds.PODS, "")),
        ("/api/v1/namespaces/a/pods", (kinds.PODS, "a")),
        ("/apis/batch/v1/namespaces/a/jobs", (kinds.JOBS, "a")),
        ("/api/v1/namespaces", (None, "")),
        ("/apis/batch/v1", (None, "")),
    ],
)
def test_requests_for_a_namespace_are_distinguished_from_those_for_all(
    path: str, found: tuple[kinds.Kind | None, str]
) -> None:
    assert (event_handlers.kind_at(path, {kinds.PODS, kinds.JOBS}), event_handlers.namespace_at(path)) == found


def test_kopf_posts_nothing_has_no_peers_and_short_timeouts() -> None:
    settings = event_handlers.settings()
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.execution.default_backoff <= 5
    assert max(settings.queueing.error_delays) <= 5
    for timeout in (settings.networking.request_timeout, settings.networking.connect_timeout):
        assert timeout is not None
        assert timeout <= 10


def test_watches_end_after_whole_seconds() -> None:
    assert str(event_handlers.settings().watching.server_timeout).isdigit()


@pytest.mark.parametrize(
    ("group", "version", "preferred", "watched"),
    [
        pytest.param("kueue.x-k8s.io", "v1beta1", True, True, id="a Kueue of before"),
        pytest.param("kueue.x-k8s.io", "v1beta2", True, True, id="a Kueue of today"),
        pytest.param("kueue.x-k8s.io", "v1beta1", False, False, id="the older one of two versions"),
        pytest.param("karpenter.sh", "v1", True, True, id="Karpenter"),
        pytest.param("karpenter.sh", "v1beta1", True, False, id="a Karpenter of before"),
    ],
)
def test_kueues_workloads_are_watched_in_the_version_that_the_cluster_prefers(
    group: str, version: str, preferred: bool, watched: bool
) -> None:
    registry = kopf.OperatorRegistry()
    event_handlers.watch_all(registry, cast(Controller, None))
    plural = "workloads" if group.startswith("kueue") else "nodeclaims"
    resource = references.Resource(group, version, plural, preferred=preferred)
    selectors = [handler.selector for handler in registry._watching.get_all_handlers()]
    assert any(selector is not None and selector.check(resource) for selector in selectors) is watched


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
async def test_kueues_workloads_are_listed_in_the_version_that_the_cluster_prefers(version: str) -> None:
    clock = Clock()
    api, cache, watches = MemoryApi(clock), ClusterCache(clock), WatchState(Metrics())
    await sweep(api, cache, cache.drop, watches)
    assert cache.uids(kinds.KUEUE_WORKLOADS) == set(), "a cluster without Kueue"
    api.objects[kinds.KUEUE_WORKLOADS.prefix] = {"preferredVersion": {"groupVersion": f"kueue.x-k8s.io/{version}"}}
    api.add(kinds.KUEUE_WORKLOADS.of_version(f"kueue.x-k8s.io/{version}"), objects.workload())
    await sweep(api, cache, cache.drop, watches)
    assert cache.uids(kinds.KUEUE_WORKLOADS) == {"uid-workload"}
