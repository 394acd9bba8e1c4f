"""``goodput``: where the time of each job went, and how often it should save."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from gracepoint_cli import CommandError
from gracepoint_cli.options import (
    WORKLOAD,
    AllNamespaces,
    As,
    AsGroups,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    RequestTimeout,
    workload_names,
)
from gracepoint_cli.output import OutputFormat, put, put_data, put_table
from gracepoint_operator.goodput.accounts import read as read_ledger
from gracepoint_operator.goodput.life import RESTART, Category, TimeSpent, total_ms
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import CheckpointPolicy, SaveSuggestion


def goodput(
    workload: Annotated[
        str | None,
        typer.Argument(
            metavar=WORKLOAD, help="A JobSet, Job or TrainJob. Default: all.", autocompletion=workload_names
        ),
    ] = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
) -> None:
    """Shows where the time of each job went: training, saves, lost steps, restarts, waiting."""
    from gracepoint_cli.cluster import Cluster, parse
    from gracepoint_operator.kube.objects import POLICIES
    from gracepoint_operator.workloads import ANY_NAME

    named = None if workload is None else parse(workload)
    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        where = None if all_namespaces else namespace or cluster.namespace
        rows = accounts(cluster.list(POLICIES, where), time.time())
    if named is not None:
        rows = [account for account in rows if account.name == named.name]
        rows = [account for account in rows if named.of_workload in (None, account.kind)]
        if not rows:
            place = "in the cluster" if where is None else f"in the namespace {where!r}"
            raise CommandError(
                f"found no account of a {named.of_workload or ANY_NAME} {named.name!r} {place}",
                "The operator begins one when it sees the job under a policy. Run: kubectl gracepoint status",
            )
    if output.is_data:
        put_data(output, [account.to_json() for account in rows])
    elif not rows:
        put(f"There are no accounts. The operator begins one for each {ANY_NAME} under a policy.")
    elif named is not None:
        for account in rows:
            _put_one(account)
    else:
        _put_all(rows, all_namespaces)


def _put_all(accounts: Sequence[Account], with_namespace: bool) -> None:
    from gracepoint_cli.cluster import called
    from gracepoint_operator.goodput.life import Category

    columns = ["JOB", "GOODPUT", "TOTAL", "TRAINING", "SAVING", "LOST", "RESTARTS", "WAITING", "NOW"]
    columns += ["DISRUPTIONS", "LOSSES", "SAVE EVERY"]
    rows = []
    for account in accounts:
        row: list[object] = [
            called(account.kind, account.name),
            _percent(account.goodput),
            _duration(account.total_s),
            _duration(account.seconds(Category.TRAINING)),
            _duration(account.seconds(Category.SAVING)),
            _duration(account.seconds(Category.RECOMPUTATION)),
            _duration(account.restart_s),
            _duration(account.seconds(Category.WAITING)),
            account.state or "finished",
            account.disruptions,
            account.losses,
            "-" if account.suggestion is None else f"{account.suggestion.every_seconds:.0f} s",
        ]
        rows.append([account.namespace, *row] if with_namespace else row)
    put_table(["NAMESPACE", *columns] if with_namespace else columns, rows)


def _put_one(account: Account) -> None:
    from gracepoint_operator.goodput.life import Category

    total = account.total_s or 1.0
    rows = [
        [category.value, f"{account.seconds(category):.1f} s", _percent(account.seconds(category) / total)]
        for category in Category
    ]
    put(f"{account.kind} {account.name}, since {account.since}, state: {account.state or 'finished'}")
    put_table(["TIME WENT INTO", "SECONDS", "SHARE"], [*rows, ["total", f"{account.total_s:.1f} s", ""]])
    disruptions = "1 disruption" if account.disruptions == 1 else f"{account.disruptions} disruptions"
    put(f"{disruptions}; {account.losses} known to have lost steps")
    if (suggestion := account.suggestion) is not None:
        put(
            f"A periodic save costs {suggestion.save_seconds:.3f} s, and steps are lost about every "
            f"{_duration(suggestion.seconds_between_losses)} of running: save every {suggestion.every_seconds:.0f} s."
        )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f}%"


def _duration(seconds: float) -> str:
    """Returns a duration as people write it: 12.3 s, 4m05s, 3h02m, 5d06h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02d}h"


Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Account:
    """Where the time of one workload went until now, from the status of its policy.

    Attributes:
        policy: Name of the policy whose status has the account.
        since: When the account begins, as RFC 3339.
        state: What the time goes into now. Empty if the workload has finished.
        spent: Milliseconds by category.
        disruptions: How often the gang ended while the workload continued.
        losses: How many of these lost steps, as far as that is known.
        suggestion: How often to save. None if nothing is suggested.
    """

    namespace: str
    name: str
    kind: str
    policy: str
    since: str
    state: str
    spent: TimeSpent
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
    result = []
    for body in policy_bodies:
        try:
            policy = CheckpointPolicy.of(body)
        except Unreadable:
            continue  # ``status`` says so
        for entry in policy.status.goodput or ():
            ledger = read_ledger(entry)
            state = ledger.state()
            result.append(
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
    return sorted(result, key=lambda account: (account.namespace, account.name, account.kind))
