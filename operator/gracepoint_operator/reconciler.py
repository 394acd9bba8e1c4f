"""Decides about one workload, and hands each decision to the part that carries it out.

Everything runs on the controller's event loop.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.listing.workload_refresh import WorkloadRefresh
from gracepoint_operator.channel.hints import HintNotifier
from gracepoint_operator.channel.notifier import Notifier
from gracepoint_operator.decisions import rate_limit
from gracepoint_operator.decisions.decide import Check, Wait, decide
from gracepoint_operator.decisions.next_decision import next_decision_at
from gracepoint_operator.decisions.request_answers import Answer
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.observability.logs import about
from gracepoint_operator.recording.eviction_responder import EvictionResponder
from gracepoint_operator.recording.pod_protector import PodProtector
from gracepoint_operator.recording.preemption_writer import PreemptionWriter
from gracepoint_operator.recording.request_writer import RequestWriter
from gracepoint_operator.resources import PreemptionSpec

log = logging.getLogger(__name__)


class Reconciler:
    """See the module.

    Args:
        cache: What is known of the cluster.
        notifier: Carries out decisions about preemptions.
        hint_notifier: Tells hints.
        workload_refresh: Asks the API server why pods were deleted.
        request_writer: Writes answers to requests.
        eviction_responder: Answers Evictions.
        pod_protector: Protects pods from autoscalers.
        preemption_writer: Knows which records this replica created.
        clock: Seconds since the epoch.
        observe: Called with each gang that is decided about. Returns when it wants to be called again; None: after an
            event.
        likely_gangs_per_minute: At most this number of gangs is told of signals that are not sure; see ``rate_limit``.
        replicas: Number of replicas that share this limit.

    Attributes:
        held_back: UIDs of workloads with a preemption that has to wait. They are to be decided about each second.
    """

    def __init__(
        self,
        cache: ClusterCache,
        notifier: Notifier,
        hint_notifier: HintNotifier,
        workload_refresh: WorkloadRefresh,
        request_writer: RequestWriter,
        eviction_responder: EvictionResponder,
        pod_protector: PodProtector,
        preemption_writer: PreemptionWriter,
        clock: Callable[[], float],
        observe: Callable[[GangSnapshot], float | None],
        likely_gangs_per_minute: int,
        replicas: int,
    ) -> None:
        self._cache = cache
        self._notifier = notifier
        self._hint_notifier = hint_notifier
        self._workload_refresh = workload_refresh
        self._request_writer = request_writer
        self._eviction_responder = eviction_responder
        self._pod_protector = pod_protector
        self._preemption_writer = preemption_writer
        self._clock = clock
        self._observe = observe
        self._likely_gangs_per_minute = likely_gangs_per_minute
        self._replicas = replicas
        self.held_back: set[str] = set()

    def decide(self, uid: str) -> float | None:
        """Decides about a workload.

        Returns when that has to be done again without an event, in seconds since the epoch. None: only after an event.
        """
        now, waits = self._clock(), False
        gang = self._cache.gang(uid)
        self._hint_notifier.tell(gang)
        for decision in decide(gang, now, self._is_held_back):
            match decision:
                case Check():
                    self._workload_refresh.begin(decision.workload, decision.jobs, decision.pod_uids)
                case Answer():
                    self._request_writer.answer(decision)
                case Wait():
                    waits = True
                case _:
                    self._notifier.carry_out(decision)
        if not waits:
            self.held_back.discard(uid)
        elif uid not in self.held_back:
            self.held_back.add(uid)
            log.warning(
                "a gang is not told yet, as many were of signals that are not sure", extra=about(workload_uid=uid)
            )
        observe_at = self._observe(gang)  # last, so that no notice waits for it
        decided = dataclasses.replace(gang, epochs=tuple(self._cache.preemptions.epochs_of(uid)))
        answer_at = self._eviction_responder.respond(decided)
        times = (next_decision_at(decided, now), observe_at, answer_at, self._pod_protector.protect(decided))
        return min((at for at in times if at is not None), default=None)

    def tell_hints(self, uid: str) -> None:
        """Tells new subscribers of a workload the hints that they have missed."""
        self._hint_notifier.tell(self._cache.gang(uid))

    def _is_held_back(self, spec: PreemptionSpec) -> bool:
        late = self._cache.latest_epochs(rate_limit.WINDOW_S)
        return rate_limit.holds_back(
            spec, late, self._preemption_writer.made, self._likely_gangs_per_minute, self._replicas
        )
