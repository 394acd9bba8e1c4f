"""``python -m demo.tryout``: a job under Gracepoint on a cluster that stays, and the commands to try with it.

The job is the example's JobSet in the namespace that the pages use, so that their commands work as they stand. It
trains until it is removed with its cluster. Starts no thread.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from demo import install
from demo.narrator import Narrator
from demo.training import TrainingRun, apply_policy
from tests import testcluster
from tests.testcluster import Cluster, ClusterError, kind, parts, providers, system

CLUSTER = "try"
NAMESPACE = "research"
JOB = "transformer"
_NODES = 2
#: So many that it does not end while somebody tries things.
_STEPS = 1_000_000
_PACE_S = 0.2


def main() -> int:
    """Brings everything up; returns 0, 1 if something failed, or 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m demo.tryout", description="A job under Gracepoint, to try things.")
    choices = (providers.AUTO, providers.LOCAL, providers.KIND)
    parser.add_argument("--provider", choices=choices, default=providers.AUTO, help="who makes the cluster")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say = Narrator()
    try:
        cluster = _running()
        if cluster is None:
            cluster = _made(flags.provider, say)
        if not _has_job(cluster):
            begin(cluster, say)
        print("\n".join(advice(cluster)), flush=True)
    except ClusterError as error:
        say(f"stopped: {error}\nto remove what there is: {_REMOVE}")
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; to remove what there is: {_REMOVE}")
        return 130
    return 0


def begin(cluster: Cluster, say: Narrator) -> None:
    """Installs the operator, and starts the job."""
    say.chapter("Images, operator, policy")
    images = install.build_images(cluster, say)
    say("helm install of charts/gracepoint")
    install.install_operator(cluster, images.operator)
    install.make_namespace(cluster, NAMESPACE)
    apply_policy(cluster, JOB, namespace=NAMESPACE)
    say.chapter("A job of two processes")
    run = TrainingRun(
        cluster, JOB, namespace=NAMESPACE, image=images.trainer, steps=_STEPS, policy=JOB, flags={"pace": _PACE_S}
    )
    run.start()
    run.wait_for_trainers(10)
    say(f"the JobSet {JOB} in the namespace {NAMESPACE} trains, and is protected")


def advice(cluster: Cluster) -> list[str]:
    """Returns what to try, as lines to copy."""
    path = ":".join(dict.fromkeys([str(Path(sys.executable).parent), *_kubectl_folder()]))
    node = cluster.nodes[0]
    named = f"{JOB} -n {NAMESPACE}"
    return [
        "",
        "Copy these lines into your shell, one after the other:",
        "",
        f"  export KUBECONFIG={cluster.kubeconfig} PATH={path}:$PATH",
        f"  kubectl gracepoint status -n {NAMESPACE}",
        f"  kubectl gracepoint doctor {named}        # checks the installation, and the storage from a pod",
        f"  kubectl gracepoint drill {named}         # a rehearsal: the job saves, and continues",
        f"  kubectl get preemptions -n {NAMESPACE}           # its record. RESUMED is empty: it did not stop",
        f"  kubectl drain {node} --ignore-daemonsets --delete-emptydir-data   # tries again until the job has saved",
        f"  kubectl get preemptions -n {NAMESPACE}",
        f"  kubectl gracepoint timeline NAME -n {NAMESPACE}           # NAME: in the first column of these",
        f"  kubectl uncordon {node}",
        "",
        f"To remove everything, in this folder: {_REMOVE}",
    ]


_REMOVE = f"{os.path.relpath(sys.executable)} -m tests.testcluster down --name {CLUSTER}"


def _kubectl_folder() -> list[str]:
    """The folder of kubectl, where the PATH does not have one."""
    return [] if shutil.which("kubectl") else [str(parts.program("kubectl").parent)]


def _running() -> Cluster | None:
    """The cluster of an earlier call."""
    if CLUSTER in kind.names():
        return kind.KindCluster.attach(CLUSTER)
    return testcluster.attach(CLUSTER) if testcluster.running(CLUSTER) else None


def _has_job(cluster: Cluster) -> bool:
    query = ("get", f"jobsets.jobset.x-k8s.io/{JOB}", f"--namespace={NAMESPACE}")
    return cluster.kubectl(*query, check=False).returncode == 0


def _made(provider: str, say: Narrator) -> Cluster:
    say.chapter("A cluster")
    choice = providers.pick(provider)
    say(choice.text)
    if choice.provider == providers.LOCAL:
        system.install(system.missing_packages())
    return testcluster.open(nodes=_NODES, name=CLUSTER, bound=False, by=choice.provider)


if __name__ == "__main__":
    sys.exit(main())
