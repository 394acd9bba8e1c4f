"""What only the machine under a local cluster can do: kill a trainer without a word, shut a node down, silence it."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest

from demo.training import TrainingRun
from gracepoint.wire.names import Env
from tests import limits
from tests.testcluster.api import Cluster
from tests.testcluster.local import LocalCluster
from tests.testcluster.shell import wait_until

#: What a slow API server has of a core. Without a limit, it takes 0.07 while a job trains. With 0.02, no TLS handshake
#: ends within 10 s once a job starts.
_SLOW_SHARE = 0.05
#: A label that a node has for a moment.
_SEEN = "gracepoint.test/seen"


def trainer_process(run: TrainingRun, pod: str) -> psutil.Process:
    """The process of a trainer, as this machine sees it."""
    for process in _with(run, Env.POD_NAME, pod):
        if not is_beside_a_trainer(process.cmdline()):
            return process
    pytest.skip(f"the trainers' processes are not on this machine (looked for the one of pod {pod})")


def is_beside_a_trainer(command: Sequence[str]) -> bool:
    """Whether a command is that of a process of the library's own, such as a keeper."""
    return any(word.startswith("gracepoint.") for word in command)


def processes_of(run: TrainingRun, command: str) -> list[psutil.Process]:
    """This machine's processes of the run with ``command`` in their command line."""
    found = []
    for process in _with(run, Env.JOBSET_NAME, run.name):
        with contextlib.suppress(psutil.Error):
            if command in f"{' '.join(process.cmdline())} ":
                found.append(process)
    return found


def processes_in(pod: str, command: str) -> list[psutil.Process]:
    """This machine's processes in a pod with ``command`` in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOSTNAME") == pod and command in " ".join(process.cmdline()):
                found.append(process)
    if not found:
        pytest.skip(f"the processes of pod {pod} are not on this machine")
    return found


@contextlib.contextmanager
def paused(run: TrainingRun, pod: str) -> Iterator[None]:
    """The trainer's process does nothing inside of this: it is stopped, not dead, and its connections stay open."""
    process = trainer_process(run, pod)
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def end_at_once(run: TrainingRun) -> None:
    """Deletes a run and kills its processes: one that hears no SIGTERM would use up its grace period."""
    resource = f"jobsets.jobset.x-k8s.io/{run.name}"
    run.cluster.kubectl("delete", resource, f"--namespace={run.namespace}", "--ignore-not-found", "--wait=false")
    for process in _with(run, Env.JOBSET_NAME, run.name):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def local(cluster: Cluster) -> LocalCluster:
    """The cluster, whose nodes' machines are ours."""
    if not isinstance(cluster, LocalCluster):
        pytest.skip("the machines of this cluster's nodes are not ours to shut down or to silence")
    return cluster


def restart_api_server(cluster: Cluster, *, down_s: float) -> None:
    """Kills the API server, and starts it again after so many seconds."""
    local(cluster)._control_plane.restart_api_server(down_s=down_s)


def slow_api_server(cluster: Cluster) -> contextlib.AbstractContextManager[Callable[[], float]]:
    """The API server has very little processor time inside of this, so that it takes a few times as long to answer.

    Yields what returns for how many seconds it could not run.
    """
    return limits.limited(local(cluster)._control_plane.api_server_pid(), _SLOW_SHARE)


def wait_for_scheduler(cluster: Cluster, node: str, image: str) -> None:
    """Waits until the scheduler knows the nodes as they are now.

    When an API server begins anew, it refuses all watches until it knows the rights. The scheduler's watches then wait
    for up to a minute before they try again, and until then it binds pods to nodes that have been tainted meanwhile. A
    pod that asks for a label which the node has had for a moment only shows when that is over.
    """
    mark = secrets.token_hex(4)
    container = {"name": "probe", "image": image, "imagePullPolicy": "IfNotPresent", "command": ["true"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"scheduler-{mark}", "namespace": "default"},
        "spec": {"nodeSelector": {_SEEN: mark}, "restartPolicy": "Never", "containers": [container]},
    }
    cluster.kubectl("label", "node", node, f"{_SEEN}={mark}")
    try:
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        where = ("get", "pod", f"scheduler-{mark}", "--namespace=default", "--output=jsonpath={.spec.nodeName}")
        wait_until("the scheduler to know the nodes", lambda: cluster.kubectl(*where).stdout == node, timeout_s=180)
    finally:
        cluster.kubectl("delete", "pod", f"scheduler-{mark}", "--namespace=default", "--force", "--ignore-not-found")
        cluster.kubectl("label", "node", node, f"{_SEEN}-")


def _with(run: TrainingRun, variable: str, value: str) -> Iterator[psutil.Process]:
    """This machine's processes that have the variable, of pods in the run's namespace."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get(variable) == value and environment.get(Env.NAMESPACE) == run.namespace:
                yield process
