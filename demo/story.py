"""The demo's story: train undisturbed, train and lose two nodes, the second one without notice, compare.

Everything happens in one thread, which looks at the run twice a second (``observer``); only the pods' logs
are collected by others (``logs``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from pathlib import Path

from demo import install, nodes, picture, records
from demo.logs import PodLogs
from demo.narrator import Narrator
from demo.object_store import run_store
from demo.observer import Observer
from demo.snapshot import PROCESSES, Json, Snapshot
from demo.timeline import Stage, timeline, unix_s
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.messages import Phase
from gracepoint.wire.names import PROGRAMS_FOLDER
from gracepoint_cli.timeline import COMMON_STAGES
from tests.testcluster.api import Cluster, ClusterError, NotSupported

NAMESPACE = "gracepoint-demo"
VOLUME = "volume"
_POLICY = "transformer"
#: The first node is tainted when so much of the training is done, and the second one is switched off after so much.
_TAINT_AFTER = 0.15
_DIES_AFTER = 0.5
#: Steps between two snapshots in the memory of nodes.
SNAPSHOT_STEPS = 40
_TRAINING_NODES = (
    "snapshots.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
    ".nodeSelectorTerms[0].matchExpressions[0]"
)
_SETTINGS = (
    "podDeletion.enabled=true",
    "snapshots.enabled=true",
    "snapshots.capacity=64Mi",
    rf"{_TRAINING_NODES}.key=node-role\.kubernetes\.io/control-plane",
    f"{_TRAINING_NODES}.operator=DoesNotExist",
)
_START_TIMEOUT_S = 120.0
_TRAINING_TIMEOUT_S = 600.0
#: Kubernetes takes a node for dead after 20 s (local) or 50 s (kind), its pods are deleted up to a minute later.
_DEATH_TIMEOUT_S = 300.0
_STATUS_TIMEOUT_S = 15.0
_RESTORED = re.compile(r"restored step=(\d+) from_memory=(True|False)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Death:
    """What came out of a node that was switched off without notice.

    Attributes:
        node: The node.
        unix_s: When it was switched off.
        step: The newest step that was trained by then.
        restored_step: The step that training continued from.
        from_memory: Whether the memory of other nodes had it.
        silent_s: Seconds from the death to the first step after it.
    """

    node: str
    unix_s: float
    step: int
    restored_step: int
    from_memory: bool
    silent_s: float

    @property
    def steps_lost(self) -> int:
        """The steps that were trained again."""
        return self.step - self.restored_step

    @property
    def source(self) -> str:
        """Where the step was, as text."""
        return "the memory of another node" if self.from_memory else "storage"

    def to_json(self) -> Json:
        """This as plain JSON."""
        return {
            "step": self.step,
            "restored_step": self.restored_step,
            "from_memory": self.from_memory,
            "steps_lost": self.steps_lost,
            "snapshot_every_steps": SNAPSHOT_STEPS,
            "seconds_until_training": round(self.silent_s, 3),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came out; ``to_json`` is ``build/demo/result.json``.

    Attributes:
        problems: In what the promise did not hold; empty if it held.
        stages: The timeline; seconds count from the taint.
        death: The death without notice. None: this cluster's nodes cannot be switched off.
    """

    phase: str
    step: int | None
    restored_step: int | None
    steps_lost: int | None
    seconds_to_spare: float | None
    restarts_counted: int
    losses_equal: bool
    data_equal: bool
    parameters_equal: bool
    node_lost: bool
    stages: list[Stage]
    death: Death | None
    problems: list[str]

    def to_json(self) -> Json:
        """This result as plain JSON."""
        return {
            "held": not self.problems,
            "problems": self.problems,
            "phase": self.phase,
            "step": self.step,
            "restored_step": self.restored_step,
            "steps_lost": self.steps_lost,
            "seconds_to_spare": self.seconds_to_spare,
            "restarts_counted": self.restarts_counted,
            "losses_bitwise_equal": self.losses_equal,
            "data_order_equal": self.data_equal,
            "final_parameters_bitwise_equal": self.parameters_equal,
            "node_lost": self.node_lost,
            "stages": {stage.name: round(stage.seconds, 4) for stage in self.stages},
            "death_without_notice": None if self.death is None else self.death.to_json(),
        }


