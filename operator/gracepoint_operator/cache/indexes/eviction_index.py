"""The Evictions of lifecycle.k8s.io that are known, by the pod that they are about.

The controller's event loop owns the index; there are no locks.
"""

from __future__ import annotations

from collections.abc import Iterable

from gracepoint_operator.cache.indexes.first_seen import FirstSeen
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
        # Namespace and UID of the pod -> UIDs of the Evictions. Anybody may write any pod's UID into their namespace.
        self._of_pod: dict[Key, set[str]] = {}
        self._named: dict[Key, str] = {}

    def put(self, asked: EvictionAsked, *, listed: bool) -> bool:
        """Stores an Eviction. Returns whether anything changed that matters."""
        before = self._by_uid.get(asked.uid)
        if before is not None:
            self._unlink(before)
        self._by_uid[asked.uid] = asked
        self._named[asked.key] = asked.uid
        if asked.pod_uid:
            self._of_pod.setdefault((asked.namespace, asked.pod_uid), set()).add(asked.uid)
        self._first_seen.see(asked.uid, {asked.mark: asked.started_at} if asked.lasts else {}, listed=listed)
        return before is None or _what_matters(before) != _what_matters(asked)

    def drop(self, uid: str) -> str:
        """Forgets an Eviction that was deleted. Returns the UID of its pod. Empty if it is not known."""
        gone = self._by_uid.pop(uid, None)
        if gone is None:
            return ""
        if self._named.get(gone.key) == uid:
            del self._named[gone.key]
        self._unlink(gone)
        return gone.pod_uid

    def named(self, key: Key) -> EvictionAsked | None:
        return self._by_uid.get(self._named.get(key, ""))

    def of(self, pods: Iterable[Pod]) -> dict[str, EvictionAsked]:
        """The Evictions that are signals, by the UID of the pod. If a pod has several, one that waits for an answer."""
        if not self._of_pod:  # nearly always
            return {}
        found: dict[str, EvictionAsked] = {}
        for pod in pods:
            lasting = [
                asked for uid in self._of_pod.get((pod.namespace, pod.uid), ()) if (asked := self._by_uid[uid]).lasts
            ]
            if lasting:
                found[pod.uid] = min(lasting, key=lambda asked: (not asked.active, asked.started_at or 0.0, asked.uid))
        return found

    def _unlink(self, asked: EvictionAsked) -> None:
        place = (asked.namespace, asked.pod_uid)
        uids = self._of_pod.get(place)
        if uids is not None:
            uids.discard(asked.uid)
            if not uids:
                del self._of_pod[place]


def _what_matters(asked: EvictionAsked) -> tuple[bool, bool, tuple[str, ...]]:
    return asked.active, asked.answered, asked.requesters
