"""From a taint to a job that trains again: how long each part takes on a real cluster.

    python -m benchmarks.end_to_end [--repeats 5] [--json FILE]

One job of two processes trains on and on. Again and again the node of its process 0 is tainted as GKE does;
when the job trains again, on another node, the taint is taken off. Seconds count from just before the
request that puts the taint; the operator's clock and this one are one on the local cluster. Figures are
medians over the repeats. Everything happens in one thread, apart from the collection of logs and the watches of
``end_to_end_objects``.

Compiled programs are kept beside the checkpoints, so each start after the first is a warm one. What lies between the
commit and the next training is told by parts, from the traces of the trainers; what Kubernetes does between the last
process and the next, from its objects. Before the job starts, pods of
the same image that only write down the time are created on the idle cluster: what they take to be scheduled and run is
Kubernetes' own part of each restart.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import end_to_end_bare_pod, end_to_end_objects, end_to_end_traces, report
from benchmarks.end_to_end_objects import Heard, ObjectWatch
from benchmarks.end_to_end_traces import Life
from benchmarks.report import Better, Figure
from demo import install, nodes
from demo.logs import PodLogs
from demo.narrator import Narrator
from demo.observer import Observer
from demo.snapshot import Json, Snapshot
from demo.timeline import Stage, timeline
from demo.training import TrainingRun, apply_policy
from gracepoint.wire import names
from gracepoint.wire.messages import Phase
from tests import testcluster
from tests.testcluster import Cluster, ClusterError

NAMESPACE = "gracepoint-benchmark"
_LOGS = Path(__file__).parents[1] / "build" / "benchmarks" / "end_to_end"
_STEPS = 1_000_000  # more than it ever gets to
_STEPS_BEFORE = 50  # after a restart, before the next taint
_START_TIMEOUT_S = 300.0  # the first start compiles, for minutes on a busy machine
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
_AGAIN = "commit -> training again"
_BARE = "a bare pod of the same image: created -> its process runs"
#: Goal in seconds for the difference of these two.
_OWN_GOAL_S = 5.0
_BARE_PODS = 3
#: A look at the cluster is a process that asks the API server, on the processors on which the job starts again.
_LOOK_EVERY_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
    """What was seen of one preemption.

    Attributes:
        stages: The stages of the Preemption; seconds count from the taint.
        status: The Preemption's status.
        parts: Seconds of each part between the commit and the first step, by its words. None: not measured.
        compiled: The most programs that a process compiled before its first step. None: not measured.
    """

    stages: list[Stage]
    status: Json
    parts: dict[str, float | None] = dataclasses.field(default_factory=dict)
    compiled: int | None = None


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
            bare_s, measured = measure(cluster, repeats=flags.repeats, registry=flags.registry, say=say)
    except ClusterError as error:
        say(f"stopped: {error}\nlogs are in {_LOGS}")
        return 1
    told = figures(measured, bare_s)
    report.publish(told, flags.json)
    return 1 if any(figure.met is False for figure in told) else 0


def figures(measured: list[Repeat], bare_s: list[float]) -> list[Figure]:
    """The medians over all repeats; what is missing in one was not measured.

    Args:
        measured: The repeats.
        bare_s: What each bare pod took.
    """
    found = [
        Figure(name, _median([_seconds(repeat, stage) for repeat in measured]), "s", goal)
        for stage, (name, goal) in _FIGURES.items()
    ]
    again = _median([_difference(repeat) for repeat in measured])
    bare = _median(bare_s)
    own = None if again is None or bare is None else again - bare
    found += [
        Figure(_AGAIN, again, "s"),
        Figure(_BARE, bare, "s"),
        Figure("commit -> training again, without the time of a bare pod", own, "s", _OWN_GOAL_S),
    ]
    for _, words in end_to_end_traces.PARTS:
        found.append(Figure(f"  of it {words}", _median([repeat.parts.get(words) for repeat in measured]), "s"))
        if words == end_to_end_traces.PODS_ARE_BACK:
            inner = [words for _, _, words in end_to_end_objects.PARTS] + [end_to_end_objects.LAST]
            found += [
                Figure(f"    of it {each}", _median([repeat.parts.get(each) for repeat in measured]), "s")
                for each in inner
            ]
    found.append(Figure("programs compiled, worst", _worst(max, [repeat.compiled for repeat in measured]), "", 0))
    lost, spare = ([repeat.status.get(key) for repeat in measured] for key in ("stepsLost", "secondsToSpare"))
    found.append(Figure("steps lost, worst", _worst(max, lost), "steps", 0))
    found.append(Figure("time to spare, worst", _worst(min, spare), "s", 0, Better.MORE))
    return found


def _seconds(repeat: Repeat, stage: str) -> float | None:
    return next((item.seconds for item in repeat.stages if item.name == stage), None)


def _difference(repeat: Repeat) -> float | None:
    committed, training = _seconds(repeat, "committed"), _seconds(repeat, "training")
    return None if committed is None or training is None else training - committed


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _worst(pick: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return pick(known) if known and len(known) == len(values) else None


def measure(cluster: Cluster, *, repeats: int, registry: str, say: Narrator) -> tuple[list[float], list[Repeat]]:
    """Preempts one job ``repeats`` times; returns what bare pods take, and what was seen of each preemption.

    Raises:
        ClusterError: A preemption did not end as Committed, or the job did not come back.
    """
    images = install.build_images(cluster, say, registry=registry)
    install.install_operator(cluster, images.operator)
    install.make_namespace(cluster, NAMESPACE)
    apply_policy(cluster, namespace=NAMESPACE, change=_keep_programs)
    say.chapter("Pods that do nothing")
    bare_s = [end_to_end_bare_pod.measure(cluster, NAMESPACE, images.trainer, number) for number in range(_BARE_PODS)]
    name = f"measured-{time.strftime('%H%M%S')}"
    run = TrainingRun(
        cluster,
        name,
        namespace=NAMESPACE,
        image=images.trainer,
        steps=_STEPS,
        environment={names.Env.TRACE: f"/shared/output/{NAMESPACE}/{name}/trace"},
    )
    logs = PodLogs(cluster, _LOGS)
    objects = ObjectWatch(cluster.kubeconfig, NAMESPACE)
    observer = Observer(run, say, logs, look_every_s=_LOOK_EVERY_S)
    run.start()
    measured: list[tuple[float, Json]] = []
    try:
        for repeat in range(repeats):
            say.chapter(f"Preemption {repeat + 1} of {repeats}")
            zero_unix_s, snapshot = _preempt(run, observer)
            measured.append((zero_unix_s, snapshot.preemptions[repeat]))
    finally:
        install.save_logs(cluster, logs, NAMESPACE)
        shutil.copytree(run.output, _LOGS / name, dirs_exist_ok=True)
    heard = objects.stop()
    lives = end_to_end_traces.read(run.output / "trace")
    run.delete()
    return bare_s, [
        _repeat(lives, heard, attempt, zero_unix_s, preemption)
        for attempt, (zero_unix_s, preemption) in enumerate(measured, start=1)
    ]


def _keep_programs(spec: Json) -> None:
    spec["compilationCache"] = {"enabled": True}


def _repeat(lives: list[Life], heard: Heard, attempt: int, zero_unix_s: float, preemption: Json) -> Repeat:
    """Returns what was seen of the preemption after which the job started for the ``attempt``-th time again."""
    stages = timeline(preemption, zero_unix_s=zero_unix_s, observed=[])
    before, after = ([life for life in lives if life.attempt == number] for number in (attempt - 1, attempt))
    committed_s = next((stage.seconds for stage in stages if stage.name == "committed"), None)
    if committed_s is None or not after:
        return Repeat(stages=stages, status=preemption["status"])
    compiled = [life.compiled for life in after]
    committed_unix_s = zero_unix_s + committed_s
    parts = end_to_end_traces.parts(before, after, committed_unix_s)
    until_exit_s, until_start_s = (parts[words] for words in (end_to_end_traces.ENDED, end_to_end_traces.PODS_ARE_BACK))
    if until_exit_s is not None and until_start_s is not None:
        ended_unix_s = committed_unix_s + until_exit_s
        parts |= end_to_end_objects.parts(heard, attempt, ended_unix_s, ended_unix_s + until_start_s)
    return Repeat(
        stages=stages,
        status=preemption["status"],
        parts=parts,
        compiled=max((count for count in compiled if count is not None), default=None)
        if None not in compiled
        else None,
    )


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
