"""The operator's Prometheus metrics. The client library is thread-safe; every thread may count."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator

import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily

_LONG_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 86400.0)
_SPARE_S = (-60.0, -10.0, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 600.0)
_LAG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_FAST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)


#: Namespace, workload, category, seconds.
AccountRow = tuple[str, str, str, float]


_ACCOUNTS = "gracepoint_goodput_seconds"
_ACCOUNTS_HELP = "Where the time of a workload went since its account began. Each replica shows all workloads."
_ACCOUNTS_LABELS = ("namespace", "workload", "category")


async def _no_accounts() -> Callable[[], Iterable[AccountRow]]:
    return tuple


class Metrics:
    """All metrics of one operator process, in a new registry.

    Args:
        accounts: Whether there is a series for each category of each workload's account, and for its snapshots.

    Attributes:
        copy_accounts: Copies the accounts of workloads on the controller's loop. What it returns computes their figures
            in whichever thread calls it.
    """

    def __init__(self, *, accounts: bool = True) -> None:
        self.registry = prometheus.CollectorRegistry()
        self.copy_accounts: Callable[[], Awaitable[Callable[[], Iterable[AccountRow]]]] = _no_accounts
        self._accounts: Callable[[], Iterable[AccountRow]] = tuple
        self._shows_accounts = accounts
        self.signal_to_notice_s = prometheus.Histogram(
            "gracepoint_signal_to_notice_seconds",
            "From first observing a signal to having written a notice to a subscriber's stream.",
            registry=self.registry,
            buckets=_FAST_S,
        )
        self.notice_to_ack_s = prometheus.Histogram(
            "gracepoint_notice_to_acknowledgement_seconds",
            "From having written a notice to its acknowledgement.",
            registry=self.registry,
            buckets=_FAST_S,
        )
        self.refused = prometheus.Counter(
            "gracepoint_channel_requests_refused",
            "Requests on the channel that were refused.",
            ["reason"],
            registry=self.registry,
        )
        self.connections_closed = prometheus.Counter(
            "gracepoint_channel_connections_closed",
            "Connections to the channel that the operator closed before their callers had shown who they are.",
            ["reason"],
            registry=self.registry,
        )
        self.port_connections_closed = prometheus.Counter(
            "gracepoint_port_connections_closed",
            "Connections to the ports of webhooks and of health that were closed before their callers were known.",
            ["port", "reason"],
            registry=self.registry,
        )
        self.webhooks_refused = prometheus.Counter(
            "gracepoint_webhook_requests_refused",
            "Requests on the webhooks' port that were refused without looking at them.",
            ["reason"],
            registry=self.registry,
        )
        self.subscriptions = prometheus.Gauge(
            "gracepoint_subscriptions_open",
            "Pods that are connected to this replica.",
            registry=self.registry,
        )
        self.stalls = prometheus.Counter(
            "gracepoint_stalls",
            "Stalls that gangs reported to this replica: their processes made no progress for the policy's time.",
            registry=self.registry,
        )
        self.stalled = prometheus.Gauge(
            "gracepoint_stalled_workloads",
            "Gangs that make no progress, as they reported to this replica.",
            registry=self.registry,
        )
        self.stalled_pods = prometheus.Gauge(
            "gracepoint_stalled_pods",
            "1 for each pod that holds up its gang, as reported to this replica, at most 10 of a gang.",
            ["namespace", "workload", "trainer", "stage"],  # not "pod": that is the replica, which a scrape adds
            registry=self.registry,
        )
        self.troubles = prometheus.Counter(
            "gracepoint_troubles",
            "Failures that gangs reported to this replica while they train: Saves or Deletions that fail.",
            ["kind"],
            registry=self.registry,
        )
        self.troubled = prometheus.Gauge(
            "gracepoint_troubled_workloads",
            "Gangs that train while their periodic saves (Saves) or deletions of old checkpoints (Deletions) fail.",
            ["kind"],
            registry=self.registry,
        )
        self.waiting = prometheus.Gauge(
            "gracepoint_waiting_workloads",
            "Gangs that wait before all their processes run, by what for. Each replica shows all of them.",
            ["kind"],
            registry=self.registry,
        )
        self.waiting_s = prometheus.Gauge(
            "gracepoint_waiting_seconds",
            "For how long the gang has waited that waits longest for this kind. 0: none does.",
            ["kind"],
            registry=self.registry,
        )
        self.lost_pods_deleted = prometheus.Counter(
            "gracepoint_lost_pods_deleted",
            "Pods that this replica deleted by force, as their node was lost.",
            registry=self.registry,
        )
        self.evictions = prometheus.Counter(
            "gracepoint_evictions_answered",
            "Attempts to evict a pod of a gang, by what this replica answered: wait (429) or go.",
            ["answer"],
            registry=self.registry,
        )
        self.phases = prometheus.Counter(
            "gracepoint_preemption_phases",
            "Preemptions that this replica recorded in a phase. Each phase of each is counted by one replica.",
            ["phase", "cause", "mode"],
            registry=self.registry,
        )
        self.preemptions_deleted = prometheus.Counter(
            "gracepoint_preemptions_deleted",
            "Preemptions that this replica deleted, as they ended long ago (age), or newer ones are enough (count).",
            ["reason"],
            registry=self.registry,
        )
        self.preemptions_not_deleted = prometheus.Counter(
            "gracepoint_preemptions_not_deleted",
            "Preemptions that were due to be deleted and that the API server did not delete, by the kind of the error.",
            ["outcome"],
            registry=self.registry,
        )
        self.lead_s = prometheus.Histogram(
            "gracepoint_signal_lead_seconds",
            "From first observing a signal to the deadline that it set.",
            ["cause"],
            registry=self.registry,
            buckets=_LONG_S,
        )
        self.emergency_s = prometheus.Histogram(
            "gracepoint_emergency_seconds",
            "Parts of an emergency save, the slowest process's: agreement, drain, save (until durable), commit.",
            ["part"],
            registry=self.registry,
            buckets=(*_FAST_S, 120.0, 300.0, 900.0),
        )
        self.spare_s = prometheus.Histogram(
            "gracepoint_spare_seconds",
            "From the commit to the deadline; negative where it was late. Without drills.",
            registry=self.registry,
            buckets=_SPARE_S,
        )
        self.steps_lost = prometheus.Counter(
            "gracepoint_steps_lost",
            "Completed training steps that the committed checkpoints lack.",
            registry=self.registry,
        )
        self.false_alarms = prometheus.Counter(
            "gracepoint_false_alarms",
            "Preemptions whose signal went away, or that expired while a pod that they were about lives on.",
            ["cause", "phase"],
            registry=self.registry,
        )
        self.undelivered = prometheus.Counter(
            "gracepoint_notices_undelivered",
            "Pods that had not acknowledged the notice when it was over and, where the gang leaves, they were gone.",
            registry=self.registry,
        )
        self.api_requests = prometheus.Counter(
            "gracepoint_api_requests",
            "Requests to the API server but for watches, by outcome: ok, or the kind of the error.",
            ["method", "outcome"],
            registry=self.registry,
        )
        self.longest_hold_s = prometheus.Gauge(
            "gracepoint_longest_hold_seconds",
            "For how long evictions are held at most: by the chart, and by each ClusterCheckpointPolicy, for the "
            "namespaces that it selects. 0: they are not held there.",
            ["set_by"],
            registry=self.registry,
        )
        self.unrecorded = prometheus.Gauge(
            "gracepoint_preemptions_unrecorded",
            "Preemptions whose records lack what this replica knows, because the API server refuses the writes.",
            registry=self.registry,
        )
        self.left_out = prometheus.Gauge(
            "gracepoint_objects_left_out",
            "Objects that this replica cannot read as they are now: all of it (extent object) or a part (extent part).",
            ["kind", "extent"],
            registry=self.registry,
        )
        self.write_failures = prometheus.Counter(
            "gracepoint_status_write_failures",
            "Attempts to write an object to the API that were refused, or failed for two minutes. All are tried again.",
            registry=self.registry,
        )

        self.snapshot_servers = prometheus.Gauge(
            "gracepoint_snapshot_servers",
            "Snapshot servers, by state: ready, ending or not_ready. Each replica shows all of them.",
            ["state"],
            registry=self.registry,
        )
        self.snapshot_bytes = prometheus.Gauge(
            "gracepoint_snapshot_server_bytes",
            "Memory of the snapshot servers that have answered this replica: capacity, and what of it is used.",
            ["kind"],
            registry=self.registry,
        )
        self.snapshot_placements = prometheus.Counter(
            "gracepoint_snapshot_placements",
            "How often this replica told a process which snapshot servers hold its part.",
            registry=self.registry,
        )
        self.snapshots_skipped = prometheus.Counter(
            "gracepoint_snapshots_skipped",
            "Snapshots that were due and not begun, as process 0 of each gang reported to this replica.",
            registry=self.registry,
        )
        self.snapshots_unsafe = prometheus.Gauge(
            "gracepoint_snapshots_unsafe_workloads",
            "Gangs whose snapshots are not safe, by why, as reported to this replica.",
            ["reason"],
            registry=self.registry,
        )
        self._snapshot_age_s = prometheus.Gauge(
            "gracepoint_snapshot_age_seconds",
            "Since the training had passed the newest step of a gang that is safe in snapshot servers.",
            ["namespace", "workload"],
            registry=self.registry,
        )

        self.watch_age_s = prometheus.Gauge(
            "gracepoint_watch_age_seconds",
            "Since the API server last answered a request to list or watch the kind, or sent an event of it.",
            ["kind"],
            registry=self.registry,
        )
        self.watch_failures = prometheus.Counter(
            "gracepoint_watch_failures",
            "Requests to list or watch a kind that failed; all are made again.",
            ["kind"],
            registry=self.registry,
        )
        self.watch_restarts = prometheus.Counter(
            "gracepoint_watch_restarts",
            "How often a thread that watches had to start again, by what it watches.",
            ["thread"],
            registry=self.registry,
        )
        self.loop_lag_s = prometheus.Histogram(
            "gracepoint_loop_lag_seconds",
            "How late an event loop came to what was due, of the controller or of the channel.",
            ["loop"],
            registry=self.registry,
            buckets=_LAG_S,
        )

        self.pods_not_connected = prometheus.Gauge(
            "gracepoint_pods_not_connected",
            "Running pods of gangs that are connected to no replica for three minutes. Each replica shows all of them.",
            registry=self.registry,
        )
        self.workloads_without_policy = prometheus.Gauge(
            "gracepoint_workloads_without_policy",
            "Unfinished workloads that name a CheckpointPolicy that does not exist. Each replica shows all of them.",
            registry=self.registry,
        )
        self.sweep_s = prometheus.Histogram(
            "gracepoint_sweep_seconds",
            "How long it took to list the cluster: all kinds (extent all), or those that may have changed (some).",
            ["extent"],
            registry=self.registry,
            buckets=_FAST_S,
        )
        self.canary_s = prometheus.Histogram(
            "gracepoint_canary_seconds",
            "From putting a notice into the queue of the replica's own subscriber until it had read it.",
            registry=self.registry,
            buckets=_FAST_S,
        )
        self.canary_failures = prometheus.Counter(
            "gracepoint_canary_failures",
            "Attempts to notify the replica's own subscriber that failed.",
            registry=self.registry,
        )
        self.canary_age_s = prometheus.Gauge(
            "gracepoint_canary_age_seconds",
            "Since the replica's own subscriber last got a notice.",
            registry=self.registry,
        )
        self.certificate_expiry = prometheus.Gauge(
            "gracepoint_certificate_expiry_timestamp_seconds",
            "When the certificate of this replica (server) and its authority expire, in seconds since 1970.",
            ["certificate"],
            registry=self.registry,
        )
        self.trust_failures = prometheus.Counter(
            "gracepoint_trust_failures",
            "Attempts to keep the certificate or the trusted authorities in the API that failed. All are tried again.",
            ["what"],
            registry=self.registry,
        )

    def count_api_request(self, method: str, outcome: str) -> None:
        self.api_requests.labels(method=method, outcome=outcome).inc()

    def count_left_out(self, kind: str, extent: str, number: int) -> None:
        self.left_out.labels(kind=kind, extent=extent).set(number)

    def show_snapshot_age(self, namespace: str, workload: str, age_s: Callable[[], float] | None) -> None:
        """Shows the age of a gang's newest safe snapshot, if there are series for each workload. None: no more."""
        if age_s is None:
            with contextlib.suppress(KeyError):  # it was not shown
                self._snapshot_age_s.remove(namespace, workload)
        elif self._shows_accounts:
            self._snapshot_age_s.labels(namespace, workload).set_function(age_s)

    def count_webhook_refused(self, reason: str) -> None:
        self.webhooks_refused.labels(reason=reason).inc()

    def count_connection_closed(self, reason: str) -> None:
        self.connections_closed.labels(reason=reason).inc()

    async def update_accounts(self) -> None:
        """Takes the accounts over as they are now. Call it on the controller's loop."""
        if self._shows_accounts:
            self.show_accounts(await self.copy_accounts())

    def show_accounts(self, rows: Callable[[], Iterable[AccountRow]]) -> None:
        """Shows these accounts from now on."""
        self._accounts = rows

    def text(self) -> bytes:
        """The exposition format. For thousands of workloads this takes some time; any thread may call it."""
        return prometheus.generate_latest(self.registry) + self._accounts_text()

    def families(self) -> Iterator[prometheus.Metric]:
        """What ``text`` shows, as objects of the client library: for pages and tests, not for many workloads."""
        yield from self.registry.collect()
        if self._shows_accounts:
            accounts = GaugeMetricFamily(_ACCOUNTS, _ACCOUNTS_HELP, labels=_ACCOUNTS_LABELS)
            for *labels, seconds in self._accounts():
                accounts.add_metric(labels, seconds)
            yield accounts

    def _accounts_text(self) -> bytes:
        """The figures grow with the time, so they are computed when they are read.

        For 55,000 series, the client library takes 0.6 s of this thread and as many objects; this takes 0.03 s.
        """
        if not self._shows_accounts:
            return b""
        lines = [
            f'{_ACCOUNTS}{{category="{category}",namespace="{namespace}",workload="{workload}"}} {seconds}\n'
            for namespace, workload, category, seconds in self._accounts()
        ]
        return "".join([f"# HELP {_ACCOUNTS} {_ACCOUNTS_HELP}\n# TYPE {_ACCOUNTS} gauge\n", *lines]).encode()
