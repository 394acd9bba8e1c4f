"""What only this replica knows of its notices: when it notified each pod, and which pods acknowledged to it.

It is kept in the form in which it is written, because a gang of thousands of pods has an event for each of them. The
controller's event loop owns it; there are no locks. ``channel`` fills it, and the preemption writer reads it.
"""

from __future__ import annotations

import dataclasses
import datetime

from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.pod_places import Places, place_of
from gracepoint_operator.resources import Replica

ReceiptKey = tuple[str, str]


@dataclasses.dataclass
class _PodTimes:
    """Which pods something has happened to.

    Attributes:
        at: When it happened first, by UID of the pod, in seconds since the epoch.
        first_at: When it happened to the first pod. None if it has not happened.
        last_at: The same for the last pod.
        places: The places of these pods.
    """

    at: dict[str, float] = dataclasses.field(default_factory=dict)
    first_at: float | None = None
    last_at: float | None = None
    places: Places = dataclasses.field(default_factory=Places)

    def add(self, pod: Pod, at: float) -> bool:
        """True if it is the first time for the pod."""
        if pod.uid in self.at:
            return False
        self.at[pod.uid] = at
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)
        self.places.add(place_of(pod))
        return True


@dataclasses.dataclass
class _Receipts:
    """What is known of one preemption."""

    notified: _PodTimes = dataclasses.field(default_factory=_PodTimes)
    acknowledged: _PodTimes = dataclasses.field(default_factory=_PodTimes)


class AcknowledgementLog:
    """By preemption (namespace, name) and UID of the pod. The first notice and the first acknowledgement count."""

    def __init__(self) -> None:
        self._receipts: dict[ReceiptKey, _Receipts] = {}

    def notified(self, key: ReceiptKey, pod: Pod, at: float) -> bool:
        """True if the pod is notified for the first time."""
        return self._of(key).notified.add(pod, at)

    def acknowledged(self, key: ReceiptKey, pod: Pod, at: float) -> bool:
        """True if the pod acknowledges for the first time."""
        return self._of(key).acknowledged.add(pod, at)

    def notified_at(self, key: ReceiptKey, pod_uid: str) -> float | None:
        """When the pod was notified first, in seconds since the epoch. None if this replica has not notified it."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.notified.at.get(pod_uid)

    def replica(self, key: ReceiptKey, name: str) -> Replica:
        """This replica's entry in the Preemption's status."""
        receipts = self._receipts.get(key, _Receipts())
        notified, acknowledged = receipts.notified, receipts.acknowledged
        return Replica(
            name=name,
            told=len(notified.at),
            acknowledged=len(acknowledged.at),
            told_at=_time(notified.last_at),
            acknowledged_at=_time(acknowledged.last_at),
            told_pods=notified.places.lines(),
            acknowledged_pods=acknowledged.places.lines(),
        )

    def first_acknowledged_at(self, key: ReceiptKey) -> float | None:
        """When the first pod acknowledged, in seconds since the epoch. None if none has."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.acknowledged.first_at

    def forget(self, key: ReceiptKey) -> None:
        self._receipts.pop(key, None)

    def _of(self, key: ReceiptKey) -> _Receipts:
        return self._receipts.setdefault(key, _Receipts())


def _time(at: float | None) -> datetime.datetime | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC)
