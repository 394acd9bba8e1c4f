"""A job that trains, saves, is disrupted and comes back, on a virtual clock, with its own account of the time.

The job is the truth: it adds up what it does while it does it, and takes the time of a step back when the step is lost.
The operator sees it as in a cluster: pods with times in whole seconds, watch events that come a little late, what
kubelets write up to a second later, the end of a pod another second after that of its containers, and messages of the
real ``TimeSpent`` that may be late, lost or doubled. While the operator is down, it sees nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable
from random import Random

from gracepoint.preemption.time_spent import ProcessStart, TimeSpent
from gracepoint.wire import names
from gracepoint.wire.messages import Spent
from gracepoint_operator.kube.objects import Node, Pod
from gracepoint_operator.model.gang_snapshot import GangSnapshot
from gracepoint_operator.workloads import Workload, read_pod
from tests.unit.operator.fakes import objects

_PODS = 3
_PERIOD = 50  # steps between two periodic saves


@dataclasses.dataclass(frozen=True)
class Told:
    """A message that arrives.

    Attributes:
        spent: What it says.
        session: Session of the sender.
        pod: The sender's pod.
    """

    spent: Spent
    session: str
    pod: Pod


_Change = Callable[[objects.Body, float], None]


class SimulatedJob:
    """See the module.

    Args:
        random: Decides everything.
        restarts_whole: True: the attempt grows with each restart, as of a JobSet. False: pods are replaced one by one,
            as of a Job by itself.
        on_pods: Called when the operator sees the pods, with the gang and the time.
        on_message: Called when a message arrives, with the time.

    Attributes:
        account: Seconds by category: the truth.
        disruptions: How often the gang ended.
        losses: After how many of these it lost steps.
        save_costs: Seconds of each periodic save.
    """

    def __init__(
        self,
        random: Random,
        *,
        restarts_whole: bool,
        on_pods: Callable[[GangSnapshot, float], None],
        on_message: Callable[[Told, float], None],
    ) -> None:
        self._random = random
        self._restarts_whole = restarts_whole
        self._on_pods = on_pods
        self._on_message = on_message
        self.account: dict[str, float] = collections.defaultdict(float)
        self.disruptions = 0
        self.losses = 0
        self.save_costs: list[float] = []
        self._now = self.since = objects.NOW + random.random()
        self._bodies: dict[str, objects.Body] = {}
        self._nodes: set[str] = set()  # each pod has a node of its own
        self._written: dict[str, float] = {}  # when its kubelet writes last of a pod
        self._attempt = 0
        self._numbers = itertools.count()
        self._arrivals: list[tuple[float, int, Callable[[float], None]]] = []
        self._down_until = 0.0
        self._pace = random.uniform(0.2, 0.8)  # seconds of a step, in each life: the same program on the same devices
        self._knows_starts = random.random() < 0.5  # an older library does not say them
        self._steps: list[tuple[float, float]] = []  # each step that is not lost, and its seconds
        self._committed = 0
        self._gone_at = self._now

    @property
    def now(self) -> float:
        """The time."""
        return self._now

    def live(self, *, last: bool = False) -> None:
        """Lives once, until a disruption. ``last``: until now, without an end."""
        self._wait_for_pods()
        ends = ["notice"] * 4 + ["kill"] * 3 + ["node lost", "suspend", "too late", "early"]
        end = "" if last else self._random.choice(ends)
        stage = self._random.choice(["scheduling", "image", "join", "restore", "compile"]) if end == "early" else ""
        # When a start ended of which no process and no replica tells, nobody can know.
        if self._random.random() < 0.1 and not stage:
            self._operator_is_down(self._random.uniform(3, 40))
        for begin in (self._schedule, self._start, self._join, self._restore, self._compile):
            name = begin.__name__.strip("_")
            if stage == {"schedule": "scheduling", "start": "image"}.get(name, name):
                self._is_killed_in(stage)
                return
            begin()
        self._train(end)

    # The stages of a life.

    def _wait_for_pods(self) -> None:
        self._spend("waiting", self._random.uniform(3, 30))  # more than it takes until the last end is seen
        # JobSet deletes the pods of the attempt before. A Job keeps pods that have failed; here, those of two lives.
        for name in list(self._bodies)[: None if self._restarts_whole else -2 * _PODS]:
            del self._bodies[name]
        created = objects.stamp(self._now)
        self._names = []
        for _ in range(_PODS):
            name = f"train-{next(self._numbers)}"
            self._names.append(name)
            self._bodies[name] = _body(name, self._attempt, created)
            self._nodes.add(_node(name))
        self._pods_changed()

    def _schedule(self) -> None:
        took = sorted(self._random.uniform(0.1, 40) for _ in range(_PODS))
        self._one_by_one("scheduling", took, _bind, by_kubelet=False)

    def _start(self) -> None:
        took = sorted(self._random.uniform(0.5, 30) for _ in range(_PODS))
        self._one_by_one("image", took, _run, by_kubelet=True)
        self._started_at = self._now

    def _one_by_one(self, category: str, took: list[float], change: _Change, *, by_kubelet: bool) -> None:
        before = 0.0
        for name, at in zip(self._names, took, strict=True):
            self._spend(category, at - before)
            before = at
            self._change(name, change, by_kubelet=by_kubelet)

    def _join(self) -> None:
        self._session = f"session-{next(self._numbers)}"
        self._spend("join", self._random.uniform(0.5, 6))
        began = self._now
        self._spend("join", self._random.uniform(0.5, 6))
        self._time_spent = TimeSpent(lambda: self._now, ProcessStart(began, began, last_unix_s=self._said_start()))
        self._tell()

    def _said_start(self) -> float | None:
        """When the last process was started, as they say. The clocks of machines differ a little."""
        return self._started_at + self._random.uniform(-0.01, 0.01) if self._knows_starts else None

    def _restore(self) -> None:
        self._spend("restore", self._random.uniform(0.5, 30))
        self._restored = self._committed
        lost = []
        while self._steps and self._steps[-1][0] > self._restored:
            lost.append(self._steps.pop()[1])
        self.account["training"] -= sum(lost)
        self.account["recomputation"] += sum(lost)
        self.losses += bool(lost)
        self._time_spent.restored(self._restored or None)
        self._tell()

    def _compile(self) -> None:
        self._spend("compile", self._random.uniform(1, 20))
        self._time_spent.trains()
        self._tell()

    def _train(self, end: str) -> None:
        step, number = self._restored, self._random.randrange(5, 800)
        under_way: tuple[int, float] | None = None  # the save in the background, and when it is committed
        pace = self._pace * self._random.uniform(0.9, 1.1)
        for _ in range(number):
            step += 1
            self._step(step, pace * self._random.uniform(0.9, 1.1))
            if under_way and under_way[1] <= self._now:
                self._committed = under_way[0]
                self._forecast(step)
                under_way = None
            elif step == self._restored + 5:
                self._forecast(step)
            if step % _PERIOD == 0 and under_way is None:
                cost = self._random.uniform(0.1, 0.6)
                self._time_spent.stops(step)
                self._spend("saving", cost)
                self._time_spent.goes_on(periodic=True)
                self.save_costs.append(cost)
                under_way = (step, self._now + self._random.uniform(0.2, 3))
        if end in ("notice", "suspend"):
            self._emergency(step, step)
            self._leave(vanish=end == "suspend")
        elif end == "too late":
            self._emergency(step, None)
            self._leave(vanish=False)
        elif end == "kill":
            self._step(float("inf"), self._random.uniform(0.05, 1.0))
            self._leave(vanish=False)
        elif end == "node lost":
            self._step(float("inf"), self._random.uniform(0.05, 1.0))
            self._lose_node()

    def _forecast(self, step: int) -> None:
        self._time_spent.passed(step)
        self._tell(surely=False)

    def _emergency(self, step: int, saved: int | None) -> None:
        self._time_spent.stops(step)
        self._spend("saving", self._random.uniform(0.3, 8))
        if saved is not None:
            self._committed = saved
        self._time_spent.left()
        self._tell()

    def _leave(self, *, vanish: bool) -> None:
        # An emergency is over, and the processes exit; or one is killed, and the others notice it.
        self.disruptions += 1
        if self._time_spent.spent().left_s is not None:
            self._spend("leaving", self._random.uniform(0.3, 3))
        for name in self._names:
            if vanish:
                del self._bodies[name]
                self._pods_changed()
            else:
                self._change(name, _end, by_kubelet=True)
            if name != self._names[-1]:
                self._spend("leaving", self._random.uniform(0.05, 4))
        self._attempt += self._restarts_whole

    def _lose_node(self) -> None:
        # The others hang until they notice it. The control plane cleans the lost pod up before that, or after.
        self.disruptions += 1
        lost, *others = self._names
        self._nodes.remove(_node(lost))
        self._pods_changed()
        hang_s, cleaned_s = self._random.uniform(3, 40), self._random.uniform(3, 40)
        self._spend("leaving", min(hang_s, cleaned_s))
        if cleaned_s < hang_s:
            del self._bodies[lost]
            self._pods_changed()
            self._spend("leaving", hang_s - cleaned_s)
        for name in others:
            self._change(name, _end, by_kubelet=True)
            if name != others[-1]:
                self._spend("leaving", self._random.uniform(0.05, 4))
        if lost in self._bodies:
            self._spend("waiting", self._random.uniform(1.5, 20))
            del self._bodies[lost]
            self._pods_changed()
        self._attempt += self._restarts_whole

    def _is_killed_in(self, stage: str) -> None:
        category = "unknown" if stage == "join" else stage  # no process has said that it joins
        self._spend(category, self._random.uniform(0.5, 20))
        self.disruptions += 1
        for name in self._names:
            self._change(name, _end, by_kubelet=True)
        self._attempt += self._restarts_whole

    def _step(self, step: float, took: float) -> None:
        self._spend("training", took)
        self._steps.append((step, took))

    # What the operator gets to know.

    def _spend(self, category: str, seconds: float) -> None:
        """Lets time pass, during which messages and events arrive."""
        self.account[category] += seconds
        until = self._now + seconds
        while self._arrivals and self._arrivals[0][0] <= until:
            at, _, arrive = heapq.heappop(self._arrivals)
            arrive(at)
        self._now = until

    def _change(self, name: str, change: _Change, *, by_kubelet: bool) -> None:
        """Changes a pod. A kubelet looks at its containers once a second, and writes what it finds afterwards."""
        at, body = self._now, self._bodies[name]
        if not by_kubelet:
            change(body, at)
            self._pods_changed()
            return
        # What it has found first it writes first.
        written = max(at + self._random.uniform(0.05, 1.05), self._written.get(name, 0.0))
        self._writes(written, body, change, at)
        if change is _end:
            written += self._random.uniform(0.5, 1.2)
            self._writes(written, body, _is_over, at)
        self._written[name] = written

    def _writes(self, written: float, body: objects.Body, change: _Change, at: float) -> None:
        def write(now: float) -> None:
            change(body, at)
            self._pods_changed(now)

        self._arrive(written, write)

    def _pods_changed(self, at: float | None = None) -> None:
        at = max((at or self._now) + self._random.uniform(0.002, 0.06), self._down_until)
        self._arrive(at, lambda now: self._on_pods(self._gang(), now))

    def _tell(self, *, surely: bool = True) -> None:
        spent = self._time_spent.spent()
        told = Told(spent, self._session, read_pod(self._bodies[self._names[0]]))
        if self._random.random() < 0.05 and not surely:
            return  # the next one says the same and more
        waits = max(0.0, self._down_until - self._now)  # the sender tries again, and says how late it is
        told = dataclasses.replace(told, spent=dataclasses.replace(spent, now_s=spent.now_s + waits))
        for _ in range(1 + (self._random.random() < 0.1)):
            at = self._now + waits + self._random.uniform(0.001, 0.05)
            self._arrive(at, lambda now: self._on_message(told, now))

    def _operator_is_down(self, seconds: float) -> None:
        self._down_until = self._now + seconds

    def _arrive(self, at: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._arrivals, (at, next(self._numbers), what))

    def _gang(self) -> GangSnapshot:
        pods: list[Pod] = [read_pod(body) for body in self._bodies.values()]
        return GangSnapshot(
            workload_uid=objects.JOBSET_UID,
            workload=Workload(
                kind="JobSet" if self._restarts_whole else "Job",
                namespace=objects.NAMESPACE,
                name="train",
                uid=objects.JOBSET_UID,
                policy="careful",
                restarts=self._attempt,
                deleted=False,
                finished=False,
                injected=True,
                created_at=self.since,
            ),
            workload_gone=False,
            jobs={},
            pods=tuple(pods),
            nodes={name: Node(name, f"uid-{name}", False) for name in self._nodes},
            policy=None,
            preemptions=(),
            requests=(),
            marks={},
            since={},
            bound_at={},
            checked=frozenset(),
        )


def _body(name: str, attempt: int, created: str) -> objects.Body:
    return {
        "metadata": {
            "name": name,
            "namespace": objects.NAMESPACE,
            "uid": f"uid-{name}",
            "creationTimestamp": created,
            "labels": {
                names.LABEL_POLICY: "careful",
                names.JOBSET_LABEL_UID: objects.JOBSET_UID,
                names.JOBSET_LABEL_RESTART_ATTEMPT: str(attempt),
            },
        },
        "spec": {},
        "status": {"phase": "Pending"},
    }


def _node(pod: str) -> str:
    return f"node-of-{pod}"


def _bind(body: objects.Body, at: float) -> None:
    body["spec"]["nodeName"] = _node(body["metadata"]["name"])
    body["status"]["conditions"] = [objects.condition("PodScheduled", at=at)]


def _run(body: objects.Body, at: float) -> None:
    body["status"] |= {
        "phase": "Running",
        "containerStatuses": [{"state": {"running": {"startedAt": objects.stamp(at)}}}],
    }


def _end(body: objects.Body, at: float) -> None:
    before = body["status"].get("containerStatuses") or [{"state": {}}]
    started = before[0]["state"].get("running", {}).get("startedAt")
    ended = {"startedAt": started, "finishedAt": objects.stamp(at), "exitCode": 77}
    body["status"]["containerStatuses"] = [{"state": {"terminated": ended}}]


def _is_over(body: objects.Body, at: float) -> None:
    body["status"]["phase"] = "Failed"
