"""What the webhooks ask of the operator: policies, the installed JobSet API, the size of a gang, who uses a policy, and
whether an eviction is let through now.

``routes`` calls it, on the controller's event loop. It calls ``kube`` and reads ``cache``. The tasks of ``Admission``
are those of ``SharedReads``, which end with their reads. Each read is bounded in time.

``EvictionHold`` answers in the task of each call, keeps no state, and ends with its answer. If the watches have not
shown the pod as part of a gang, and its name does not fit any known workload, the answer comes without waiting.

For a pod of a gang, the API is asked for the newest Preemption, because the other replica may have made it. If none is
in progress, the API is asked for the budgets, which may refuse the eviction anyway, and if they do not, for the node: a
taint on it shows why its pods are evicted. What may be asked is asked at once. All these requests together take at most
``LOOK_WITHIN_S``. After that, the decision uses what the watches have shown.

The rest does not wait. The attempt is recorded and handled like every signal: ``decide`` starts or moves the preemption
and sends the notices. The eviction is held if that preemption is in progress (``evictions.hold``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gracepoint_operator import workloads
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Pod, read_namespace
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.model import evictions
from gracepoint_operator.model.evictions import Hold
from gracepoint_operator.model.preemption_record import LABEL_ENDED_AT, PreemptionRecord, preemption_name
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import (
    CheckpointPolicy,
    ClusterCheckpointPolicy,
    PolicyInForce,
    SignalKind,
    default_of,
    made_from,
    why_no_default,
)
from gracepoint_operator.resources.base import selects
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.webhooks.injection import AdmissionSettings
from gracepoint_operator.webhooks.installation import CRD_NAME, InstalledApi, read_installed_api
from gracepoint_operator.webhooks.updates import MemberPlace, SharedReads, of_workload
from gracepoint_operator.workloads import POD_LABEL, Workload

logger = logging.getLogger(__name__)

#: Time for all requests to the API for one answer. The webhook's own timeout is 2 s.
LOOK_WITHIN_S = 0.6

Take = Callable[[objects.Kind, JsonObject], None]


class EvictionHold:
    """Holds evictions of a gang's pods while the gang saves.

    Args:
        api: The API server.
        cache: The known objects. Records the attempt.
        take: Stores an object, as the watches do.
        decide: Decides about the workload with this UID, and carries the decisions out.
        ready: Returns whether the operator makes decisions yet.
        metrics: Counts the answers.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        take: Take,
        decide: Callable[[str], None],
        ready: Callable[[], bool],
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._api = api
        self._cache = cache
        self._take = take
        self._decide = decide
        self._ready = ready
        self._metrics = metrics
        self._clock = clock

    async def attempted(self, namespace: str, name: str, uid: str | None) -> Hold | None:
        """Records an attempt to evict a pod that is not a dry run.

        Args:
            namespace: Namespace of the pod.
            name: Name of the pod.
            uid: UID in the preconditions of the eviction. None if there is none.

        Returns:
            Why and until when the eviction has to wait. None if it is allowed.
        """
        if not self._ready():
            return None
        forbidden = False
        try:
            async with asyncio.timeout(LOOK_WITHIN_S):
                forbidden = await self._look(namespace, name)
        except (TimeoutError, client.KubeError) as error:
            logger.warning(
                "cannot read the newest state before an eviction, deciding by what the watches have shown",
                extra=about(namespace=namespace, pod=name, error=repr(error)),
            )
        pod = self._cache.objects.pod_named(namespace, name)  # after the look, which may have brought the pod
        if forbidden or pod is None or uid not in (None, pod.uid) or self._workload(pod) is None:
            return None
        self._cache.first_seen.see_attempt(pod.uid, evictions.mark(pod.uid))
        self._decide(pod.workload_uid)
        node, limit = self._cache.objects.nodes.get(pod.node), self._cache.policies.hold_limit(namespace)
        held = evictions.hold(self._preemptions(pod), pod, node, self._clock(), limit.seconds)
        self._metrics.evictions.labels(answer="go" if held is None else "wait").inc()
        if held is not None:
            logger.info("eviction held", extra=about(namespace=namespace, pod=name, until_unix_s=held.until_at))
        return held

    async def _look(self, namespace: str, name: str) -> bool:
        """Asks the API for the newest Preemption and the budgets. Returns True if a budget will refuse the eviction."""
        pod = self._cache.objects.pod_named(namespace, name)
        if pod is None and self._cache.objects.may_be_of_workload(namespace, name):
            pod = await self._unknown(namespace, name)
        workload = self._workload(pod)
        if pod is None or workload is None:
            return False
        latest = self._latest(pod)
        in_progress = latest is not None and not latest.phase.ended
        number = 1 + max((preemption.spec.epoch for preemption in self._preemptions(pod)), default=0)
        record_name = latest.name if latest and in_progress else preemption_name(workload.name, workload.uid, number)
        record = self._api.get(objects.PREEMPTIONS, namespace, record_name)
        if in_progress:
            with contextlib.suppress(client.NotFound):  # this replica began it and has not written it yet
                self._take(objects.PREEMPTIONS, await record)
            return False
        budgets = asyncio.ensure_future(self._api.list(objects.POD_DISRUPTION_BUDGETS, namespace=namespace))
        node = asyncio.ensure_future(self._api.get(objects.NODES, None, pod.node))
        try:
            with contextlib.suppress(client.NotFound):
                self._take(objects.PREEMPTIONS, await record)
                return False
            # Before the node, which may not answer in time.
            if forbid((await budgets).items, pod.labels, ready=pod.ready):
                return True
            with contextlib.suppress(client.NotFound):
                self._take(objects.NODES, await node)
            return False
        finally:
            budgets.cancel()
            node.cancel()
            await asyncio.gather(budgets, node, return_exceptions=True)

    async def _unknown(self, namespace: str, name: str) -> Pod | None:
        """Reads a pod that the watches have not shown and whose name fits a workload: it may just have been created."""
        try:
            body = await self._api.get(objects.PODS, namespace, name)
        except client.NotFound:
            return None
        if POD_LABEL in (body["metadata"].get("labels") or {}):
            self._take(objects.PODS, body)
        return self._cache.objects.pod_named(namespace, name)

    def _workload(self, pod: Pod | None) -> Workload | None:
        """Returns the workload of a pod if evictions count for it and the end of the pod would disrupt its gang."""
        if pod is None or not pod.policy or pod.phase != "Running" or pod.deletion_at is not None:
            return None
        gang = self._cache.gang(pod.workload_uid)
        policy: PolicyInForce | None = None if gang.policy is None else gang.policy.spec
        latest = self._latest(pod)
        if latest is not None and not latest.phase.ended and latest.includes(pod):
            policy = latest.spec.policy.spec
        if policy is None or not policy.counts(SignalKind.EVICTION) or gang.is_ordinary_life(pod):
            return None
        return gang.workload

    def _latest(self, pod: Pod) -> PreemptionRecord | None:
        return next(
            (preemption for preemption in reversed(self._preemptions(pod)) if not preemption.is_rehearsal), None
        )

    def _preemptions(self, pod: Pod) -> list[PreemptionRecord]:
        return self._cache.preemptions.of_workload(pod.workload_uid, pod.namespace)


