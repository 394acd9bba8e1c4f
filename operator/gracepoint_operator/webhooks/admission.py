"""What the webhooks ask of the operator: policies, the installed JobSet API, the size of a gang, who uses a policy.

``routes`` calls it, on the controller's event loop. It calls ``kube`` and reads ``cache``. Its tasks are those of
``SharedReads``, which end with their reads. Each read is bounded in time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping

from gracepoint_operator import workloads
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.objects import read_namespace
from gracepoint_operator.model.preemption_record import LABEL_ENDED_AT
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import (
    CheckpointPolicy,
    ClusterCheckpointPolicy,
    default_of,
    made_from,
    why_no_default,
)
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.webhooks.eviction_hold import EvictionHold
from gracepoint_operator.webhooks.injection import AdmissionSettings
from gracepoint_operator.webhooks.installation import CRD_NAME, InstalledApi, read_installed_api
from gracepoint_operator.webhooks.updates import MemberPlace, SharedReads, of_workload

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
