"""What only this replica knows of its notices: when it told each pod, and which pods acknowledged to it.

It is kept in the form in which it is written, because a gang of thousands of pods has an event for each of them. The
controller's event loop owns it; there are no locks.
"""

from __future__ import annotations

import dataclasses
import datetime

from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.missing_acks import Places, place_of
from gracepoint_operator.resources import Replica

Key = tuple[str, str]


@dataclasses.dataclass
class _Heard:
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

    told: _Heard = dataclasses.field(default_factory=_Heard)
    acknowledged: _Heard = dataclasses.field(default_factory=_Heard)


class AcknowledgementLog:
    """By preemption (namespace, name) and pod UID. The first notice and the first acknowledgement count."""

    def __init__(self) -> None:
        self._receipts: dict[Key, _Receipts] = {}

    def told(self, key: Key, pod: Pod, at: float) -> bool:
        """True if the pod is told for the first time."""
        return self._of(key).told.add(pod, at)

    def acknowledged(self, key: Key, pod: Pod, at: float) -> bool:
        """True if the pod acknowledges for the first time."""
        return self._of(key).acknowledged.add(pod, at)

    def told_at(self, key: Key, pod_uid: str) -> float | None:
        """When the pod was told first, in seconds since the epoch. None if this replica has not told it."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.told.at.get(pod_uid)

    def replica(self, key: Key, name: str) -> Replica:
        """This replica's entry in the Preemption's status."""
        receipts = self._receipts.get(key, _Receipts())
        told, acknowledged = receipts.told, receipts.acknowledged
        return Replica(
            name=name,
            told=len(told.at),
            acknowledged=len(acknowledged.at),
            told_at=_time(told.last_at),
            acknowledged_at=_time(acknowledged.last_at),
            told_pods=told.places.lines(),
            acknowledged_pods=acknowledged.places.lines(),
        )

    def first_acknowledged_at(self, key: Key) -> float | None:
        """When the first pod acknowledged, in seconds since the epoch. None if none has."""
        receipts = self._receipts.get(key)
        return None if receipts is None else receipts.acknowledged.first_at

    def forget(self, key: Key) -> None:
        self._receipts.pop(key, None)

    def _of(self, key: Key) -> _Receipts:
        return self._receipts.setdefault(key, _Receipts())


def _time(at: float | None) -> datetime.datetime | None:
    return None if at is None else datetime.datetime.fromtimestamp(at, datetime.UTC)
