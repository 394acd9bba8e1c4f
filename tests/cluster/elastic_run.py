"""A run whose size may change: it trains on records of which each must be used once (``tests.elastic_training``)."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from demo import install
from demo.forms import JOB, Form
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from tests import elastic_training
from tests.cluster.conftest import MARK, NAMESPACE, training_run
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

POLICY = "elastic"
#: Enough to change the size twice on the way. There are records for 200.
STEPS, PACE_S = 190, 0.2
_FILE = re.compile(r"(\d+)\.process-(\d+)-of-(\d+)\.jsonl")


@dataclasses.dataclass(frozen=True)
class Start:
    """What one process has told since it started.

    Attributes:
        began_ns: When it started.
        process: Its index.
        processes: How many processes there were.
        told: The words and values of ``elastic_training.train``, in order.
    """

    began_ns: int
    process: int
    processes: int
    told: tuple[tuple[str, Any], ...]

    def values(self, word: str) -> list[Any]:
        return [value for said, value in self.told if said == word]

    @property
    def step(self) -> int:
        """The last step for which it has taken records. 0 before the first."""
        return max((step for step, _ in self.values("took")), default=0)


def elastic_run(cluster: Cluster, images: install.Images, name: str, form: Form = JOB) -> TrainingRun:
    """A run under a policy that allows any size; not started. Start it with ``training_elastically``."""

    def any_size(spec: Json) -> None:
        spec.setdefault("training", {})["minProcesses"] = 1

    apply_policy(cluster, POLICY, namespace=NAMESPACE, change=any_size)
    return training_run(cluster, images, name, POLICY, steps=STEPS, pace=PACE_S, form=form)


def training_elastically(
    run: TrainingRun, change: Callable[[Json], None] = lambda workload: None
) -> Callable[[Json], None]:
    """Lets a workload train ``elastic_training`` in the place of the example. ``change`` may change it further."""
    tools = run.cluster.shared_dir / f"elastic-{MARK}"
    tools.mkdir(mode=0o755, exist_ok=True)
    script = Path(str(elastic_training.__file__))
    shutil.copy(script, tools)

    def changed(workload: Json) -> None:
        pod = run.form.pod_template([workload])["spec"]
        pod["containers"][0]["command"] = ["python", "-u", f"/shared/{tools.name}/{script.name}"]
        change(workload)

    return changed


def resize(run: TrainingRun, processes: int) -> None:
    """Gives a suspended workload another size, as a person does."""
    patch: Any
    if run.form.kind == "Job":
        kind, patch = "merge", {"spec": {"parallelism": processes, "completions": processes}}
    else:
        path = "/spec/replicatedJobs/0/template/spec/parallelism"
        kind, patch = "json", [{"op": "replace", "path": path, "value": processes}]
    _patch(run, kind, patch)


def suspend(run: TrainingRun, value: bool) -> None:
    """Suspends a workload, or lets it go on."""
    _patch(run, "merge", {"spec": {"suspend": value}})


def _patch(run: TrainingRun, kind: str, patch: Any) -> None:
    resource = f"{run.form.created}/{run.name}"
    run.cluster.kubectl(
        *("patch", resource, f"--namespace={run.namespace}", f"--type={kind}", "--patch", json.dumps(patch))
    )


def starts(run: TrainingRun) -> list[Start]:
    """All processes that have started, in that order."""
    found = []
    for path in sorted(run.output.glob("*.jsonl")):
        match = _FILE.fullmatch(path.name)
        assert match is not None, f"expected a name like 17.process-0-of-2.jsonl, found {path.name}"
        told = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        began_ns, process, processes = map(int, match.groups())
        found.append(Start(began_ns, process, processes, tuple((word, value) for word, value in told)))
    return found


def wait_for_size(run: TrainingRun, processes: int, step: int) -> None:
    """Waits until a start with so many processes has taken the records of this step in all of them."""

    def there() -> bool:
        present = {start.process for start in starts(run) if start.processes == processes and start.step >= step}
        return len(present) == processes

    def found() -> str:
        reached = [f"{start.process} of {start.processes} at step {start.step}" for start in starts(run)]
        return f"; started: {', '.join(reached) or 'none'}; {run.look().describe()}"

    what = f"{processes} processes of {run.name} to train step {step}"
    wait_until(what, there, timeout_s=240, every_s=0.2, hint=found)


def sizes(run: TrainingRun) -> list[int]:
    """The numbers of processes with which it has trained, in order."""
    counts = [start.processes for start in starts(run) if start.process == 0 and start.step]
    return [count for before, count in zip([0, *counts], counts, strict=False) if count != before]


def used_once(run: TrainingRun) -> None:
    """Asserts that each record of the run was used once, and that the arrays have the bits that follow from it."""
    expected = Counter(elastic_training.order()[: run.steps * elastic_training.GLOBAL_BATCH].tolist())
    found = starts(run)
    assert Counter(record for start in found for _, records in start.values("took") for record in records) == expected
    last = [start for start in found if start.values("bits")]
    assert len(last) == last[0].processes, "not all processes came to the end"
    for start in last:
        ((floats, counts),) = start.values("bits")
        bits = elastic_training.floats_at(run.steps).view(np.uint32)
        assert np.array_equal(np.asarray(floats, np.uint32), bits)
        assert Counter({record: count for record, count in enumerate(counts) if count}) == expected
