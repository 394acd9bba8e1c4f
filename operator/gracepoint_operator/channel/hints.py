"""Tells gangs of hints: signs that a disruption may be near. Hints are not recorded.

Runs on the controller's event loop. It is level-based like the notifier: whenever a gang is decided about, each of its
subscribers is told what it was not told yet, in one frame. It does not matter which replica tells a hint, or how often
a stream was lost in between: the library recognizes a hint by its name, which is the same in all replicas.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence

from gracepoint.wire.frames import Hint
from gracepoint.wire.messages import Confidence, Mode
from gracepoint_operator import signals
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber, Subscribers
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.observability.logs import about
from gracepoint_operator.signals import Signal

log = logging.getLogger(__name__)

#: At most this number of hints is in one frame. More hints of the same moment would add no information.
_MOST = 64


def hints_for(gang: GangSnapshot) -> list[Signal]:
    """The hints for a gang: of kinds that its policy names, and first seen after its pods were bound."""
    if gang.policy is None or gang.policy.spec.mode is Mode.OBSERVE:
        return []
    found = []
    for pod in gang.suspects if gang.marks else ():
        bound_at = gang.bound_at.get(pod.uid)
        for signal in signals.of_pod(pod, gang.marks.get(pod.uid, ())):
            if signal.confidence is not Confidence.HINT or not gang.policy.spec.counts(signal.kind):
                continue
            if bound_at is not None and gang.since[signal.mark] >= bound_at:
                found.append(signal)
    return found


class HintNotifier:
    """Sends hints.

    Args:
        subscribers: The pods that are connected to this replica.
    """

    def __init__(self, subscribers: Subscribers) -> None:
        self._subscribers = subscribers
        self._hinted: set[str] = set()  # UIDs of the workloads that had hints at the last look

    def tell(self, gang: GangSnapshot) -> None:
        """Sends every subscriber of the gang the hints that it was not told yet."""
        found = hints_for(gang)
        if not found and gang.workload_uid not in self._hinted:
            return  # as for nearly all gangs
        if found:
            self._hinted.add(gang.workload_uid)
        else:
            self._hinted.discard(gang.workload_uid)
        marks = {signal.mark for signal in found}
        uids = {pod.uid for pod in gang.members}
        for subscriber in self._subscribers.of_workload(gang.workload_uid):
            subscriber.hinted &= marks  # a sign that goes away and comes again is told again
            new = [signal for signal in found if signal.mark not in subscriber.hinted]
            if new and subscriber.hello.takes_hints and subscriber.hello.pod_uid in uids:
                subscriber.hinted |= {signal.mark for signal in new}
                subscriber.send(Outgoing(functools.partial(_frame, subscriber, new[:_MOST])))
                log.info("hint", extra=about(pod=subscriber.hello.pod_name, signal=new[0].text, hints=len(new)))


def _frame(subscriber: Subscriber, new: Sequence[Signal]) -> Hint:
    return Hint(
        hints=sorted({hashlib.sha256(signal.mark.encode()).hexdigest()[:16] for signal in new}),
        pod_uid=subscriber.hello.pod_uid,
        session=subscriber.hello.session,
        workload_uid=subscriber.hello.workload_uid,
        cause=new[0].cause,
        signal=new[0].text,
        nodes=sorted({signal.node for signal in new if signal.node}),
    )
