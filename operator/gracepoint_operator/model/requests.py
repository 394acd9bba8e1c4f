"""What a person or another controller asks for: a Preemption that is no record but a request. Pure.

A request is a signal that somebody wrote. It starts an epoch of its own or joins the one under way, like every other
signal, and the record of that keeps its deterministic name: so two replicas that see a request and a taint in
different order still make one object. What became of a request stands in its own status (``answers``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gracepoint.wire.messages import Confidence, Mode
from gracepoint_operator.kube.fields import parse_time
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.resources import PreemptionRequest, RequestReference, RequestSpec, RequestStatus, SignalKind
from gracepoint_operator.signals import Signal
from gracepoint_operator.unreadable import reading


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """A request as this replica knows it. ``created_at`` is by the API server's clock."""

    namespace: str
    name: str
    uid: str
    created_at: float
    spec: RequestSpec
    status: RequestStatus

    @staticmethod
    def of(body: Mapping[str, Any]) -> RequestRecord:
        """Reads the object of the API server.

        Raises:
            Unreadable: It is not of this version's schema.
        """
        read = PreemptionRequest.of(body)
        with reading(f"Preemption {read.namespace}/{read.name}: metadata.creationTimestamp"):
            created_at = parse_time(read.metadata.get("creationTimestamp")) or 0.0
        return RequestRecord(read.namespace, read.name, read.uid, created_at, read.spec, read.status)

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)

    @property
    def reference(self) -> RequestReference:
        return RequestReference(name=self.name, uid=self.uid)

    @property
    def mark(self) -> str:
        """Under which it is remembered since when it was seen; see ``sightings``."""
        return f"{self.uid}/request"

    @property
    def deadline_at(self) -> float:
        if self.spec.deadline is not None:
            return self.spec.deadline.timestamp()
        return self.created_at + (self.spec.deadline_seconds or 0.0)

    @property
    def is_open(self) -> bool:
        """False once it was taken back, or it is written how it ended."""
        return not (self.spec.retracted or self.has_ended)

    @property
    def has_ended(self) -> bool:
        """True once it is written how it ended."""
        return self.status.phase is not None and self.status.phase.ended

    def is_for(self, workload_uid: str) -> bool:
        """True if it is for this workload, of those that may have had the name."""
        return self.spec.workload.uid in (None, workload_uid)

    def is_drill(self, policy_mode: Mode) -> bool:
        """True if it asks for a drill where disruptions are none."""
        return self.spec.mode is Mode.DRILL and policy_mode is not Mode.DRILL

    def signal(self, pod: Pod) -> Signal:
        """What it means for a pod of the gang."""
        return Signal(
            kind=SignalKind.REQUEST,
            mark=self.mark,
            cause=self.spec.cause,
            text=f"request {self.name}",
            node="",
            pod=pod,
            confidence=Confidence.SURE,
            cancelable=True,
            lead_s=0.0,
            until_at=self.deadline_at,
            lasting=True,
        )
