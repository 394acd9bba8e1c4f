"""The operator's Prometheus metrics. The client library is thread-safe; every thread may count."""

from __future__ import annotations

import prometheus_client as prometheus

_FAST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)


class Metrics:
    """All metrics of one operator process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
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
        self.subscriptions = prometheus.Gauge(
            "gracepoint_subscriptions_open",
            "Pods that are connected to this replica.",
            registry=self.registry,
        )
        self.phases = prometheus.Counter(
            "gracepoint_preemption_phases",
            "Preemptions that this replica recorded in a phase.",
            ["phase", "cause"],
            registry=self.registry,
        )
        self.write_failures = prometheus.Counter(
            "gracepoint_status_write_failures",
            "Objects that could not be written to the API for all trying.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """The exposition format."""
        return prometheus.generate_latest(self.registry)
