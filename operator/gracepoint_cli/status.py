"""``status``: the jobs under Gracepoint, their policies, who is connected, and whose save fits its grace period."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gracepoint.wire.names import LABEL_POLICY, LABEL_ROLE, ROLE_HELPER
from gracepoint_cli import CommandError
from gracepoint_cli.cluster import called, made_by
from gracepoint_cli.options import (
    AllNamespaces,
    As,
    AsGroups,
    Context,
    Kubeconfig,
    Namespace,
    Output,
    RequestTimeout,
    Watch,
)
from gracepoint_cli.output import OutputFormat, put, put_data, put_table, say
from gracepoint_operator.decisions.waiting import in_words
from gracepoint_operator.kube.objects import parse_time, read_labels
from gracepoint_operator.model.preemption_record import CONDITION_STARTED, PreemptionRecord, kept_policy
from gracepoint_operator.read_errors import Unreadable, reading
from gracepoint_operator.recording.replica_lease import STALE_S
from gracepoint_operator.resources import CheckpointPolicy, StartWaitStatus, Training, WorkloadSnapshots
from gracepoint_operator.webhooks.training_jobs import Problems, gang
from gracepoint_operator.workloads import BY_NAME, membership_of

if TYPE_CHECKING:
    from gracepoint_cli.cluster import Cluster

#: Seconds between two looks at the cluster with ``--watch``.
_WATCH_EVERY_S = 2.0


class _Tables(NamedTuple):
    policies: Sequence[PolicyOverview]
    jobs: Sequence[JobOverview]
    unmade: Sequence[tuple[str, str]]
    refused: Sequence[str]


def status(
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    output: Output = OutputFormat.TABLE,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    as_user: As = None,
    as_groups: AsGroups = None,
    request_timeout: RequestTimeout = None,
    watch: Watch = False,
) -> None:
    """Shows jobs and policies: who is connected, and whose save fits its grace period."""
    from gracepoint_cli.cluster import Cluster

    with Cluster(kubeconfig, context, as_user, request_timeout, as_groups) as cluster:
        where = None if all_namespaces else namespace or cluster.namespace
        shown = None
        while True:
            try:
                tables = _read_tables(cluster, where)
            except CommandError as error:
                if shown is None:  # nothing was right yet: the arguments may be wrong
                    raise
                say(f"error: {error}")
                tables = shown
            if tables != shown:
                if shown is not None:
                    _put_between(output)
                _show(tables, where, output)
                shown = tables
            if not watch:
                return
            time.sleep(_WATCH_EVERY_S)


def _put_between(output: OutputFormat) -> None:
    """Separates two answers. JSON values need nothing between them."""
    if not output.is_data:
        put()
    elif output is OutputFormat.YAML:
        put("---")


def _read_tables(cluster: Cluster, where: str | None) -> _Tables:
    from gracepoint.wire.names import LABEL_POLICY
    from gracepoint_cli.cluster import listed, without_workload
    from gracepoint_operator.kube.objects import PODS, POLICIES, PREEMPTIONS

    policy_bodies = cluster.list(POLICIES, where)
    bodies, refused = listed(cluster, where)
    jobs = job_rows(
        bodies,
        policy_bodies,
        cluster.list(PODS, where, labels=LABEL_POLICY),
        cluster.list(PREEMPTIONS, where),
        now=datetime.datetime.now(datetime.UTC),
        leases=_leases(cluster),
    )
    unmade = without_workload(cluster, where, bodies)
    return _Tables(policy_rows(policy_bodies), jobs, unmade, refused)


def _show(tables: _Tables, where: str | None, output: OutputFormat) -> None:
    from gracepoint.wire.names import LABEL_POLICY
    from gracepoint_operator.workloads import ANY_NAME

    policies, jobs, unmade, refused = tables
    with_namespace = where is None or output is OutputFormat.WIDE
    for reason in refused:
        say(f"warning: {reason}")
    if output.is_data:
        answer = {"policies": [item.to_json() for item in policies], "workloads": [item.to_json() for item in jobs]}
        put_data(output, answer)
        return
    if not policies and not jobs and not unmade:
        place = "in the cluster" if where is None else f"in the namespace {where!r}"
        put(f"There is no CheckpointPolicy and no {ANY_NAME} with the label {LABEL_POLICY} {place}.")
        put("  To look elsewhere: -n NAMESPACE or -A. To begin: docs/install.md, “The first job”.")
        return
    _put_policies(policies, with_namespace)
    put()
    if jobs:
        _put_jobs(jobs, with_namespace)
        _put_snapshots(jobs, with_namespace, time.time())
    else:
        put(f"No {ANY_NAME} has the label {LABEL_POLICY}.")
    problems = [(f"policy {p.name}", text) for p in policies for text in (*p.problems, *([p.error] if p.error else []))]
    problems += [(job.called, f"waits for: {in_words(wait, time.time())}") for job in jobs for wait in job.waits]
    problems += [(job.called, text) for job in jobs for text in job.problems if not job.finished]
    problems += unmade
    if problems:
        put()
        for subject, text in problems:
            put(f"{subject}: {text}", style="yellow")


def _leases(cluster: Cluster) -> list[dict[str, Any]] | None:
    """Returns the Leases of the operator's replicas. None if this user may not see them."""
    from gracepoint_cli import NotAllowed
    from gracepoint_operator.kube.objects import LEASES
    from gracepoint_operator.recording.replica_lease import LABEL

    try:
        return cluster.list(LEASES, None, labels=LABEL)
    except NotAllowed:
        return None


