"""A request for a preemption, which a user or another controller created. Pure.

A request is a signal. Like every other signal it starts an epoch of its own or joins the one under way. The record of
that epoch has its usual deterministic name, so that two replicas which see a request and a taint in different order
still create one object. The outcome of a request is written to its own status (``decisions.request_answers``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gracepoint.wire import names
from gracepoint.wire.messages import Confidence, Mode
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.fields import parse_time
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.preemption import PreemptionRecord
from gracepoint_operator.read_errors import reading
from gracepoint_operator.resources import (
    PreemptionRequest,
    RequestPhase,
    RequestReference,
    RequestSpec,
    RequestStatus,
    SignalKind,
)
from gracepoint_operator.signals import Signal

#: The label of a request that is over for good: since when, in seconds since the epoch. Requests with it are not
#: watched, so that the memory for requests does not grow with their number. A request that is restored from a backup
#: still has the label, though not its status, and is not carried out again.
LABEL_ENDED_AT = f"{names.GROUP}/ended-at"


@dataclasses.dataclass(frozen=True)
class RequestRecord:
    """A request as this replica knows it.

    Attributes:
        kind: PreemptionRequests. Preemptions for a request that was made under version 0.2.
        created_at: ``creationTimestamp``, by the clock of the API server.
        generation: Counts the changes of its spec. 0 if the object does not say.
    """

    namespace: str
    name: str
    uid: str
    created_at: float
    spec: RequestSpec
    status: RequestStatus
    generation: int = 0
    kind: kinds.Kind = kinds.REQUESTS

    @staticmethod
    def of(body: Mapping[str, Any]) -> RequestRecord:
        """Reads the object of the API server.

        Raises:
            Unreadable: It is not of this version's schema.
        """
        read = PreemptionRequest.of(body)
        with reading(f"{read.kind} {read.namespace}/{read.name}: metadata.creationTimestamp"):
            created_at = parse_time(read.metadata.get("creationTimestamp")) or 0.0
        kind = kinds.REQUESTS if read.kind == PreemptionRequest.kind_name else kinds.PREEMPTIONS
        return RequestRecord(
            *(read.namespace, read.name, read.uid, created_at, read.spec, read.status, read.generation, kind)
        )

    @property
    def reference(self) -> RequestReference:
        return RequestReference(name=self.name, uid=self.uid)

    @property
    def mark(self) -> str:
        """The key under which ``cache.indexes.first_seen`` remembers when it was first seen."""
        return f"{self.uid}/request"

    @property
    def deadline_at(self) -> float:
        if self.spec.deadline is not None:
            return self.spec.deadline.timestamp()
        return self.created_at + (self.spec.deadline_seconds or 0.0)

    @property
    def is_open(self) -> bool:
        """False if it was withdrawn, or its status has a final phase."""
        return not (self.spec.retracted or self.has_ended)

    @property
    def has_ended(self) -> bool:
        """True if its status has a final phase."""
        return self.status.phase is not None and self.status.phase.ended

    def is_signal(self, epochs: Sequence[PreemptionRecord]) -> bool:
        """True if it counts as a signal: it is open, or a replica with an older view superseded it after it was told.

        Args:
            epochs: The epochs of the workload, oldest first.
        """
        if self.status.phase is not RequestPhase.SUPERSEDED or self.spec.retracted:
            return self.is_open
        epoch = self.adopted_by(epochs)
        return epoch is not None and not epoch.phase.ended

    def adopted_by(self, epochs: Sequence[PreemptionRecord]) -> PreemptionRecord | None:
        """Returns the newest of the epochs, oldest first, that names it. None: none does."""
        return next((epoch for epoch in reversed(epochs) if self.reference in epoch.spec.requests), None)

    def is_for(self, workload_uid: str) -> bool:
        """True if it is for this workload, and not for another one that had the same name."""
        return self.spec.workload.uid in (None, workload_uid)

    def is_drill(self, policy_mode: Mode) -> bool:
        """True if it asks for a drill under a policy whose mode is not Drill."""
        return self.spec.mode is Mode.DRILL and policy_mode is not Mode.DRILL

    def signal(self, pod: Pod) -> Signal:
        """Returns the signal for a pod of the gang."""
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