def forbid(budgets: Iterable[Mapping[str, Any]], labels: Mapping[str, str], *, ready: bool) -> bool:
    """Returns whether PodDisruptionBudgets forbid to evict a running pod, so that the API server is going to refuse it.

    The API server calls the webhooks before it checks the budgets. So the webhook also sees an attempt that a budget
    is going to refuse. Such an attempt must not make a gang leave, because its owner has said that it may not be
    disrupted.

    Args:
        budgets: All PodDisruptionBudgets (policy/v1) of the pod's namespace.
        labels: The pod's labels.
        ready: Whether the pod's condition Ready is True. A pod that is not ready does not count as healthy, so a budget
            may allow its eviction (``spec.unhealthyPodEvictionPolicy``).
    """
    about_it = [budget for budget in budgets if selects((budget.get("spec") or {}).get("selector"), labels)]
    if len(about_it) > 1:
        return True  # the eviction subresource supports only one budget for a pod, and fails if there are two
    return any(not (_allows(budget) or (not ready and _lets_unready_go(budget))) for budget in about_it)


def _allows(budget: Mapping[str, Any]) -> bool:
    status = budget.get("status") or {}
    # Kubernetes does not allow an eviction if the budget's status is older than its spec.
    is_current = int(status.get("observedGeneration") or 0) >= int(budget["metadata"].get("generation") or 0)
    return is_current and int(status.get("disruptionsAllowed") or 0) > 0