class Story:
    """Plays on a cluster that runs.

    Args:
        cluster: With at least three nodes.
        steps: Steps of each of the two runs.
        registry: First part of the images' names.
        say: Where news go.
        folder: Where logs are kept.
        storage: ``volume``, or the scheme of an object store, which then is started in the cluster.
    """

    def __init__(
        self, cluster: Cluster, *, steps: int, registry: str, say: Narrator, folder: Path, storage: str = VOLUME
    ) -> None:
        self._cluster = cluster
        self._storage = storage
        self._steps = steps
        self._registry = registry
        self._say = say
        self._folder = folder
        self._logs = PodLogs(cluster, folder)

    def play(self) -> Result:
        """Plays it all.

        Raises:
            ClusterError: Something stood still or broke; what is known is in the logs.
        """
        try:
            return self._play()
        finally:
            install.save_logs(self._cluster, self._logs, NAMESPACE)

    def _play(self) -> Result:
        say = self._say
        say.chapter("Images, operator, policy")
        images = install.build_images(self._cluster, say, registry=self._registry)
        say("helm install of charts/gracepoint, with snapshots in the memory of nodes")
        install.install_operator(self._cluster, images.operator, _SETTINGS)
        install.make_namespace(self._cluster, NAMESPACE)
        store = None
        if self._storage != VOLUME:
            say(f"an object store for {self._storage}://, with its credentials in a Secret")
            store = run_store(self._cluster, self._storage, NAMESPACE)
        change_policy = store.change_policy if store else _as_it_is
        change_jobset = store.change_jobset if store else _as_it_is

        def change(spec: Json) -> None:
            # On the volume, also if the checkpoints go to a bucket.
            programs = f"{spec['checkpoint']['directory']}/{PROGRAMS_FOLDER}"
            spec["compilationCache"] = {"enabled": True, "directory": programs}
            spec["checkpoint"]["memory"] = {"everySteps": SNAPSHOT_STEPS, "copies": 2}
            spec["lostNodes"] = {"deletePods": True}
            change_policy(spec)

        apply_policy(self._cluster, _POLICY, namespace=NAMESPACE, change=change)
        say(f"CheckpointPolicy {_POLICY} is ready")

        mark = time.strftime("%H%M%S")
        undisturbed, disturbed = (
            TrainingRun(
                self._cluster,
                f"{name}-{mark}",
                namespace=NAMESPACE,
                image=images.trainer,
                steps=self._steps,
                policy=_POLICY,
            )
            for name in ("undisturbed", "disturbed")
        )
        say.chapter(f"{PROCESSES} processes train {self._steps} steps, undisturbed, to compare with")
        undisturbed.start(change_jobset, _end_soon)
        self._watch_to_completion(Observer(undisturbed, say, self._logs))

        say.chapter("The same again, and this time a node goes away")
        disturbed.start(change_jobset, _end_soon)
        observer = Observer(disturbed, say, self._logs)
        zero_unix_s, node_gone_unix_s, snapshot = self._disturb(observer)

        death = None
        if node_gone_unix_s is not None:
            say.chapter("Now a node is switched off, and nobody is told")
            death = self._switch_off(disturbed, observer)
        self._watch_to_completion(observer)

        say.chapter("The two runs compared")
        if not snapshot.preemptions:
            raise ClusterError(f"no Preemption was made for the taint; {snapshot.describe()}")
        comparison = disturbed.compare(undisturbed)
        preemption = snapshot.preemptions[0]
        observed = []
        if node_gone_unix_s is not None:
            observed.append(Stage("nodeGone", "the node is gone", node_gone_unix_s - zero_unix_s))
        if (first_unix_s := _first_step_again(disturbed)) is not None:
            observed.append(Stage("firstStep", "first step after it is done", first_unix_s - zero_unix_s))
        drawn = picture.timeline(
            preemption,
            zero_unix_s=zero_unix_s,
            observed=observed,
            undisturbed=records.read(undisturbed.output),
            disturbed=records.read(disturbed.output),
            disturbance=f"preempted at step {preemption.get('status', {}).get('step')}",
        )
        picture.write(drawn, self._folder, "timeline")
        if death is not None:
            _draw(death, undisturbed, disturbed, self._folder)
        status = preemption.get("status", {})
        result = Result(
            phase=status.get("phase", ""),
            step=status.get("step"),
            restored_step=status.get("restoredStep"),
            steps_lost=status.get("stepsLost"),
            seconds_to_spare=status.get("secondsToSpare"),
            restarts_counted=snapshot.restarts_counted,
            losses_equal=comparison.losses_equal,
            data_equal=comparison.data_equal,
            parameters_equal=comparison.parameters_equal,
            node_lost=node_gone_unix_s is not None,
            stages=timeline(preemption, zero_unix_s=zero_unix_s, observed=observed),
            death=death,
            problems=list(comparison.differences),
        )
        result.problems.extend(broken_promises(result, preemptions=len(snapshot.preemptions)))
        return result

    def _disturb(self, observer: Observer) -> tuple[float, float | None, Snapshot]:
        """Taints a trainer's node, takes it away when the grace period is over, and waits until training goes on.

        Returns:
            When the taint was put, when the node was gone, and what was seen last.
        """
        taint_at = max(1, int(self._steps * _TAINT_AFTER))
        snapshot = observer.watch(
            f"two trainers to reach step {taint_at}",
            lambda snapshot: bool(snapshot.running()) and observer.step >= taint_at,
            timeout_s=_START_TIMEOUT_S,
        )
        node = snapshot.running()[0].node  # process 0's: the one that the other cannot live without
        zero_unix_s = nodes.taint(self._cluster, node)
        self._say(f"node {node} gets the taint {nodes.TERMINATION_TAINT['key']}: {nodes.GRACE_S:.0f} s to live")
        observer.watch(
            "the grace period to end",
            lambda snapshot: time.time() >= zero_unix_s + nodes.GRACE_S,
            timeout_s=2 * nodes.GRACE_S,
            may_end=True,
        )
        gone_unix_s = self._lose(node)
        with contextlib.suppress(ClusterError):  # what is still missing then is told by broken_promises
            observer.watch(
                "the Preemption to be told to its end",
                lambda snapshot: all(_stages(preemption) >= COMMON_STAGES for preemption in snapshot.preemptions),
                timeout_s=_STATUS_TIMEOUT_S,
                may_end=True,
            )
        return zero_unix_s, gone_unix_s, observer.look()

    def _switch_off(self, run: TrainingRun, observer: Observer) -> Death:
        """Switches off a trainer's node between two snapshots, and waits until training goes on."""
        dies_at = int(self._steps * _DIES_AFTER)

        def is_between(snapshot: Snapshot) -> bool:
            since = observer.step % SNAPSHOT_STEPS
            between = SNAPSHOT_STEPS // 4 <= since <= SNAPSHOT_STEPS * 3 // 4
            return bool(snapshot.running()) and observer.step >= dies_at and between

        what = f"step {dies_at}, and the middle between two snapshots"
        node = observer.watch(what, is_between, timeout_s=_TRAINING_TIMEOUT_S).running()[0].node
        self._cluster.lose_node(node)
        died_unix_s = time.time()
        self._say(f"node {node} is switched off")
        before = records.read(run.output)
        attempt, step = max(each.attempt for each in before), max(each.step for each in before)
        # Somebody has found the machine off. Else Kubernetes waits longer before it gives the pods up.
        nodes.taint(self._cluster, node, nodes.OUT_OF_SERVICE_TAINT)
        observer.watch(
            "training to go on without the node",
            lambda snapshot: (newest := run.newest()) is not None and newest.attempt > attempt,
            timeout_s=_DEATH_TIMEOUT_S,
        )
        after = [each for each in records.read(run.output) if each.attempt > attempt]
        death = Death(
            node=node,
            unix_s=died_unix_s,
            step=step,
            restored_step=min(each.step for each in after) - 1,
            from_memory=self._was_in_memory(run),
            silent_s=min(each.unix_s for each in after) - died_unix_s,
        )
        self._say(f"step {step} was reached; training goes on from step {death.restored_step}, from {death.source}")
        return death

    def _was_in_memory(self, run: TrainingRun) -> bool:
        """Returns whether the trainers that run now have restored from the memory of nodes, as their logs say."""
        logs = [
            self._cluster.kubectl("logs", f"pod/{pod.name}", f"--namespace={NAMESPACE}").stdout
            for pod in run.look().running()
        ]
        restored = [_RESTORED.search(log) for log in logs]
        return bool(restored) and all(found is not None and found[2] == "True" for found in restored)

    def _watch_to_completion(self, observer: Observer) -> None:
        snapshot = observer.watch(
            "the end of training",
            lambda snapshot: bool(snapshot.end),
            timeout_s=_TRAINING_TIMEOUT_S,
            may_end=True,
        )
        if snapshot.end != "Completed":
            raise ClusterError(f"training did not complete: {snapshot.describe()}")

    def _lose(self, node: str) -> float | None:
        try:
            self._cluster.lose_node(node, delete_object=True)
        except NotSupported as reason:
            self._say(f"the node stays, tainted: {reason}")
            return None
        gone_unix_s = time.time()
        self._say(f"node {node} is gone")
        return gone_unix_s


