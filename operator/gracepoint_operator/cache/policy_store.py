"""The known policies as they apply, under the defaults and limits of administrators. Only this module changes them.

``get`` has the policy of a workload: the CheckpointPolicy of that name in its namespace, or else the default of the
ClusterCheckpointPolicy of that name. A CheckpointPolicy that the operator keeps for a default applies as that default
is now. Of several limits the strictest holds.

The controller's event loop owns it; there are no locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from gracepoint_operator.kube.objects import LABEL_NAMESPACE_NAME
from gracepoint_operator.model.evictions import HoldLimit
from gracepoint_operator.resources import CheckpointPolicy, ClusterCheckpointPolicy, made_from, why_no_default

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
