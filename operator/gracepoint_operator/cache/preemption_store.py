"""The known Preemptions, records and requests, by the workloads they are about. No locks: see ``cluster_cache``."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import TypeVar

from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import RequestRecord

Key = tuple[str, str]  # namespace, name
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=Hashable)


class PreemptionStore:
    """See the module.

    Attributes:
        epochs: The records.
        requests: What somebody asked for.
    """

    def __init__(self) -> None:
        self.epochs: dict[Key, PreemptionRecord] = {}
        self.requests: dict[Key, RequestRecord] = {}
        self._epochs_of: dict[str, set[Key]] = collections.defaultdict(set)
        self._requests_for: dict[Key, set[Key]] = collections.defaultdict(set)  # by workload, which may not be there
        self._under_way: set[Key] = set()
        self._latest: set[Key] = set()  # at least those of the last while
        self._unmade_since: dict[Key, float] = {}  # when those of ``_latest`` were first asked for that are not made
        self._without_workload: set[str] = set()  # UIDs of workloads of which the API says that they are not there

    def put_epoch(self, epoch: PreemptionRecord) -> None:
        self.epochs[epoch.key] = epoch
        self._epochs_of[epoch.spec.workload.uid].add(epoch.key)
        self._latest.add(epoch.key)
        if epoch.phase.ended:
            self._under_way.discard(epoch.key)
        else:
            self._under_way.add(epoch.key)

    def put_request(self, request: RequestRecord) -> Key:
        """Returns which workload it is for: namespace and name."""
        self.requests[request.key] = request
        wanted = (request.namespace, request.spec.workload.name)
        self._requests_for[wanted].add(request.key)
        return wanted

    def drop_epoch(self, key: Key) -> str | None:
        """Returns the UID of the workload that it was about; None where it was not known."""
        epoch = self.epochs.pop(key, None)
        if epoch is None:
            return None
        self._under_way.discard(key)
        self._latest.discard(key)
        self._unmade_since.pop(key, None)
        discard(self._epochs_of, epoch.spec.workload.uid, key)
        self._without_workload &= self._epochs_of.keys()
        return epoch.spec.workload.uid

    def drop_unmade(self, key: Key) -> None:
        """Forgets a record that was never made."""
        epoch = self.epochs.get(key)
        if epoch is not None and epoch.created_at is None:
            self.drop_epoch(key)

    def drop_request(self, key: Key) -> Key | None:
        """Returns which workload it was for; None where it was not known."""
        request = self.requests.pop(key, None)
        if request is None:
            return None
        wanted = (request.namespace, request.spec.workload.name)
        discard(self._requests_for, wanted, key)
        return wanted

    def epochs_of(self, workload_uid: str, namespace: str | None) -> list[PreemptionRecord]:
        """The workload's epochs, oldest first; only those in its namespace, where that is told."""
        epochs = (self.epochs[key] for key in self._epochs_of.get(workload_uid, ()))
        return sorted(
            (epoch for epoch in epochs if namespace in (None, epoch.namespace)), key=lambda epoch: epoch.spec.epoch
        )

    def requests_for(self, workload: Key) -> tuple[RequestRecord, ...]:
        """What somebody asked for the workload of that namespace and name, oldest first."""
        found = (self.requests[key] for key in self._requests_for.get(workload, ()))
        return tuple(sorted(found, key=lambda item: (item.created_at, item.name)))

    def disrupted_workload_uids(self) -> set[str]:
        """The workloads with an epoch under way."""
        return {self.epochs[key].spec.workload.uid for key in self._under_way}

    def latest(self, now: float, within_s: float) -> list[PreemptionRecord]:
        """The epochs that were made within so many seconds, or are not made yet and began within these.

        Args:
            now: Seconds since the epoch; only grows from call to call.
            within_s: The same in every call.
        """
        for key in list(self._latest):
            at = self.epochs[key].created_at
            if at is None:
                at = self._unmade_since.setdefault(key, now)
            if min(at, self._unmade_since.get(key, at)) <= now - within_s:
                self._latest.discard(key)
        return [self.epochs[key] for key in self._latest]

    def mark_gone(self, workload_uid: str) -> None:
        """The API was asked for this workload, and it is not there."""
        if workload_uid in self._epochs_of:
            self._without_workload.add(workload_uid)

    def is_gone(self, workload_uid: str) -> bool:
        """True if it was."""
        return workload_uid in self._without_workload


def discard(index: dict[_K, set[_V]], key: _K, value: _V) -> None:
    """Takes ``value`` out of the set at ``key``, and an empty set out of the index."""
    values = index.get(key, set())
    values.discard(value)
    if not values:
        index.pop(key, None)
