"""From a taint to a job that trains again: how long each part takes on a real cluster.

    python -m benchmarks.end_to_end [--repeats 5] [--json FILE]

One job of two processes trains on and on. Again and again the node of its process 0 is tainted as GKE does;
when the job trains again, on another node, the taint is taken off. All seconds count from just before the
request that puts the taint; the operator's clock and this one are one on the local cluster. Figures are
medians over the repeats. Everything happens in one thread, apart from the collection of logs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from benchmarks.report import Better, Figure
from demo import install, nodes
from demo.logs import PodLogs
from demo.narrator import Narrator
from demo.observer import Observer
from demo.snapshot import Json, Snapshot
from demo.timeline import Stage, timeline
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.messages import Phase
from tests import testcluster
from tests.testcluster import Cluster, ClusterError

NAMESPACE = "gracepoint-benchmark"
_LOGS = Path(__file__).parents[1] / "build" / "benchmarks" / "end_to_end"
_STEPS = 1_000_000  # more than it ever gets to
_STEPS_BEFORE = 50  # after a restart, before the next taint
_START_TIMEOUT_S = 120.0
_RESUME_TIMEOUT_S = 120.0

#: Stage -> what the figure is called, and its goal in seconds: a notice takes at most 250 ms, and the
#: checkpoint is there before GKE kills the pods.
_FIGURES = {
    "seen": ("taint -> seen by the operator", None),
    "noticeSent": ("taint -> notice sent to all", 0.25),
    "lastAck": ("taint -> last acknowledgement", None),
    "agreed": ("taint -> agreed", None),
    "durable": ("taint -> durable", nodes.GRACE_S),
    "committed": ("taint -> committed", nodes.GRACE_S),
    "training": ("taint -> training again", None),
}


def main() -> int:
    """Measures and tells; returns 1 if a goal is missed or nothing could be measured."""
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="preemptions (%(default)s)")
    parser.add_argument("--context", help="use this context of the kubeconfig and no cluster of its own")
    parser.add_argument("--registry", default=install.REGISTRY, help="first part of the images' names there")
    flags = parser.parse_args()
    say = Narrator()
    try:
        with testcluster.open(nodes=2, context=flags.context) as cluster:
            timelines, preemptions = measure(cluster, repeats=flags.repeats, registry=flags.registry, say=say)
    except ClusterError as error:
        say(f"stopped: {error}\nlogs are in {_LOGS}")
        return 1
    told = figures(timelines, preemptions)
    report.publish(told, flags.json)
    return 1 if any(figure.met is False for figure in told) else 0


def figures(timelines: list[list[Stage]], statuses: list[Json]) -> list[Figure]:
    """The medians over all repeats; a stage that is missing in one was not measured."""
    found = []
    for stage, (name, goal) in _FIGURES.items():
        seconds = [item.seconds for line in timelines for item in line if item.name == stage]
        value = statistics.median(seconds) if len(seconds) == len(timelines) else None
        found.append(Figure(name, value, "s", goal))
    lost, spare = ([s.get(key) for s in statuses] for key in ("stepsLost", "secondsToSpare"))
    found.append(Figure("steps lost, worst", _worst(max, lost), "steps", 0))
    found.append(Figure("time to spare, worst", _worst(min, spare), "s", 0, Better.MORE))
    return found


def _worst(pick: Callable[[list[float]], float], values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return pick(known) if known and len(known) == len(values) else None


def measure(cluster: Cluster, *, repeats: int, registry: str, say: Narrator) -> tuple[list[list[Stage]], list[Json]]:
    """Preempts one job ``repeats`` times; returns the timeline and the status of each Preemption.

    Raises:
        ClusterError: A preemption did not end as Committed, or the job did not come back.
    """
    images = install.build_images(cluster, say, registry=registry)
    install.install_operator(cluster, images.operator)
    install.make_namespace(cluster, NAMESPACE)
    apply_policy(cluster, namespace=NAMESPACE)
    name = f"measured-{time.strftime('%H%M%S')}"
    run = TrainingRun(cluster, name, namespace=NAMESPACE, image=images.trainer, steps=_STEPS)
    logs = PodLogs(cluster, _LOGS)
    observer = Observer(run, say, logs)
    run.start()
    timelines, statuses = [], []
    try:
        for repeat in range(repeats):
            say.chapter(f"Preemption {repeat + 1} of {repeats}")
            zero_unix_s, snapshot = _preempt(run, observer)
            preemption = snapshot.preemptions[repeat]
            timelines.append(timeline(preemption, zero_unix_s=zero_unix_s, observed=[]))
            statuses.append(preemption["status"])
    finally:
        install.save_logs(cluster, logs, NAMESPACE)
    run.delete()
    return timelines, statuses


def _preempt(run: TrainingRun, observer: Observer) -> tuple[float, Snapshot]:
    """Preempts once and waits until all of it is told; returns when it was tainted and what was seen last."""
    before = observer.step

    def settled(snapshot: Snapshot) -> bool:
        return bool(snapshot.running()) and observer.step >= before + _STEPS_BEFORE

    snapshot = observer.watch(f"{_STEPS_BEFORE} more steps", settled, timeout_s=_START_TIMEOUT_S)
    count, node = len(snapshot.preemptions), snapshot.running()[0].node
    zero_unix_s = nodes.taint(run.cluster, node)
    try:

        def told(snapshot: Snapshot) -> bool:
            statuses = [preemption.get("status", {}) for preemption in snapshot.preemptions[count:]]
            stages = {timing["stage"] for status in statuses for timing in status.get("timings", [])}
            return "training" in stages

        snapshot = observer.watch("the job to train again", told, timeout_s=_RESUME_TIMEOUT_S)
    finally:
        nodes.untaint(run.cluster, node)
    phase = snapshot.preemptions[count]["status"]["phase"]
    if phase != Phase.COMMITTED:
        raise ClusterError(f"expected the Preemption to end as {Phase.COMMITTED}, found {phase}")
    return zero_unix_s, snapshot


if __name__ == "__main__":
    sys.exit(main())
