"""The known preemptions and requests, by the workloads that they are about. The only writer of either.

The controller's event loop owns it; there are no locks.
"""

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
    """Keeps preemptions and requests.

    Attributes:
        epochs: The records, by namespace and name.
        requests: The requests, by namespace and name.
    """

    def __init__(self) -> None:
        self.epochs: dict[Key, PreemptionRecord] = {}
        self.requests: dict[Key, RequestRecord] = {}
        self._epochs_of: dict[str, set[Key]] = collections.defaultdict(set)
        self._requests_for: dict[Key, set[Key]] = collections.defaultdict(set)  # by workload, which may not be there
        self._under_way: set[Key] = set()
        self._latest: set[Key] = set()  # at least those of the last period that ``latest`` was asked for
        self._unmade_since: dict[Key, float] = {}  # when those of ``_latest`` that are not made were first asked for
        self._without_workload: set[str] = set()  # UIDs of workloads of which the API says that they are not there

    def put(self, epoch: PreemptionRecord) -> None:
        """Keeps a record. It replaces what was known under its name."""
        self.epochs[epoch.key] = epoch
        self._epochs_of[epoch.spec.workload.uid].add(epoch.key)
        self._latest.add(epoch.key)
        if epoch.phase.ended:
            self._under_way.discard(epoch.key)
        else:
            self._under_way.add(epoch.key)

    def join(self, epoch: PreemptionRecord) -> None:
        """Joins a record from the API server with what is known of it, and keeps the result."""
        known = self.epochs.get(epoch.key)
        self.put(epoch if known is None else known.joined(epoch))

    def put_request(self, request: RequestRecord) -> Key:
        """Keeps a request. Returns the namespace and name of the workload that it is for."""
        self.requests[request.key] = request
        wanted = (request.namespace, request.spec.workload.name)
        self._requests_for[wanted].add(request.key)
        return wanted

    def drop(self, key: Key) -> str | None:
        """Removes a record. Returns the UID of the workload that it was about, or None if it was not known."""
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
        """Removes a record that the API server never accepted."""
        epoch = self.epochs.get(key)
        if epoch is not None and epoch.created_at is None:
            self.drop(key)

    def drop_request(self, key: Key) -> Key | None:
        """Removes a request. Returns the namespace and name of its workload, or None if it was not known."""
        request = self.requests.pop(key, None)
        if request is None:
            return None
        wanted = (request.namespace, request.spec.workload.name)
        discard(self._requests_for, wanted, key)
        return wanted

    def epochs_of(self, workload_uid: str, namespace: str | None = None) -> list[PreemptionRecord]:
        """The workload's epochs, oldest first. If ``namespace`` is given, only those in it."""
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
            now: Seconds since the epoch. It must not decrease from call to call.
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
        """True if ``mark_gone`` was called for this workload."""
        return workload_uid in self._without_workload


def discard(index: dict[_K, set[_V]], key: _K, value: _V) -> None:
    """Removes ``value`` from the set at ``key``, and the set if it is empty then."""
    values = index.get(key, set())
    values.discard(value)
    if not values:
        index.pop(key, None)