def _put_policies(policies: Sequence[PolicyOverview], with_namespace: bool) -> None:
    columns = ["POLICY", "MODE", "JOBS", "READY", "INJECTED", "CONNECTED", "FITSGRACE", "RECORDED"]
    types = ("Ready", "Injected", "Connected", "FitsGrace", "Recorded")
    rows = []
    for item in policies:
        row: list[object] = [item.name, item.mode or "unreadable", item.workloads]
        row += [item.conditions.get(name, "-") for name in types]
        rows.append([item.namespace, *row] if with_namespace else row)
    put_table(["NAMESPACE", *columns] if with_namespace else columns, rows)


def _put_jobs(jobs: Sequence[JobOverview], with_namespace: bool) -> None:
    columns = ["JOB", "POLICY", "MODE", "CONNECTED", "SAVE NEEDS", "GRACE", "FITS", "RESTARTS", "LAST PREEMPTION"]
    rows = []
    for job in jobs:
        connected = "-" if job.connected is None else f"{job.connected} of {job.running}"
        fits = {True: "yes", False: "no", None: "unknown"}[job.fits]
        last_preemption = "" if job.last is None else f"{job.last[0]} {job.last[1]}".strip()
        row: list[object] = [
            job.called,
            job.policy,
            job.mode or "-",
            "ended" if job.finished else connected,
            "unknown" if job.needed_s is None else f"{job.needed_s:.1f} s",
            "unknown" if job.grace_s is None else f"{job.grace_s} s",
            fits,
            "-" if job.restarts is None else job.restarts,
            last_preemption,
        ]
        rows.append([job.namespace, *row] if with_namespace else row)
    put_table(["NAMESPACE", *columns] if with_namespace else columns, rows)


def _put_snapshots(jobs: Sequence[JobOverview], with_namespace: bool, now: float) -> None:
    """Shows what is safe in the memory of nodes, if any job has snapshots there."""
    columns = ["JOB", "SAFE STEP", "COPIES", "AGE", "EVERY", "SKIPPED"]
    rows = []
    for job in jobs:
        if (snapshots := job.snapshots) is None:
            continue
        row: list[object] = [
            job.called,
            "none" if snapshots.safe_step is None else snapshots.safe_step,
            snapshots.copies,
            "-" if snapshots.passed is None else f"{max(0.0, now - snapshots.passed.timestamp()):.0f} s",
            "unknown" if snapshots.every_seconds is None else f"{snapshots.every_seconds:.0f} s",
            snapshots.skipped,
        ]
        rows.append([job.namespace, *row] if with_namespace else row)
    if rows:
        put()
        put_table(["NAMESPACE", *columns] if with_namespace else columns, rows)


