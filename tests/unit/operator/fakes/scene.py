"""A world that a test builds event by event, and what is decided about it."""

from __future__ import annotations

from collections.abc import Sequence

from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.decisions.decide import Check, Decision, End, Move, Reached, StartPreemption, decide
from gracepoint_operator.decisions.effective_signals import SIGNALS_COME_S
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.model.preemption_record import PreemptionRecord
from gracepoint_operator.signals import BUILT_IN, Row
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import Body, Clock


class Scene:
    """Two nodes and a gang of two pods that trains since 100 s, listed as at an operator's start.

    Args:
        rows: The disruption catalogue.
        policy: The policy's spec.
    """

    def __init__(self, *, rows: Sequence[Row] = BUILT_IN, **policy: object) -> None:
        self.clock = Clock()
        self.cache = ClusterCache(self.clock, rows)
        self.listed(kinds.POLICIES, objects.policy(**policy))
        self.listed(JOBSETS, objects.jobset())
        self.listed(kinds.JOBS, objects.job())
        for name in ("node-1", "node-2"):
            self.listed(kinds.NODES, objects.node(name))
        for index in (0, 1):
            self.listed(kinds.PODS, objects.pod(index))

    def listed(self, kind: kinds.Kind, body: Body) -> None:
        self.cache.put(kind, body, listed=True)

    def seen(self, kind: kinds.Kind, body: Body) -> None:
        """By a watch, now."""
        self.cache.put(kind, body, listed=False)

    def gone(self, body: Body) -> None:
        self.cache.drop(body["metadata"]["uid"])

    def taint(self, name: str = "node-1", key: str = objects.GKE_TAINT, effect: str = "NoSchedule") -> None:
        self.seen(kinds.NODES, objects.node(name, taints=[objects.taint(key, effect)]))

    def decisions(self) -> list[Decision]:
        return decide(self.cache.gang(objects.JOBSET_UID), self.clock())

    def start(self) -> StartPreemption:
        """The one decision that there must be: a new preemption."""
        (decision,) = self.decisions()
        assert isinstance(decision, StartPreemption), decision
        return decision

    def move(self) -> Move:
        (decision,) = self.decisions()
        assert isinstance(decision, Move), decision
        return decision

    def end(self) -> End:
        (decision,) = self.decisions()
        assert isinstance(decision, End), decision
        return decision

    def check(self) -> Check:
        (decision,) = self.decisions()
        assert isinstance(decision, Check), decision
        return decision

    def reached(self) -> list[str]:
        return [decision.stage for decision in self.decisions() if isinstance(decision, Reached)]

    def restart(self, attempt: int = 1, *, on: str = "node-2") -> None:
        """JobSet made everything anew: old Jobs and pods are gone, new pods run on one node."""
        self.seen(JOBSETS, objects.jobset(restarts=attempt))
        self.gone(objects.job(attempt=attempt - 1))
        for index in (0, 1):
            self.gone(objects.pod(index, attempt=attempt - 1))
        self.seen(kinds.JOBS, objects.job(attempt=attempt))
        for index in (0, 1):
            self.seen(kinds.PODS, self.new_pod(index, attempt, on=on))

    def new_pod(self, index: int, attempt: int = 1, *, on: str = "node-2") -> Body:
        return objects.pod(index, attempt=attempt, on=on, created_at=self.clock())

    def recorded(self, **preemption: object) -> PreemptionRecord:
        """A Preemption that the API has, and that is known for long enough to know its signals too."""
        body = objects.preemption(**preemption)  # type: ignore[arg-type]
        self.clock.move(-2 * SIGNALS_COME_S)
        self.seen(kinds.PREEMPTIONS, body)
        self.clock.move(2 * SIGNALS_COME_S)
        return self.cache.preemptions.records[objects.NAMESPACE, body["metadata"]["name"]]
