"""Evictions of Kubernetes' API for them (KEP-4563, lifecycle.k8s.io/v1alpha1), in which this operator takes part. Pure.

Whoever wants a pod to go creates an EvictionRequest. Kubernetes makes one Eviction for each pod of it, and asks the
responders of the pod (``spec.evictionResponders``) one after the other: the one whose state is Active has its turn
until it writes a completion time. The last responder, which Kubernetes adds, evicts the pod. If all requests are
withdrawn, the state becomes Canceled, and the pod stays.

The operator is a responder of each pod of a gang. Its turn is a signal, and ends with the save. The operator's answer
does not end the signal: Kubernetes evicts the pod after it. Only who asked may take it back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from gracepoint.wire.messages import one_line
from gracepoint_operator.kube.objects import Pod, parse_time, text
from gracepoint_operator.model import evictions
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.read_errors import reading
from gracepoint_operator.resources import PolicyInForce
from gracepoint_operator.signals import Signal

#: The operator's name among the responders of a pod.
RESPONDER = "gracepoint.dev/save"
#: Higher priorities have their turn first. The controller of the pod is told to take 10000.
PRIORITY = 20_000

_ACTIVE, _CANCELED = "Active", "Canceled"
_WANTS = "Eviction"


@dataclasses.dataclass(frozen=True, slots=True)
class EvictionAsked:
    """An Eviction of one pod.

    Attributes:
        pod_uid: UID of the pod. Empty if it is about something else.
        active: Whether it is the operator's turn, and it has not answered yet.
        answered: Whether the operator's turn is over, and the pod is about to be evicted. False if it was withdrawn.
        requesters: Who wants the pod to go.
        started_at: When the operator's turn began, in seconds since the epoch. None if it has not.
        heartbeat_at: When the operator last wrote that it is at work. None if it has not.
    """

    namespace: str
    name: str
    uid: str
    pod_uid: str
    active: bool
    answered: bool = False
    requesters: tuple[str, ...] = ()
    started_at: float | None = None
    heartbeat_at: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)

    @property
    def lasts(self) -> bool:
        """Whether the Eviction is a signal: somebody still wants the pod to go, and the operator's turn has begun."""
        return self.active or self.answered

    @property
    def mark(self) -> str:
        """The key under which ``cache.indexes`` remembers when the operator's turn began."""
        return f"{self.uid}/eviction-request"


def read_eviction(body: Mapping[str, Any]) -> EvictionAsked:
    """Reads an Eviction of lifecycle.k8s.io.

    Raises:
        Unreadable: It is not one.
    """
    with reading("an Eviction"):
        meta, status = body["metadata"], body.get("status") or {}
        target = body["spec"]["target"].get("pod") or {}
        ours: Mapping[str, Any] = next((item for item in _of(status, "responders") if item["name"] == RESPONDER), {})
        state = next((item["state"] for item in _of(status, "targetResponders") if item["name"] == RESPONDER), "")
        intents = [item["intent"] for item in _of(status, "requesters")]
        withdrawn = state == _CANCELED or bool(intents and _WANTS not in intents) or "deletionTimestamp" in meta
        done = bool(ours.get("completionTime"))
        return EvictionAsked(
            namespace=text(meta["namespace"]),
            name=text(meta["name"]),
            uid=text(meta["uid"]),
            pod_uid=text(target.get("uid") or ""),
            active=state == _ACTIVE and not done and "deletionTimestamp" not in meta,
            answered=done and not withdrawn,
            requesters=tuple(text(item["name"]) for item in _of(status, "requesters") if item["intent"] == _WANTS),
            started_at=parse_time(ours.get("startTime")),
            heartbeat_at=parse_time(ours.get("heartbeatTime")),
        )


def signal(
    pod: Pod, policy: PolicyInForce, asked: EvictionAsked, epochs: Iterable[PreemptionRecord], since_at: float
) -> Signal:
    """Returns the signal of an Eviction that lasts. It goes away if the request is withdrawn."""
    by = f" by {', '.join(asked.requesters)}" if asked.requesters else ""
    attempt = evictions.signal(pod, policy, epochs, since_at)
    return dataclasses.replace(
        attempt, mark=asked.mark, text=one_line(f"eviction requested{by}")[:512], cancelable=True
    )


def _of(status: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    return list(status.get(name) or ())
