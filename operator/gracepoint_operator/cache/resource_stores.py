"""The known custom resources: the policies as they apply, and the preemptions and requests by workload.

``PolicyStore.get`` has the policy of a workload: the CheckpointPolicy of that name in its namespace, or else the
default of the ClusterCheckpointPolicy of that name. A CheckpointPolicy that the operator keeps for a default applies as
that default is now. Of several limits the strictest holds.

Only this module changes them. The controller's event loop owns them; there are no locks.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from gracepoint_operator.kube.objects import LABEL_NAMESPACE_NAME
from gracepoint_operator.model.evictions import HoldLimit
from gracepoint_operator.model.preemption_record import MOVABLE, PreemptionRecord, RequestRecord
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, made_from, why_no_default
from gracepoint_operator.workloads import WorkloadIdentity

Key = tuple[str, str]  # namespace, name

#: Every policy of every namespace. With a namespace: every policy of it.
EVERYTHING: Key = ("", "")


class PolicyStore:
    """Keeps policies.

    Args:
        longest_hold_s: Evictions are held for at most so many seconds in any namespace.
    """

    def __init__(self, longest_hold_s: float) -> None:
        self._for_all = HoldLimit(longest_hold_s, "the chart's evictions.longestHoldSeconds")
        self._written: dict[Key, CheckpointPolicy] = {}
        self._unreadable: set[Key] = set()  # there, but no version of them could be read
        self._of_cluster: dict[str, ClusterCheckpointPolicy] = {}
        self._labels: dict[str, Mapping[str, str]] = {}  # of namespaces, by name
        self._applied: dict[Key, CheckpointPolicy] = {}  # what ``get`` has computed
        self._changed: set[Key] = set()  # see ``take_changed``

    def put(self, key: Key, policy: CheckpointPolicy) -> CheckpointPolicy | None:
        """Stores a CheckpointPolicy. Returns what was stored before."""
        before = self._written.get(key)
        self._written[key] = policy
        if before is None or (before.uid, before.generation) != (policy.uid, policy.generation):
            self._changed.add(key)
        self._unreadable.discard(key)
        self._applied.pop(key, None)
        return before

    def put_unreadable(self, key: Key) -> None:
        """Notes a CheckpointPolicy that cannot be read. A version that could be read before stays in force."""
        self._changed.add(key)
        if key not in self._written:
            self._unreadable.add(key)
            self._applied.pop(key, None)

    def drop(self, key: Key) -> None:
        """Forgets a CheckpointPolicy that was deleted."""
        self._written.pop(key, None)
        self._unreadable.discard(key)
        self._applied.pop(key, None)

    def put_cluster(self, policy: ClusterCheckpointPolicy) -> bool:
        """Stores a ClusterCheckpointPolicy. Returns whether another one applies now."""
        before = self._of_cluster.get(policy.name)
        self._of_cluster[policy.name] = policy
        self._applied.clear()
        if before is not None and (before.uid, before.spec) == (policy.uid, policy.spec):
            return False
        self._changed.add(EVERYTHING)
        return True

    def drop_cluster(self, name: str) -> None:
        """Forgets a ClusterCheckpointPolicy that was deleted."""
        self._of_cluster.pop(name, None)
        self._applied.clear()
        self._changed.add(EVERYTHING)

    def put_labels(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Stores the labels of a namespace. Returns whether they are new."""
        if self._labels.get(namespace) == labels:
            return False
        self._labels[namespace] = labels
        self._applied.clear()
        self._changed.add((namespace, ""))
        return True

    def drop_namespace(self, namespace: str) -> None:
        """Forgets a namespace that was deleted."""
        self._labels.pop(namespace, None)
        for key in [key for key in self._applied if key[0] == namespace]:
            del self._applied[key]

    @property
    def has_changed(self) -> bool:
        """Whether anything has changed since the last call of ``take_changed``."""
        return bool(self._changed)

    def take_changed(self) -> Callable[[Key], bool]:
        """Returns a test of whether a policy, its default or its limits have changed since the last call."""
        changed, self._changed = self._changed, set()
        return lambda key: not changed.isdisjoint((EVERYTHING, (key[0], ""), key))

    def __iter__(self) -> Iterator[Key]:
        """The CheckpointPolicies that are there."""
        return iter(list(self._written))

    def __len__(self) -> int:
        """How many CheckpointPolicies are there."""
        return len(self._written)

    def __contains__(self, key: object) -> bool:
        """Whether there is such a CheckpointPolicy that can be read."""
        return key in self._written

    def get(self, key: Key) -> CheckpointPolicy | None:
        """Returns the policy that applies to the workloads of a namespace that name it. None: there is none."""
        if (policy := self._applied.get(key)) is not None:
            return policy
        unlimited = self._unlimited(key)
        if unlimited is None:
            return None  # and nothing is kept: pods may name what they like
        return self._applied.setdefault(key, self.limited(unlimited))

    def original(self, key: Key) -> ClusterCheckpointPolicy | None:
        """Returns the ClusterCheckpointPolicy whose default applies as the policy ``key``. None: a user wrote it."""
        written = self._written.get(key)
        of_user = key in self._unreadable if written is None else not made_from(written)
        return None if of_user or self._why_no_default(key) is not None else self._of_cluster.get(key[1])

    def why_withdrawn(self, policy: CheckpointPolicy) -> str | None:
        """Returns why the default that a policy is the copy of is no default here any more, and what to do. None: it is
        one, or a user wrote the policy."""
        return self._why_no_default((policy.namespace, policy.name)) if made_from(policy) else None

    def limited(self, policy: CheckpointPolicy) -> CheckpointPolicy:
        """Returns a policy as it applies under the limits of its namespace."""
        return policy.within(
            self.hold_limit(policy.namespace).seconds,
            protection=all(item.spec.limits.protection for item in self._for_namespace(policy.namespace)),
        )

    def hold_limit(self, namespace: str) -> HoldLimit:
        """Returns for how long evictions are held at most in a namespace."""
        limits = [self._for_all, *map(_hold_limit, self._for_namespace(namespace))]
        return min((limit for limit in limits if limit is not None), key=lambda limit: limit.seconds)

    def limits(self) -> Iterator[tuple[str, float]]:
        """The limits of ClusterCheckpointPolicies for holds, by their names, in seconds."""
        for item in self._of_cluster.values():
            if (limit := _hold_limit(item)) is not None:
                yield item.name, limit.seconds

    def _why_no_default(self, key: Key) -> str | None:
        return why_no_default(key[1], self._of_cluster.get(key[1]), self._labels_of(key[0]))

    def _unlimited(self, key: Key) -> CheckpointPolicy | None:
        written, original = self._written.get(key), self.original(key)
        if original is None:
            return written
        default = original.as_policy(key[0])
        if written is None or default is None:
            return default
        return written.model_copy(update={"spec": default.spec})

    def _for_namespace(self, namespace: str) -> list[ClusterCheckpointPolicy]:
        labels = self._labels_of(namespace)
        return [item for item in self._of_cluster.values() if item.selects(labels)]

    def _labels_of(self, namespace: str) -> Mapping[str, str]:
        # A namespace may come after what is in it.
        return self._labels.get(namespace, {LABEL_NAMESPACE_NAME: namespace})


def _hold_limit(policy: ClusterCheckpointPolicy) -> HoldLimit | None:
    seconds = policy.spec.limits.longest_hold_seconds
    if seconds is None:
        return None
    return HoldLimit(seconds, f"spec.limits.longestHoldSeconds of the ClusterCheckpointPolicy {policy.name}")


_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V", bound=Hashable)


class PreemptionStore:
    """Keeps preemptions and requests.

    Args:
        clock: Seconds since the epoch.

    Attributes:
        records: The Preemptions, by namespace and name.
        requests: The requests, by UID.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
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
        if before is None or any(getattr(before.spec, field) != getattr(joined.spec, field) for field in MOVABLE):
            joined = dataclasses.replace(joined, learned_at=self._clock(), seen=False)
        if joined.same_details(preemption):
            self._unwritten.discard(preemption.key)
        self._keep(joined)

    def note_seen(self, key: Key) -> None:
        """Notes that this replica has seen the signals of a preemption of which it learned from its record."""
        self._keep(dataclasses.replace(self.records[key], seen=True))

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
