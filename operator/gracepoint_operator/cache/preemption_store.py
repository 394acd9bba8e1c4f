"""The Preemptions that are known, records and requests, by the JobSets that they are about. No locks: see ``world``."""

from __future__ import annotations

import collections
from collections.abc import Hashable
from typing import TypeVar

from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.model.requests import PreemptionAsk

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
        self.requests: dict[Key, PreemptionAsk] = {}
        self._epochs_of: dict[str, set[Key]] = collections.defaultdict(set)
        self._requests_for: dict[Key, set[Key]] = collections.defaultdict(set)  # by JobSet, which may not be there
        self._under_way: set[Key] = set()
        self._latest: set[Key] = set()  # at least those of the last while
        self._unmade_since: dict[Key, float] = {}  # when those of ``_latest`` were first asked for that are not made
        self._without_workload: set[str] = set()  # UIDs of JobSets of which the API says that they are not there

    def put(self, epoch: PreemptionRecord) -> None:
        """Keeps a record, in place of what was known of it."""
        self.epochs[epoch.key] = epoch
        self._epochs_of[epoch.spec.workload.uid].add(epoch.key)
        self._latest.add(epoch.key)
        if epoch.phase.ended:
            self._under_way.discard(epoch.key)
        else:
            self._under_way.add(epoch.key)

    def join(self, epoch: PreemptionRecord) -> None:
        """Keeps a record as the API server has it, joined with what was known of it."""
        known = self.epochs.get(epoch.key)
        self.put(epoch if known is None else known.joined(epoch))

    def put_request(self, request: PreemptionAsk) -> Key:
        """Returns which JobSet it is for: namespace and name."""
        self.requests[request.key] = request
        wanted = (request.namespace, request.spec.workload.name)
        self._requests_for[wanted].add(request.key)
        return wanted

    def drop(self, key: Key) -> str | None:
        """Returns the UID of the JobSet that it was about; None where it was not known."""
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
            self.drop(key)

    def drop_request(self, key: Key) -> Key | None:
        """Returns which JobSet it was for; None where it was not known."""
        request = self.requests.pop(key, None)
        if request is None:
            return None
        wanted = (request.namespace, request.spec.workload.name)
        discard(self._requests_for, wanted, key)
        return wanted

    def epochs_of(self, workload_uid: str, namespace: str | None = None) -> list[PreemptionRecord]:
        """The JobSet's epochs, oldest first; only those in its namespace, where that is told."""
        epochs = (self.epochs[key] for key in self._epochs_of.get(workload_uid, ()))
        return sorted(
            (epoch for epoch in epochs if namespace in (None, epoch.namespace)), key=lambda epoch: epoch.spec.epoch
        )

    def requests_for(self, workload: Key) -> tuple[PreemptionAsk, ...]:
        """What somebody asked for the JobSet of that namespace and name, oldest first."""
        found = (self.requests[key] for key in self._requests_for.get(workload, ()))
        return tuple(sorted(found, key=lambda item: (item.created_at, item.name)))

    def disrupted_workload_uids(self) -> set[str]:
        """The JobSets with an epoch under way."""
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
        """The API was asked for this JobSet, and it is not there."""
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
