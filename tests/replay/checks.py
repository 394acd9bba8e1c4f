"""What must not be left after a replayed job: objects, files, processes, memory of the operator."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil

from demo.install import OPERATOR_NAMESPACE
from demo.training import TrainingRun
from gracepoint.checkpoint.steps.retention import OVERTAKEN_KEPT_S
from gracepoint.wire.names import GROUP, Env
from tests import leftovers
from tests.testcluster.api import Cluster

#: What a checkpoint directory has beside the steps when its job has ended.
_KEPT_BESIDE = frozenset({".gracepoint-throughput", ".gracepoint-lease"})
#: By how many bytes a replica of the operator may grow, whatever the number of faults.
GROWTH_BYTES = 24 * 2**20


def files(run: TrainingRun, keep_last: int) -> list[str]:
    """Returns what is left of a finished run in its folder of checkpoints that must not be there.

    A save that a disruption cut off may be there for as long as a start leaves it alone.
    """
    found = [f"file {key}" for key in leftovers.beside_the_steps(run.checkpoints) if not _kept(run, key)]
    steps = sorted(int(path.name) for path in Path(run.checkpoints).iterdir() if path.name.isdigit())
    if len(steps) > keep_last:
        found.append(f"{len(steps)} checkpoints, expected at most {keep_last}: steps {steps}")
    return found


def processes(run: TrainingRun) -> list[str]:
    """Returns the processes of a deleted run that are still there, and shared memory that they hold."""
    pids = leftovers.processes_with(Env.JOBSET_NAME, run.name)
    return [f"process {pid} of {run.name}" for pid in pids] + leftovers.shared_memory(pids)


def objects(run: TrainingRun) -> list[str]:
    """Returns the objects of a deleted run that are still there."""
    found = []
    query = ("get", "jobsets.jobset.x-k8s.io,jobs,pods,services", f"--namespace={run.namespace}", "--output=name")
    named = run.cluster.kubectl(*query).stdout.split()
    labelled = run.cluster.kubectl(*query, f"--selector={run.form.name_label}={run.name}").stdout.split()
    found += [f"object {name}" for name in {*labelled, *(each for each in named if f"/{run.name}" in each)}]
    query = ("get", f"preemptions.{GROUP}", f"--namespace={run.namespace}", "--output=json")
    for item in json.loads(run.cluster.kubectl(*query).stdout)["items"]:
        ended = any(c["type"] == "Ended" and c["status"] == "True" for c in item["status"].get("conditions", []))
        if item["spec"]["jobSet"]["name"] == run.name and not ended:
            found.append(f"Preemption {item['metadata']['name']} that has not ended")
    return sorted(found)


def taints(cluster: Cluster) -> list[str]:
    """Returns the taints and cordons that nodes have, in words."""
    nodes = json.loads(cluster.kubectl("get", "nodes", "--output=json").stdout)["items"]
    return [
        f"taint {taint['key']} of {node['metadata']['name']}"
        for node in nodes
        if node["metadata"]["name"] in cluster.nodes
        for taint in node["spec"].get("taints", [])
    ]


def operator_bytes(cluster: Cluster) -> list[int]:
    """Returns the memory of each replica of the cluster's operator on this machine, which may have other clusters."""
    query = ("get", "pods", f"--namespace={OPERATOR_NAMESPACE}", "--output=name")
    names = {name.partition("/")[2] for name in cluster.kubectl(*query).stdout.split()}
    found = []
    for process in psutil.process_iter():
        try:
            if "gracepoint_operator" in process.cmdline() and process.environ().get("POD_NAME") in names:
                found.append(process.memory_info().rss)
        except psutil.Error:
            continue
    return sorted(found)


def _kept(run: TrainingRun, key: str) -> bool:
    name = key.partition("/")[0]
    return name in _KEPT_BESIDE or (".gracepoint-tmp." in name and _age_s(run.checkpoints / name) < OVERTAKEN_KEPT_S)


def _age_s(folder: Path) -> float:
    """For how long nothing in a folder has changed, in seconds."""
    return time.time() - max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