Json = dict[str, Any]
_DEFAULT_GRACE_S = 30


@dataclasses.dataclass(frozen=True)
class JobOverview:
    """One workload that names a policy.

    If it cannot be read, ``problems`` says why. Its mode is then empty, and what is not known is None.

    Attributes:
        kind: Its kind in the API, for example JobSet.
        maker: The kind of the object that made it, for example TrainJob. Empty if its user created it.
        policy: Name of the policy.
        mode: Mode of the policy. Empty if there is no policy of that name, or it cannot be read.
        injected: Whether its pods were prepared when it was created. None if it cannot be read.
        running: Number of its running pods.
        connected: Number of its pods that are connected to the operator. None if no replica has reported.
        needed_s: Predicted duration of an emergency save with its margin, in seconds. None if it has reported none.
        grace_s: The shortest grace period of its pods, in seconds. None if it cannot be read.
        restarts: How often it has restarted as a whole. A Job replaces its pods one by one, so it has none. None if it
            cannot be read.
        finished: Whether it has ended. None if it cannot be read.
        last: Name and phase of its newest Preemption. None if there is none.
        waits: What it waits for before all its processes run.
        snapshots: What of it is safe in the memory of nodes. None if nothing was reported.
        problems: What is wrong, and what to do.
    """

    namespace: str
    kind: str
    name: str
    maker: str
    policy: str
    mode: str
    injected: bool | None
    running: int
    connected: int | None
    needed_s: float | None
    grace_s: int | None
    restarts: int | None
    finished: bool | None
    last: tuple[str, str] | None
    problems: tuple[str, ...]
    waits: tuple[StartWaitStatus, ...] = ()
    snapshots: WorkloadSnapshots | None = None

    @property
    def fits(self) -> bool | None:
        """Whether an emergency save fits into the grace period. None if one of the two times is not known."""
        return None if self.needed_s is None or self.grace_s is None else self.needed_s <= self.grace_s

    @property
    def called(self) -> str:
        """How a user names it on the command line."""
        return called(self.kind, self.name, self.maker)

    def to_json(self) -> Json:
        """Returns the workload as JSON with names as in Kubernetes."""
        return {
            "namespace": self.namespace,
            "kind": self.kind,
            "name": self.name,
            "madeBy": self.maker or None,
            "policy": self.policy,
            "mode": self.mode,
            "injected": self.injected,
            "running": self.running,
            "connected": self.connected,
            "neededSeconds": self.needed_s,
            "gracePeriodSeconds": self.grace_s,
            "fitsGrace": self.fits,
            "restarts": self.restarts,
            "finished": self.finished,
            "lastPreemption": None if self.last is None else {"name": self.last[0], "phase": self.last[1]},
            "waitsFor": [wait.to_json() for wait in self.waits],
            "snapshots": None if self.snapshots is None else self.snapshots.to_json(),
            "problems": list(self.problems),
        }


@dataclasses.dataclass(frozen=True)
class PolicyOverview:
    """One policy.

    Attributes:
        conditions: Status of its conditions, by type: True, False or Unknown.
        problems: Messages of the conditions that are not as they should be.
        error: Why it cannot be read. Empty if it can.
    """

    namespace: str
    name: str
    mode: str
    workloads: int
    conditions: Mapping[str, str]
    problems: tuple[str, ...]
    error: str = ""

    def to_json(self) -> Json:
        """Returns the policy as JSON with names as in Kubernetes."""
        return {
            "namespace": self.namespace,
            "name": self.name,
            "mode": self.mode,
            "workloads": self.workloads,
            "conditions": dict(self.conditions),
            "problems": list(self.problems),
            "error": self.error,
        }


def policy_rows(bodies: Iterable[Json]) -> list[PolicyOverview]:
    """Returns what is known of each policy, sorted by namespace and name."""
    return sorted((_policy(body) for body in bodies), key=lambda item: (item.namespace, item.name))


