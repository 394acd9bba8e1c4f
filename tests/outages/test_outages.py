"""An API server that fails, for a while or in part, ends no replica; what happened meanwhile is known afterwards."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path

import pytest

from gracepoint_operator.cache import relister, watch_state
from gracepoint_operator.kube.client import RetryPauses
from gracepoint_operator.watches import REQUEST_BACKOFFS
from tests.outages.fault_proxy import FaultProxy, How
from tests.outages.kinds import node
from tests.outages.replica import replica
from tests.testcluster.api_server import ApiServer
from tests.waiting import until

#: How much faster all pauses pass in the long outages: as many attempts and lists fail as in 10 minutes.
FASTER = 60
FAST = RetryPauses(0.2 / FASTER, 5.0 / FASTER)


@pytest.mark.parametrize("how", [How.ANSWER_500, How.ABORT, How.HANG])
def test_after_an_outage_of_some_seconds_everything_is_known(
    api_server: ApiServer, proxy: FaultProxy, kubeconfig: Path, how: How
) -> None:
    api_server.create(node("stays"), node("goes"))
    with replica(kubeconfig) as running:
        running.knows_nodes("goes", "stays")
        with proxy.fault(how):
            api_server.kubectl("delete", "node", "goes")
            api_server.create(node("comes"))
            time.sleep(4)
            assert running.core.ready
        proxy.cut()  # what hung is dead
        running.knows_nodes("comes", "stays")
        api_server.create(node("later"))
        running.knows_nodes("comes", "later", "stays")


@pytest.mark.parametrize("seconds", [1, 60, 600])
def test_an_outage_of_any_length_is_outlived(
    api_server: ApiServer, proxy: FaultProxy, kubeconfig: Path, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((relister, "EVERY_S"), (watch_state, "HANGS_AFTER_S")):
        monkeypatch.setattr(module, name, getattr(module, name) / FASTER)
    api_server.create(node("before"))
    with replica(kubeconfig, backoffs=FAST) as running:
        running.core._relister.again_s /= FASTER
        running.knows_nodes("before")
        running.until(lambda: proxy.has_seen("/api/v1/nodes?watch=true"), "the watch of nodes")
        with proxy.fault(How.ANSWER_503):
            time.sleep(max(seconds / FASTER, 1))
            assert running.core.ready
            assert running.core.watches.hanging() == [], "the kubelet would kill the replica"
        api_server.create(node("after"))
        running.knows_nodes("after", "before")
        if seconds == 600:
            attempts = seconds / 5  # the longest pause
            assert running.count("gracepoint_watch_failures_total", kind="nodes") > attempts / 2


def test_requests_are_retried_forever_starting_with_short_pauses() -> None:
    waited_s = attempts = 0.0
    for pause_s in REQUEST_BACKOFFS:
        assert 0 < pause_s <= 5
        waited_s, attempts = waited_s + pause_s, attempts + 1
        if waited_s > 86_400:
            break
    assert attempts > 86_400 / 5
    assert next(iter(REQUEST_BACKOFFS)) <= 0.2


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (How.ANSWER_500, "kueue.x-k8s.io"),
        (How.ANSWER_500, "karpenter.sh"),
        (How.ANSWER_404, "karpenter.sh"),
        (How.HANG, "kueue.x-k8s.io"),
        (How.ERROR_EVENT, "karpenter.sh"),
        (How.CUT_JSON, "kueue.x-k8s.io"),
    ],
)
def test_failing_optional_kind_blocks_nothing_and_is_retried(
    api_server: ApiServer,
    proxy: FaultProxy,
    kubeconfig: Path,
    kind: str,
    how: How,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gracepoint_operator.kube.client._LIST_TIMEOUT_S", 3.0)
    monkeypatch.setattr("gracepoint_operator.cache.relister._UNLISTED_AGAIN_S", 0.5)
    plural = {"kueue.x-k8s.io": "workloads", "karpenter.sh": "nodeclaims"}[kind]
    api_server.create(node("before"))
    with proxy.fault(how, kind), replica(kubeconfig) as running:
        running.knows_nodes("before")
        api_server.create(node("after"))
        running.knows_nodes("after", "before")
        restarts = {"thread": "watch required"}
        assert running.count("gracepoint_watch_restarts_total", **restarts) == 0
        if how in (How.ANSWER_500, How.HANG):
            assert running.count("gracepoint_watch_failures_total", kind=plural) > 0
            # A failure is logged once it has lasted.
            until(lambda: any(plural in str(vars(record)) for record in caplog.records), "the log to name the kind")


@pytest.mark.parametrize("how", [How.ERROR_EVENT, How.CUT_JSON, How.ANSWER_404, How.ANSWER_401])
def test_what_kopf_does_not_retry_makes_it_begin_again(
    api_server: ApiServer, proxy: FaultProxy, kubeconfig: Path, how: How, caplog: pytest.LogCaptureFixture
) -> None:
    api_server.create(node("stays"), node("goes"))
    with replica(kubeconfig) as running:
        running.knows_nodes("goes", "stays")
        with proxy.fault(how, "/api/v1/nodes"):
            api_server.kubectl("delete", "node", "goes")
            time.sleep(2)
        running.knows_nodes("stays")
        api_server.create(node("later"))
        running.knows_nodes("later", "stays")
    gc.collect()
    left = [str(record.exc_info) for record in caplog.records if record.name == "asyncio" and record.exc_info]
    assert left == [], "finalizers must not format tracebacks: that breaks code that is being parsed"


def test_a_replica_that_starts_in_an_outage_is_ready_after_it(
    api_server: ApiServer, proxy: FaultProxy, kubeconfig: Path
) -> None:
    api_server.create(node("there"))
    with contextlib.ExitStack() as outage:
        outage.enter_context(proxy.fault(How.ANSWER_503))
        with replica(kubeconfig, ready=False) as running:
            time.sleep(3)
            assert not running.core.ready
            outage.close()
            running.knows_nodes("there")
            running.until(lambda: running.core.ready, "the replica to be ready")
            api_server.create(node("later"))
            running.knows_nodes("later", "there")