def _as_it_is(body: Json) -> None:
    pass


def _end_soon(template: Json) -> None:
    """A trainer that waits for one that is dead has no longer to end than a spot node gives it."""
    template["spec"]["terminationGracePeriodSeconds"] = int(nodes.GRACE_S)


def _draw(death: Death, undisturbed: TrainingRun, disturbed: TrainingRun, folder: Path) -> None:
    """Draws what followed from the death, of which the Preemption knows that the operator has made of it."""
    found = [each for each in disturbed.look().preemptions if unix_s(each["spec"]["observedAt"]) > death.unix_s]
    if not found:
        raise ClusterError(f"no Preemption was made for the node that was switched off; {disturbed.look().describe()}")
    steps = records.read(disturbed.output)
    taken_s = [each.unix_s - death.unix_s for each in steps if each.step == death.restored_step]
    observed = [Stage("nodeGone", "switched off", 0.0)]
    if taken_s:
        kind = "snapshot" if death.from_memory else "save"
        observed.append(Stage("snapshot", f"{kind} of step {death.restored_step}", min(taken_s)))
    drawn = picture.timeline(
        found[0],
        zero_unix_s=death.unix_s,
        observed=observed,
        undisturbed=records.read(undisturbed.output),
        disturbed=steps,
        disturbance=f"a node was switched off at step {death.step}",
    )
    made = picture.without_notice(
        drawn,
        lost=death.steps_lost,
        interval=SNAPSHOT_STEPS,
        restored_step=death.restored_step,
        source=death.source,
    )
    picture.write(made, folder, "without-notice")