def job_rows(
    workloads: Iterable[Json],
    policy_bodies: Iterable[Json],
    pods: Iterable[Json],
    preemptions: Iterable[Json],
    *,
    now: datetime.datetime,
    leases: Sequence[Json] | None = None,
) -> list[JobOverview]:
    """Returns what is known of each workload that names a policy, sorted by namespace and name.

    Args:
        workloads: The workloads, each with its kind.
        policy_bodies: The policies.
        pods: The pods of the workloads.
        preemptions: The Preemptions.
        now: The time.
        leases: The Leases of the operator's replicas, which say whose numbers count. None: this user may not see them,
            and those of all count.
    """
    living = None if leases is None else _living(leases, now)
    policies = {(body["metadata"]["namespace"], body["metadata"]["name"]): body for body in policy_bodies}
    running: dict[str, int] = {}
    for pod in pods:
        labels = read_labels(pod["metadata"])
        if (pod.get("status") or {}).get("phase") == "Running" and labels.get(LABEL_ROLE) != ROLE_HELPER:
            uid = membership_of(labels).workload_uid
            running[uid] = running.get(uid, 0) + 1
    newest: dict[str, Json] = {}
    for body in preemptions:
        if "epoch" in body["spec"]:
            uid = body["spec"]["jobSet"]["uid"]
            if uid not in newest or body["spec"]["epoch"] > newest[uid]["spec"]["epoch"]:
                newest[uid] = body
    rows = []
    for body in workloads:
        if LABEL_POLICY in (body["metadata"].get("labels") or {}):
            pods_running, record = running.get(body["metadata"]["uid"], 0), newest.get(body["metadata"]["uid"])
            try:
                rows.append(_job(body, policies, pods_running, record, living))
            except Unreadable as error:
                rows.append(_unreadable_job(body, pods_running, record, error))
    return sorted(rows, key=lambda item: (item.namespace, item.name, item.kind))


def _grace_s(body: Json, training: Training) -> int:
    """Returns the shortest grace period of the gang's pods, in seconds.

    Raises:
        Unreadable: The pod templates are not of the schema.
    """
    with reading("its pod templates"):
        pods = [member.template["spec"] for member in gang(copy.deepcopy(body), training, Problems())]
        periods = [pod.get("terminationGracePeriodSeconds") for pod in pods]
        return min((_DEFAULT_GRACE_S if value is None else int(value) for value in periods), default=_DEFAULT_GRACE_S)


def _policy(body: Json) -> PolicyOverview:
    meta = body["metadata"]
    try:
        policy = CheckpointPolicy.of(body)
    except Unreadable as error:
        return PolicyOverview(meta["namespace"], meta["name"], "", 0, {}, (), str(error))
    conditions = {item.type: item for item in policy.status.conditions or ()}
    bad = [
        f"{item.type}: {item.message}"
        for item in conditions.values()
        if str(item.status) == ("True" if item.type == "Stalled" else "False")
        and item.type != CONDITION_STARTED  # each workload says for itself what it waits for
    ]
    ready = conditions.get("Ready")
    if ready is not None and str(ready.status) == "True" and ready.reason != "Watching":
        bad.append(f"Ready: {ready.message}")  # it works, but not as the policy says
    if policy.status.observed_generation is None:
        bad.append("the operator has not seen this policy. Is it installed and running? Run: kubectl gracepoint doctor")
    return PolicyOverview(
        policy.namespace,
        policy.name,
        str(policy.spec.mode),
        policy.status.workloads.count if policy.status.workloads else 0,
        {name: str(item.status) for name, item in conditions.items()},
        tuple(bad),
    )


