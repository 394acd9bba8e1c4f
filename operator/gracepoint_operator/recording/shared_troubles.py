"""What the replicas tell each other of failures in gangs that train: entries in the statuses of their policies.

A gang reports to any replica, so one may have heard that saves fail, and another one that they succeed again. An entry
is in the status as long as something fails, and by its absence all replicas learn that it is over. ``PolicyWriter``
writes the entries. Everything here runs on the controller's event loop; there are no locks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from gracepoint.wire.messages import TroubleKind
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.indexes import version_of
from gracepoint_operator.decisions.policy_conditions import TroubleKey, TroubleNews, joined_troubles
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, WorkloadTrouble
from gracepoint_operator.workloads import Workload


@dataclasses.dataclass(frozen=True)
class _Written:
    """An entry that was seen in the status of a policy, after this replica had it to tell.

    Attributes:
        version: The policy's resourceVersion then.
        entry: The entry as this replica had it. Another one may have written a newer one.
    """

    policy_uid: str
    version: int
    entry: WorkloadTrouble


class SharedTroubles:
    """The troubles that this replica has to tell, and those that it has told.

    Args:
        cache: What is known of the cluster.
    """

    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache
        # An end is kept: another replica may write an older report later. An entry leaves when it is in the status.
        self._news: dict[TroubleKey, TroubleNews] = {}
        self._written: dict[TroubleKey, _Written] = {}
        self._ended: list[TroubleKey] = []

    def tell(self, workload: Workload, kind: TroubleKind, news: TroubleNews) -> None:
        """Takes what came to this replica."""
        key = (workload.uid, str(kind))
        policy = self._cache.policies.get((workload.namespace, workload.policy))
        if isinstance(news, float) and policy is not None:
            # Clocks of replicas differ: what ends is older than its end.
            news = max([news, *(entry.time.timestamp() for item, entry in _entries(policy) if item == key)])
        self._news[key] = news

    def follow(self, policy: CheckpointPolicy) -> bool:
        """Takes what is in the status of a policy. Returns whether this replica has to write it."""
        entries, version = dict(_entries(policy)), version_of(policy.metadata)
        news = {key: self._news[key] for key in entries if key in self._news}
        is_due = joined_troubles(news, entries.values(), {uid for uid, _ in entries}) != list(entries.values())
        for key, written in list(self._written.items()):
            workload = self._cache.objects.workloads.get(key[0])
            if written.policy_uid != policy.uid or workload is None or workload.policy != policy.name:
                continue
            has_ended = isinstance(self._news.get(key), float)
            if version < written.version and not has_ended:
                # The API server was restored from a backup, or the watch is late: it is written once more.
                del self._written[key]
                self._news.setdefault(key, written.entry)
                is_due = True
            elif version > written.version and key not in entries:
                del self._written[key]
                if not has_ended:
                    self._news.pop(key, None)
                    self._ended.append(key)
        return is_due

    def take_ended(self) -> list[TroubleKey]:
        """Returns the troubles that another replica has heard the end of, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def news_for(self, policy: CheckpointPolicy, workloads: Iterable[Workload]) -> dict[TroubleKey, TroubleNews]:
        """What is to be written of these workloads: what is new, and what was written into another policy."""
        uids = {item.uid for item in workloads}
        elsewhere = {key: item.entry for key, item in self._written.items() if item.policy_uid != policy.uid}
        return {key: item for key, item in {**elsewhere, **self._news}.items() if key[0] in uids}

    def note_written(self, body: JsonObject, news: Mapping[TroubleKey, TroubleNews]) -> None:
        """Notes which of these are in the status of a policy, as it was read or written just now."""
        if not any(isinstance(item, WorkloadTrouble) for item in news.values()):
            return
        try:
            policy = CheckpointPolicy.of(body)
        except Unreadable:
            return
        entries, version = dict(_entries(policy)), version_of(policy.metadata)
        for key, item in news.items():
            if isinstance(item, WorkloadTrouble) and key in entries:
                self._written[key] = _Written(policy.uid, version, item)
                if self._news.get(key) is item:
                    del self._news[key]

    def forget(self, workload_uid: str) -> None:
        """The workload is gone, or has finished."""
        for kind in TroubleKind:
            self._news.pop((workload_uid, kind), None)
            self._written.pop((workload_uid, kind), None)


def _entries(policy: CheckpointPolicy) -> Iterator[tuple[TroubleKey, WorkloadTrouble]]:
    return (((item.uid, item.trouble), item) for item in policy.status.troubles or ())