def broken_promises(result: Result, *, preemptions: int) -> list[str]:
    """Says what of the promise did not hold, apart from the comparison of the two runs."""
    problems = []
    if preemptions != 1:
        problems.append(f"expected one Preemption for one taint, found {preemptions}")
    if result.phase != Phase.COMMITTED:
        problems.append(f"expected the Preemption to end as {Phase.COMMITTED}, found {result.phase or 'no phase'}")
    if result.steps_lost != 0:
        problems.append(f"expected 0 steps lost, found {result.steps_lost}")
    if result.seconds_to_spare is None or result.seconds_to_spare < 0:
        problems.append(f"expected the commit before the deadline, found {result.seconds_to_spare} s to spare")
    if result.step is None or result.restored_step != result.step:
        problems.append(f"expected to go on from the saved step {result.step}, found {result.restored_step}")
    if result.restarts_counted != 0:
        problems.append(f"expected no restart to count towards maxRestarts, found {result.restarts_counted}")
    if missing := COMMON_STAGES - {stage.name for stage in result.stages}:
        problems.append(f"the timeline lacks {', '.join(sorted(missing))}")
    if (death := result.death) is not None:
        if not death.from_memory:
            problems.append(f"expected to go on from the memory of nodes, found step {death.restored_step} of storage")
        if not 0 <= death.steps_lost <= SNAPSHOT_STEPS:
            lost = f"expected at most {SNAPSHOT_STEPS} steps lost with the node that was switched off"
            problems.append(f"{lost}, found {death.steps_lost}")
    return problems


def _first_step_again(run: TrainingRun) -> float | None:
    """When the first step of the attempt after the preemption was done, as the trainers recorded it."""
    return min((step.unix_s for step in records.read(run.output) if step.attempt > 0), default=None)


def _stages(preemption: Json) -> set[str]:
    return {timing["stage"] for timing in preemption.get("status", {}).get("timings", [])}
