"""What only this replica knows of its notices: when it told each pod, and which pods acknowledged to it.

The controller's event loop owns it; there are no locks.
"""

from __future__ import annotations

import dataclasses
import datetime

from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.missing_acks import packed, place_of
from gracepoint_operator.resources import Replica

Key = tuple[str, str]


@dataclasses.dataclass
class Receipt:
    """What is known of one pod.

    Attributes:
        place: The pod's place in its workload.
        told_at: When it was told first, in seconds since the epoch. None if it was not told.
        acknowledged_at: When it acknowledged first, in seconds since the epoch. None if it has not.
    """

    place: str
    told_at: float | None = None
    acknowledged_at: float | None = None


class AcknowledgementLog:
    """By preemption (namespace, name) and pod UID. The first notice and the first acknowledgement count."""

    def __init__(self) -> None:
        self._receipts: dict[Key, dict[str, Receipt]] = {}

    def told(self, key: Key, pod: Pod, at: float) -> bool:
        """True if the pod is told for the first time."""
        receipt = self._of(key, pod)
        first = receipt.told_at is None
        receipt.told_at = at if first else receipt.told_at
        return first

    def acknowledged(self, key: Key, pod: Pod, at: float) -> bool:
        """True if the pod acknowledges for the first time."""
        receipt = self._of(key, pod)
        first = receipt.acknowledged_at is None
        receipt.acknowledged_at = at if first else receipt.acknowledged_at
        return first

    def told_at(self, key: Key, pod_uid: str) -> float | None:
        receipt = self._receipts.get(key, {}).get(pod_uid)
        return None if receipt is None else receipt.told_at

    def replica(self, key: Key, name: str) -> Replica:
        """This replica's entry in the Preemption's status."""
        receipts = self._receipts.get(key, {}).values()
        told = [receipt.told_at for receipt in receipts if receipt.told_at is not None]
        acknowledged = [item.acknowledged_at for item in receipts if item.acknowledged_at is not None]
        return Replica(
            name=name,
            told=len(told),
            acknowledged=len(acknowledged),
            told_at=_time(max(told)) if told else None,
            acknowledged_at=_time(max(acknowledged)) if acknowledged else None,
            told_pods=packed(item.place for item in receipts if item.told_at is not None),
            acknowledged_pods=packed(item.place for item in receipts if item.acknowledged_at is not None),
        )

    def first_acknowledged_at(self, key: Key) -> float | None:
        times = [item.acknowledged_at for item in self._receipts.get(key, {}).values()]
        return min((at for at in times if at is not None), default=None)

    def forget(self, key: Key) -> None:
        self._receipts.pop(key, None)

    def _of(self, key: Key, pod: Pod) -> Receipt:
        return self._receipts.setdefault(key, {}).setdefault(pod.uid, Receipt(place_of(pod)))


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)