def _job(
    body: Json, policies: Mapping[tuple[str, str], Json], running: int, newest: Json | None, living: set[str] | None
) -> JobOverview:
    """Returns what is known of one workload.

    Raises:
        Unreadable: A part of it other than its pod templates is not of the schema.
    """
    workload = BY_NAME[body["kind"]].read(body)
    problems = []
    policy: CheckpointPolicy | None = None
    if (named := policies.get((workload.namespace, workload.policy))) is None:
        policy = kept_policy(workload, _read_records(newest))
        kept = "it keeps the settings that it was created with" if policy else "no disruption is announced to it"
        where = f"there is no CheckpointPolicy {workload.policy!r} in the namespace {workload.namespace!r}"
        problems.append(f"{where}: {kept}. Create the policy again, or correct the label")
    else:
        try:
            policy = CheckpointPolicy.of(named)
        except Unreadable as error:
            problems.append(f"the CheckpointPolicy {workload.policy!r} cannot be used: {error}")
    connected, needed_s = (None, None) if policy is None else _reported(policy, workload.uid, living)
    grace: int | None = None
    try:
        grace = _grace_s(body, Training() if policy is None else policy.spec.training)
    except Unreadable as error:
        problems.append(_cannot_be_read(error))
    if not workload.injected:
        problems.append("created before its policy or label, so its pods get no notices: delete it and create it again")
    if not workload.finished and connected is not None and connected < running:
        problems.append(f"{running - connected} of {running} running pods are not connected to the operator")
    if needed_s is not None and grace is not None and needed_s > grace:
        problems.append(f"a save needs {needed_s:.1f} s, and the pods have {grace} s: raise the grace period")
    return JobOverview(
        namespace=workload.namespace,
        kind=workload.kind,
        name=workload.name,
        maker=made_by(body),
        policy=workload.policy,
        mode="" if policy is None else str(policy.spec.mode),
        injected=workload.injected,
        running=running,
        connected=connected,
        needed_s=needed_s,
        grace_s=grace,
        restarts=workload.restarts,
        finished=workload.finished,
        last=_last(newest),
        problems=tuple(problems),
        waits=() if policy is None or workload.finished else _waits(policy, workload.uid),
        snapshots=None if policy is None or workload.finished else _snapshots(policy, workload.uid),
    )


def _waits(policy: CheckpointPolicy, uid: str) -> tuple[StartWaitStatus, ...]:
    return tuple(wait for entry in policy.status.waits or () if entry.uid == uid for wait in entry.waits)


def _snapshots(policy: CheckpointPolicy, uid: str) -> WorkloadSnapshots | None:
    return next((entry for entry in policy.status.snapshots or () if entry.uid == uid), None)


def _read_records(newest: Json | None) -> list[PreemptionRecord]:
    """Returns the newest Preemption, from which the operator takes the policy of what an older version prepared."""
    try:
        return [] if newest is None else [PreemptionRecord.of(newest)]
    except Unreadable:
        return []


def _unreadable_job(body: Json, running: int, newest: Json | None, error: Unreadable) -> JobOverview:
    meta = body["metadata"]
    return JobOverview(
        namespace=meta["namespace"],
        kind=body["kind"],
        name=meta["name"],
        maker=made_by(body),
        policy=meta["labels"][LABEL_POLICY],
        mode="",
        injected=None,
        running=running,
        connected=None,
        needed_s=None,
        grace_s=None,
        restarts=None,
        finished=None,
        last=_last(newest),
        problems=(_cannot_be_read(error),),
    )


def _cannot_be_read(error: Unreadable) -> str:
    return f"cannot be read: {error}"


def _last(newest: Json | None) -> tuple[str, str] | None:
    """Returns name and phase of a Preemption."""
    return None if newest is None else (newest["metadata"]["name"], (newest.get("status") or {}).get("phase") or "")


def _living(leases: Sequence[Json], now: datetime.datetime) -> set[str]:
    """Returns the names of the replicas that renew their Leases."""
    renewed = {item["spec"]["holderIdentity"]: parse_time(item["spec"].get("renewTime")) for item in leases}
    return {name for name, at in renewed.items() if at is not None and now.timestamp() - at < STALE_S}


def _reported(policy: CheckpointPolicy, uid: str, living: set[str] | None) -> tuple[int | None, float | None]:
    """Returns how many pods are connected, and how long a save takes."""
    replicas = [item for item in policy.status.replicas or () if living is None or item.name in living]
    counts = [item.connected for replica in replicas for item in replica.workloads if item.uid == uid]
    needs = [item.needed_s for item in policy.status.forecasts or () if item.uid == uid]
    return (sum(counts) if replicas else None), (needs[0] if needs else None)
