"""Shows the other replicas that this one lives, and says which of them live: by a Lease for each.

What a replica writes into policies counts as long as the replica lives. Its Lease, renewed twice a minute, says
that for all policies at once, so that these need not be written while nothing changes.

Everything here runs on the controller's event loop, in the task of ``ConnectionWriter``. When another replica's Lease
was renewed is taken from the moment at which the change was seen here, as clocks of machines differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from gracepoint.wire import names
from gracepoint_operator.kube import client, objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import format_time, parse_time

#: A replica whose Lease was not renewed for this long is gone.
STALE_S = 150.0
#: A Lease that was not renewed for this long is deleted. A replica that ends deletes its own.
_FORGOTTEN_S = 3600.0
#: On the Leases, so that they are found.
LABEL = f"{names.GROUP}/replica"


class ReplicaLease:
    """The Lease of this replica, and those of the others.

    Args:
        api: The API server.
        clock: Seconds since the epoch.
        replica: This replica's name.
        namespace: The operator's own namespace.
        view_age_s: Returns the seconds since the API server last answered the watch of the policies, which have what
            the replicas write.

    Attributes:
        replica: This replica's name.
    """

    def __init__(
        self,
        api: KubeClient,
        clock: Callable[[], float],
        replica: str,
        namespace: str,
        view_age_s: Callable[[], float],
    ) -> None:
        self._api = api
        self._clock = clock
        self.replica = replica
        self._namespace = namespace
        self._view_age_s = view_age_s
        self._name = f"gracepoint-{replica.lower()}"
        self._own: JsonObject | None = None
        self._seen: dict[str, tuple[str, float]] = {}  # replica -> its renewTime, and when that was seen first
        self._renewed_at = float("-inf")

    async def renew(self) -> None:
        """Renews this replica's Lease, and looks at those of the others.

        Raises:
            client.KubeError: The API server does not answer, or refuses it.
        """
        now = self._clock()
        spec: JsonObject = {
            "holderIdentity": self.replica,
            "leaseDurationSeconds": int(STALE_S),
            "renewTime": format_time(now),
        }
        try:
            self._own = await self._api.merge(objects.LEASES, self._namespace, self._name, {"spec": spec})
        except client.NotFound:
            meta = {"name": self._name, "namespace": self._namespace, "labels": {LABEL: ""}}
            body = {"apiVersion": objects.LEASES.api_version, "kind": "Lease", "metadata": meta, "spec": spec}
            self._own = await self._api.create(objects.LEASES, self._namespace, body)
        listed = await self._api.list(objects.LEASES, label_selector=LABEL, namespace=self._namespace)
        self._renewed_at = self._clock()
        renewals: dict[str, tuple[str, float]] = {}
        for item in listed.items:
            lease_spec = item["spec"]
            holder, renewed = str(lease_spec.get("holderIdentity") or ""), str(lease_spec.get("renewTime") or "")
            earlier = self._seen.get(holder)
            if earlier is None:
                renewals[holder] = (renewed, min(now, parse_time(renewed) or now))
            else:
                renewals[holder] = earlier if earlier[0] == renewed else (renewed, now)
            if now - renewals[holder][1] > _FORGOTTEN_S:
                with contextlib.suppress(client.NotFound, client.Conflict, client.Refused):
                    await self._api.delete(objects.LEASES, item)
        self._seen = renewals

    def is_watching(self, within_s: float) -> bool:
        """Returns whether the API server has answered the watch of the policies within that time."""
        return self._view_age_s() <= within_s

    def sees_others(self, within_s: float) -> bool:
        """Returns whether this replica reaches the API server, so that what the others have written there is known."""
        return self._clock() - self._renewed_at <= within_s and self.is_watching(within_s)

    def lives(self, replica: str, written_at: float) -> bool:
        """Returns whether a replica renews its Lease, or has written something a moment ago.

        The Lease of a replica that has just started may not have been seen yet, and older versions have none.

        Args:
            replica: Its name.
            written_at: When it wrote what is asked about, in seconds since the epoch.
        """
        renewal = self._seen.get(replica)
        newest_at = written_at if renewal is None else max(written_at, renewal[1])
        # What has become of a Lease since this replica last looked cannot be known here.
        return replica == self.replica or self._renewed_at - newest_at < STALE_S

    async def give_up(self) -> None:
        """Deletes this replica's Lease, as it ends."""
        if self._own is not None:
            with contextlib.suppress(client.KubeError):
                await self._api.delete(objects.LEASES, self._own)
