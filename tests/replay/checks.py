"""What must not be left after a replayed job: objects, files, processes, memory of the operator."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from demo.install import OPERATOR_NAMESPACE
from demo.training import TrainingRun
from gracepoint.checkpoint.format.layout import MANIFEST, Claim, is_claim
from gracepoint.checkpoint.steps.object_steps import FREE_S
from gracepoint.checkpoint.steps.retention import OVERTAKEN_KEPT_S
from gracepoint.wire.names import GROUP, Env
from tests import leftovers
from tests.testcluster.api import Cluster

#: What a checkpoint directory has beside the steps when its job has ended.
_KEPT_BESIDE = frozenset({".gracepoint-throughput", ".gracepoint-lease"})
#: In the name of the folder of a save that is not complete.
_UNFINISHED = ".gracepoint-tmp."
#: By how many bytes a replica of the operator may grow, whatever the number of faults.
GROWTH_BYTES = 24 * 2**20


def complete_steps(folder: Path) -> list[int]:
    """Returns the steps that are complete in a folder of checkpoints, oldest first.

    In the folder of a bucket, a step's own folder is there before its manifest, or with a claim in the place of that.
    """
    return [step for step, path in _steps(folder).items() if _is_complete(path)]


def files(folder: Path, keep_last: int) -> list[str]:
    """Returns what is left of a finished run in its folder of checkpoints that must not be there, and what is missing.

    A save that a disruption cut off may be there for as long as a start leaves it alone: in a folder of its own, and in
    a bucket also in that of its step. So may a step of a bucket whose deletion was cut off.
    """
    steps, complete = _steps(folder), complete_steps(folder)
    deleted = _in_deletion(steps, complete)
    kept = {*_KEPT_BESIDE, *deleted.values()}
    found = [f"file {key}" for key in leftovers.beside_the_steps(folder) if not _is_kept(folder, key, kept)]
    if not complete:
        found.append("no complete checkpoint")
    if len(complete) > keep_last:
        found.append(f"{len(complete)} checkpoints, expected at most {keep_last}: steps {complete}")
    cut = {int(path.name.partition(".")[0]) for path in folder.glob(f"*{_UNFINISHED}*")}
    for step in sorted(steps.keys() - {*complete, *cut, *deleted}):
        # Of an empty folder, which a store's server may leave, a store knows nothing.
        if any(path.is_file() for path in steps[step].rglob("*")):
            found.append(f"step {step}, which is not complete, and of no save that was cut off")
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


def taints(cluster: Cluster, among: Collection[str]) -> list[str]:
    """Returns the taints and cordons that these nodes have, in words."""
    nodes = json.loads(cluster.kubectl("get", "nodes", "--output=json").stdout)["items"]
    return [
        f"taint {taint['key']} of {node['metadata']['name']}"
        for node in nodes
        if node["metadata"]["name"] in among
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


def _steps(folder: Path) -> dict[int, Path]:
    """The folders of steps, oldest first. None if there is no folder: a bucket's has to have something in it."""
    try:
        named = [path for path in folder.iterdir() if path.name.isdigit()]
    except FileNotFoundError:
        return {}
    return {int(path.name): path for path in sorted(named, key=lambda path: int(path.name))}


def _is_complete(step: Path) -> bool:
    try:
        return not is_claim((step / MANIFEST).read_bytes())
    except FileNotFoundError:
        return False


def _in_deletion(steps: Mapping[int, Path], complete: Collection[int]) -> dict[int, str]:
    """The steps of a bucket that a process has begun to delete, with their trash, if none may have gone on with it.

    Another process goes on some minutes later, when it saves or starts.
    """
    saved_s = max((steps[step] / MANIFEST).stat().st_mtime for step in complete) if complete else math.inf
    found = {}
    for step, path in steps.items():
        with contextlib.suppress(FileNotFoundError):
            data = (path / MANIFEST).read_bytes()
            claim = Claim.from_bytes(data, str(path)) if is_claim(data) else None
            if claim is not None and claim.trash and saved_s - claim.swept_ns / 1e9 < FREE_S:
                found[step] = claim.trash
    return found


def _is_kept(folder: Path, key: str, kept: Collection[str]) -> bool:
    name = key.partition("/")[0]
    return name in kept or (_UNFINISHED in name and _age_s(folder / name) < OVERTAKEN_KEPT_S)


def _age_s(folder: Path) -> float:
    """For how long nothing in a folder has changed, in seconds."""
    return time.time() - max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