def _lets_unready_go(budget: Mapping[str, Any]) -> bool:
    """Returns whether the budget allows the eviction of a pod that is not ready, as the eviction subresource decides.

    It does with AlwaysAllow, or if enough other pods are healthy (IfHealthyBudget, the default).
    """
    if budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return True
    status = budget.get("status") or {}
    desired = int(status.get("desiredHealthy") or 0)
    return int(status.get("currentHealthy") or 0) >= desired > 0


#: At most so many PreemptionRequests, open or over, are in one namespace.
DEFAULT_REQUESTS_PER_NAMESPACE = 200
_WORKLOAD_API_S = 60.0
_PLACES_S = 1.0  # two reads are within the timeout of the webhook for pods


@dataclasses.dataclass
class _RequestCount:
    """How many requests a namespace has, with those that were allowed since."""

    number: int


class Admission:
    """What the webhooks ask of the operator.

    Args:
        api: The API server.
        cache: What is known of the cluster.
        evictions: Decides whether an eviction waits.
        certificates: Has the certificate with which pods verify the operator.
        service_url: Where pods reach the operator.
        requests_per_namespace: At most so many PreemptionRequests are in one namespace.

    Attributes:
        evictions: Decides whether an eviction waits.
    """

    def __init__(
        self,
        api: KubeClient,
        cache: ClusterCache,
        evictions: EvictionHold,
        certificates: Certificates,
        service_url: str,
        requests_per_namespace: int = DEFAULT_REQUESTS_PER_NAMESPACE,
    ) -> None:
        self.evictions = evictions
        self._api = api
        self._cache = cache
        self._certificates = certificates
        self._service_url = service_url
        self._requests_per_namespace = requests_per_namespace
        self._requests = SharedReads(self._count_requests, _PLACES_S)
        self._installed_api: InstalledApi | None = None
        self._installed_api_until = 0.0
        self._places = SharedReads(self._read_places, _PLACES_S)

    @property
    def settings(self) -> AdmissionSettings:
        """How pods reach the operator, as of now."""
        return AdmissionSettings(operator_url=self._service_url, ca_certificate=self._certificates.ca)

    async def policy(self, namespace: str, name: str) -> CheckpointPolicy | None:
        """Returns the policy as its author wrote it, also where limits of administrators apply. None if there is none.

        It may be the default of a ClusterCheckpointPolicy of that name. It is read from the API server, as a policy and
        its first workload are often applied together.

        Raises:
            Unreadable: The policy exists and cannot be used.
            client.KubeError: It could not be read.
        """
        is_copy, original = False, None
        with contextlib.suppress(client.NotFound):
            written = CheckpointPolicy.of(await self._api.get(objects.POLICIES, namespace, name))
            if not made_from(written):
                return written
            is_copy = True
        with contextlib.suppress(client.NotFound):
            original = ClusterCheckpointPolicy.of(await self._api.get(objects.CLUSTER_POLICIES, None, name))
        reason = why_no_default(name, original, {} if original is None else await self._labels(namespace))
        if reason is None and original is not None:
            return original.as_policy(namespace)
        if is_copy:
            raise Unreadable(f"It is kept for a default that was withdrawn: {reason}")
        return None

    def limited(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Returns a policy as it applies under the limits of administrators."""
        return self._cache.policies.limited(policy)

    async def default_policy(self, namespace: str) -> CheckpointPolicy | None:
        """Returns the policy of workloads that name none, read from the API server. None: there is no such default.

        Raises:
            Unreadable: It cannot be used.
            client.KubeError: It could not be read.
        """
        bodies = (await self._api.list(objects.CLUSTER_POLICIES)).items
        if not any((body.get("spec") or {}).get("default") for body in bodies):
            return None
        original = default_of(map(ClusterCheckpointPolicy.of, bodies), await self._labels(namespace))
        return None if original is None else await self.policy(namespace, original.name)

    async def _labels(self, namespace: str) -> Mapping[str, str]:
        return read_namespace(await self._api.get(objects.NAMESPACES, None, namespace)).labels

    async def installed_workload_api(self, *, afresh: bool = False) -> InstalledApi:
        """Returns what the installed JobSet API lacks. It may be upgraded while the operator runs.

        Args:
            afresh: Reads it now instead of using a result of the last minute.

        Raises:
            LookupError, client.KubeError: It could not be read.
        """
        now = time.monotonic()
        if self._installed_api is None or afresh or now >= self._installed_api_until:
            self._installed_api = read_installed_api(await self._api.get(objects.CRDS, None, CRD_NAME))
            self._installed_api_until = now + _WORKLOAD_API_S
        return self._installed_api

    async def places(self, namespace: str, labels: Mapping[str, str]) -> dict[str, MemberPlace]:
        """Returns the places that the members of a pod's gang have now, read after this call.

        Args:
            namespace: Namespace of the pod.
            labels: Labels of the pod.

        Raises:
            TimeoutError, client.KubeError: They could not be read.
        """
        kind, name = workloads.place_in(labels)
        return await self._places.get((kind, namespace, name))

    async def _read_places(self, key: tuple[objects.Kind, str, str]) -> dict[str, MemberPlace]:
        try:
            return of_workload(await self._api.get(*key))
        except client.NotFound:
            return {}  # the pod belongs to no workload that exists

    async def why_requests_are_too_many(self, namespace: str) -> str | None:
        """Counts a PreemptionRequest that is about to be created. Returns why it is refused. None: it is allowed.

        Raises:
            TimeoutError, client.KubeError: The requests could not be counted.
        """
        count = await self._requests.get(namespace)
        if count.number >= self._requests_per_namespace:
            return (
                f"found {count.number} PreemptionRequests in the namespace {namespace}, expected fewer than "
                f"{self._requests_per_namespace} (requests.maxPerNamespace of the chart). Those that are over are "
                "deleted by themselves; to delete them now: "
                f"kubectl delete preemptionrequests -n {namespace} -l {LABEL_ENDED_AT}"
            )
        count.number += 1  # others that share this count may be created before the next one
        return None

    async def _count_requests(self, namespace: str) -> _RequestCount:
        return _RequestCount(await self._api.count(objects.REQUESTS, namespace))

    def users_of(self, namespace: str, policy: str) -> list[str]:
        """Returns kinds and names of the running workloads that use a policy.

        Args:
            namespace: The policy's namespace. Empty: it is a ClusterCheckpointPolicy, whose default they use.
            policy: The policy's name.
        """
        cache = self._cache
        if namespace:
            uids = cache.objects.workloads_with_policy((namespace, policy))
            users = [(cache.objects.workloads[uid], "") for uid in uids]
        else:
            named = [item for item in cache.objects.workloads.values() if item.policy == policy]
            users = [
                (item, f"{item.namespace}/") for item in named if cache.policies.original((item.namespace, policy))
            ]
        running = [(item, prefix) for item, prefix in users if not (item.finished or item.deleted)]
        return sorted(f"{item.kind} {prefix}{item.name}" for item, prefix in running)

    def disrupted_nodes(self) -> frozenset[str]:
        """Returns the names of the nodes that new pods should avoid."""
        return frozenset(self._cache.objects.disrupted_nodes)
