"""The known preemptions and requests, by workload. Only this module changes them.

The controller's event loop owns it; there are no locks.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import TypeVar

from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord
from gracepoint_operator.workloads import WorkloadIdentity

Key = tuple[str, str]  # namespace, name
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=Hashable)


class PreemptionStore:
    """Keeps preemptions and requests.

    Attributes:
        records: The Preemptions, by namespace and name.
        requests: The requests, by UID.
    """

    def __init__(self) -> None:
        self.records: dict[Key, PreemptionRecord] = {}
        self.requests: dict[str, RequestRecord] = {}
        self._preemptions_of: dict[str, set[Key]] = collections.defaultdict(set)
        self._preemptions_under: dict[Key, set[Key]] = collections.defaultdict(set)  # by policy, which may not be there
        self._requests_for: dict[Key, set[str]] = collections.defaultdict(set)  # by workload, which may not be there
        self._in_progress: set[Key] = set()
        self._unwritten: set[Key] = set()  # records with details that the API server may not have yet
        self._latest: set[Key] = set()  # at least the preemptions of the last period for which ``latest`` was called
        self._unmade_since: dict[
            Key, float
        ] = {}  # when preemptions in ``_latest`` without a record were first asked for
        self._without_workload: set[str] = set()  # UIDs of workloads that do not exist, as the API says

    def put(self, preemption: PreemptionRecord) -> None:
        """Keeps a record that changed here. It replaces the record that was known under its name."""
        self._unwritten.add(preemption.key)
        self._keep(preemption)

    def _keep(self, preemption: PreemptionRecord) -> None:
        before = self.records.get(preemption.key)
        if before is not None:
            self._unindex(before)  # it may be about another workload, or under another policy
        self.records[preemption.key] = preemption
        self._preemptions_under[_policy_of(preemption)].add(preemption.key)
        self._preemptions_of[preemption.spec.workload.uid].add(preemption.key)
        self._summarize(preemption.spec.workload.uid)
        self._latest.add(preemption.key)
        if preemption.phase.ended:
            self._in_progress.discard(preemption.key)
        else:
            self._in_progress.add(preemption.key)

    def join(self, preemption: PreemptionRecord) -> None:
        """Joins a record from the API server with what is known of it, and keeps the result."""
        before = self.records.get(preemption.key)
        joined = preemption if before is None else before.joined(preemption)
        if joined.same_details(preemption):
            self._unwritten.discard(preemption.key)
        self._keep(joined)

    def put_request(self, request: RequestRecord) -> Key:
        """Keeps a request. Returns the namespace and name of the workload that it is for."""
        self.requests[request.uid] = request
        workload_key = (request.namespace, request.spec.workload.name)
        self._requests_for[workload_key].add(request.uid)
        return workload_key

    def drop(self, key: Key) -> str | None:
        """Removes a record. Returns the UID of the workload that it was about, or None if it was not known."""
        preemption = self.records.pop(key, None)
        if preemption is None:
            return None
        self._in_progress.discard(key)
        self._unwritten.discard(key)
        self._latest.discard(key)
        self._unmade_since.pop(key, None)
        self._unindex(preemption)
        self._without_workload &= self._preemptions_of.keys()
        return preemption.spec.workload.uid

    def drop_unmade(self, key: Key) -> None:
        """Removes a record that the API server never accepted."""
        preemption = self.records.get(key)
        if preemption is not None and preemption.created_at is None:
            self.drop(key)

    def drop_request(self, uid: str) -> Key | None:
        """Removes a request. Returns the namespace and name of its workload, or None if it was not known."""
        request = self.requests.pop(uid, None)
        if request is None:
            return None
        workload_key = (request.namespace, request.spec.workload.name)
        discard(self._requests_for, workload_key, uid)
        return workload_key

    def of_workload(self, workload_uid: str, namespace: str | None = None) -> list[PreemptionRecord]:
        """The workload's preemptions, oldest first. If ``namespace`` is given, only those in it."""
        preemptions = (self.records[key] for key in self._preemptions_of.get(workload_uid, ()))
        return sorted(
            (preemption for preemption in preemptions if namespace in (None, preemption.namespace)),
            key=lambda preemption: preemption.spec.epoch,
        )

    def preemptions_under(self, policy: Key) -> list[PreemptionRecord]:
        """The preemptions whose policy has that namespace and name, in no order."""
        return [self.records[key] for key in self._preemptions_under.get(policy, ())]

    def requests_for(self, workload: WorkloadIdentity) -> tuple[RequestRecord, ...]:
        """The requests for the workload of that kind, namespace and name, oldest first."""
        same_name = (self.requests[uid] for uid in self._requests_for.get((workload.namespace, workload.name), ()))
        of_kind = (request for request in same_name if request.spec.workload.kind == workload.kind)
        return tuple(sorted(of_kind, key=lambda request: (request.created_at, request.name)))

    def disrupted_workload_uids(self) -> set[str]:
        """The workloads with a preemption in progress."""
        return {self.records[key].spec.workload.uid for key in self._in_progress}

    def latest(self, now: float, within_s: float) -> list[PreemptionRecord]:
        """The preemptions whose records were made in the last ``within_s`` seconds.

        Also the preemptions that began in that time and have no record in the API yet.

        Args:
            now: Seconds since the epoch. It must not decrease from call to call.
            within_s: Seconds. The same in every call.
        """
        for key in list(self._latest):
            at = self.records[key].created_at
            if at is None:
                at = self._unmade_since.setdefault(key, now)
            if min(at, self._unmade_since.get(key, at)) <= now - within_s:
                self._latest.discard(key)
        return [self.records[key] for key in self._latest]

    def mark_gone(self, workload_uid: str) -> None:
        """Notes that this workload does not exist, as the API says."""
        if workload_uid in self._preemptions_of:
            self._without_workload.add(workload_uid)

    def is_gone(self, workload_uid: str) -> bool:
        """True if ``mark_gone`` was called for this workload."""
        return workload_uid in self._without_workload

    def _unindex(self, preemption: PreemptionRecord) -> None:
        discard(self._preemptions_of, preemption.spec.workload.uid, preemption.key)
        discard(self._preemptions_under, _policy_of(preemption), preemption.key)

    def _summarize(self, workload_uid: str) -> None:
        """Keeps only summaries of the workload's ended preemptions, but for the newest one and the newest disruption.

        The API server has the rest. A record that still has to be written there is kept as it is.
        """
        preemptions = self.of_workload(workload_uid)
        disruptions = [preemption.key for preemption in preemptions if not preemption.is_rehearsal]
        whole = {preemptions[-1].key, *disruptions[-1:]}
        for preemption in preemptions:
            if preemption.phase.ended and preemption.key not in whole and preemption.key not in self._unwritten:
                self.records[preemption.key] = preemption.summary()


def _policy_of(preemption: PreemptionRecord) -> Key:
    return (preemption.namespace, preemption.spec.policy.name)


def discard(index: dict[_K, set[_V]], key: _K, value: _V) -> None:
    """Removes ``value`` from the set at ``key``, and the set if it is empty then."""
    values = index.get(key, set())
    values.discard(value)
    if not values:
        index.pop(key, None)
