"""What ``goodput`` shows: where the time of each workload went, from the statuses of the policies. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from gracepoint_operator.goodput import status_codec
from gracepoint_operator.goodput.categories import RESTART, Category, Spent, total_ms
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, SaveSuggestion

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Account:
    """Where the time of one workload went, until now.

    Attributes:
        policy: Name of the policy whose status has the account.
        since: When the account begins, as RFC 3339.
        state: What the time goes into now. Empty if the workload has finished.
        spent: Milliseconds by category.
        disruptions: How often the gang ended while the workload went on.
        losses: How many of these lost steps, as far as that is known.
        suggestion: How often to save. None if nothing is suggested.
    """

    namespace: str
    name: str
    kind: str
    policy: str
    since: str
    state: str
    spent: Spent
    disruptions: int
    losses: int
    suggestion: SaveSuggestion | None

    @property
    def total_s(self) -> float:
        """Seconds of the whole account."""
        return total_ms(self.spent) / 1000

    @property
    def restart_s(self) -> float:
        """Seconds of restarts, without the time for which there were no pods."""
        return total_ms(self.spent, tuple(part for part in RESTART if part is not Category.WAITING)) / 1000

    @property
    def goodput(self) -> float | None:
        """The share of the time that went into steps which were kept, from 0 to 1. None if no time has passed."""
        total = total_ms(self.spent)
        return self.spent.get(Category.TRAINING, 0) / total if total else None

    def seconds(self, category: Category) -> float:
        """Returns the seconds of a category."""
        return self.spent.get(category, 0) / 1000

    def to_json(self) -> Json:
        """Returns the account as JSON with names as in Kubernetes."""
        return {
            "namespace": self.namespace,
            "name": self.name,
            "kind": self.kind,
            "policy": self.policy,
            "since": self.since,
            "state": self.state or None,
            "goodput": None if self.goodput is None else round(self.goodput, 4),
            "totalSeconds": self.total_s,
            "seconds": {category.value: self.seconds(category) for category in Category},
            "disruptions": self.disruptions,
            "losses": self.losses,
            "suggestion": None if self.suggestion is None else self.suggestion.to_json(),
        }


def accounts(policy_bodies: Iterable[Json], now_s: float) -> list[Account]:
    """Returns the accounts in these policies, sorted by namespace and name. Policies that cannot be read are left out.

    Args:
        policy_bodies: The policies.
        now_s: The time, in seconds since the epoch.
    """
    found = []
    for body in policy_bodies:
        try:
            policy = CheckpointPolicy.of(body)
        except Unreadable:
            continue  # ``status`` says so
        for entry in policy.status.goodput or ():
            ledger = status_codec.read(entry)
            state = ledger.state()
            found.append(
                Account(
                    namespace=policy.namespace,
                    name=entry.name,
                    kind=entry.kind,
                    policy=policy.name,
                    since=entry.since.isoformat(timespec="seconds").replace("+00:00", "Z"),
                    state="" if state is None else str(state),
                    spent=ledger.spent(round(now_s * 1000)),
                    disruptions=entry.disruptions,
                    losses=entry.losses,
                    suggestion=entry.suggestion,
                )
            )
    return sorted(found, key=lambda account: (account.namespace, account.name, account.kind))
