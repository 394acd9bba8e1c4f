"""The Evictions of lifecycle.k8s.io that are known, by the pod that they are about.

The controller's event loop owns the index; there are no locks.
"""

from __future__ import annotations

from collections.abc import Iterable

from gracepoint_operator.cache.first_seen import FirstSeen
from gracepoint_operator.cache.preemption_store import Key
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.eviction_requests import EvictionAsked


class EvictionIndex:
    """See the module.

    Args:
        first_seen: Is told when the operator's turn in an Eviction began.
    """

    def __init__(self, first_seen: FirstSeen) -> None:
        self._first_seen = first_seen
        self._by_uid: dict[str, EvictionAsked] = {}
        self._of_pod: dict[str, str] = {}  # the pod's UID -> the Eviction's
        self._named: dict[Key, str] = {}

    def put(self, asked: EvictionAsked, *, listed: bool) -> bool:
        """Stores an Eviction. Returns whether anything changed that matters."""
        before = self._by_uid.get(asked.uid)
        self._by_uid[asked.uid] = asked
        self._named[asked.key] = asked.uid
        if asked.pod_uid:
            self._of_pod[asked.pod_uid] = asked.uid
        self._first_seen.see(asked.uid, {asked.mark: asked.started_at} if asked.active else {}, listed=listed)
        return before is None or (before.active, before.requesters) != (asked.active, asked.requesters)

    def drop(self, uid: str) -> str:
        """Forgets an Eviction that was deleted. Returns the UID of its pod. Empty if it is not known."""
        gone = self._by_uid.pop(uid, None)
        if gone is None:
            return ""
        if self._named.get(gone.key) == uid:
            del self._named[gone.key]
        if self._of_pod.get(gone.pod_uid) == uid:
            del self._of_pod[gone.pod_uid]
        return gone.pod_uid

    def named(self, key: Key) -> EvictionAsked | None:
        return self._by_uid.get(self._named.get(key, ""))

    def of(self, pods: Iterable[Pod]) -> dict[str, EvictionAsked]:
        """The Evictions in which it is the operator's turn, by the UID of the pod."""
        if not self._of_pod:  # nearly always
            return {}
        found = ((pod, self._by_uid[self._of_pod[pod.uid]]) for pod in pods if pod.uid in self._of_pod)
        # Only those in the pod's namespace, because anybody may write any UID.
        return {pod.uid: asked for pod, asked in found if asked.active and asked.namespace == pod.namespace}
