"""The ways in which a soak disrupts a job: each is done with the means of the one who does it in a real cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from demo import nodes
from demo.snapshot import Pod
from demo.training import TrainingRun
from tests.cluster import machine, operator
from tests.metadata.servers import GceServer
from tests.soak.pod_watch import label
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

_PODS_GONE_S = 90.0
_DRAIN_S = 120
_DOWN_S = 3.0


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a disruption is done to.

    Attributes:
        run: The job, which trains.
        pod: One of its pods.
        metadata: The metadata servers of the nodes, by the node.
        saved: Waits until the processes have said that their save is over.
    """

    run: TrainingRun
    pod: Pod
    metadata: dict[str, GceServer]
    saved: Callable[[], None]

    @property
    def cluster(self) -> Cluster:
        return self.run.cluster


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to disrupt a job.

    Attributes:
        name: Its name in the report.
        act: Does it.
        mend: Undoes what would last, when the job trains again.
        notice: Whether the job gets a notice, so that it must not lose a completed step.
        recorded: Whether the operator sees it, so that there is a Preemption.
    """

    name: str
    act: Callable[[Scene], None]
    mend: Callable[[Scene], None] = lambda scene: None
    notice: bool = True
    recorded: bool = True


def _taint(scene: Scene) -> None:
    nodes.taint(scene.cluster, scene.pod.node)


def _untaint(scene: Scene) -> None:
    nodes.untaint(scene.cluster, scene.pod.node)


def _taint_ahead(scene: Scene) -> None:
    """A taint that leaves the pods their whole grace period."""
    nodes.taint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT)


def _untaint_ahead(scene: Scene) -> None:
    nodes.untaint(scene.cluster, scene.pod.node, nodes.SCALE_DOWN_TAINT["key"])


def _drain(scene: Scene) -> None:
    scene.cluster.kubectl(
        *("drain", scene.pod.node, "--ignore-daemonsets", "--delete-emptydir-data", "--force"),
        *(f"--pod-selector={label(scene.run.name)}", f"--timeout={_DRAIN_S}s"),
        timeout_s=_DRAIN_S + 10,
    )


def _uncordon(scene: Scene) -> None:
    scene.cluster.kubectl("uncordon", scene.pod.node)


def _delete(scene: Scene) -> None:
    scene.cluster.kubectl("delete", "pod", scene.pod.name, f"--namespace={scene.run.namespace}", "--wait=false")


def _suspend(scene: Scene) -> None:
    _set_suspended(scene, True)
    wait_until("the pods of the suspended job to go", lambda: not scene.run.look().pods, timeout_s=_PODS_GONE_S)
    _set_suspended(scene, False)


def _set_suspended(scene: Scene, suspended: bool) -> None:
    scene.cluster.kubectl(
        *("patch", f"{scene.run.form.resource}/{scene.run.name}", f"--namespace={scene.run.namespace}"),
        *("--type=merge", "--patch", json.dumps({"spec": {"suspend": suspended}})),
    )


def _terminate(scene: Scene) -> None:
    machine.trainer_process(scene.run, scene.pod.name).terminate()


def _preempt_by_metadata(scene: Scene) -> None:
    server = scene.metadata[scene.pod.node]
    server.set("instance/preempted", "TRUE")
    try:
        scene.saved()
    finally:
        server.set("instance/preempted", "FALSE")  # the machine that comes in its place


def _kill_operator(scene: Scene) -> None:
    operator.restart_abruptly(scene.cluster)
    _taint_ahead(scene)


def _mend_operator(scene: Scene) -> None:
    _untaint_ahead(scene)
    operator.ready(scene.cluster)


def _restart_api_server(scene: Scene) -> None:
    machine.restart_api_server(scene.cluster, down_s=_DOWN_S)
    _taint_ahead(scene)


def _kill_node(scene: Scene) -> None:
    scene.cluster.lose_node(scene.pod.node, delete_object=True)


def _bring_node(scene: Scene) -> None:
    scene.cluster.restore_node(scene.pod.node, timeout_s=120)
    operator.ready(scene.cluster)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("taint", _taint, _untaint),
        Kind("drain", _drain, _uncordon),
        Kind("delete", _delete),
        Kind("suspend", _suspend),
        Kind("sigterm", _terminate, recorded=False),
        Kind("metadata", _preempt_by_metadata, recorded=False),
        Kind("operator-killed", _kill_operator, _mend_operator),
        Kind("api-server-restarted", _restart_api_server, _untaint_ahead),
        Kind("node-killed", _kill_node, _bring_node, notice=False),
    )
}
