"""What is asked of a gang that trains, by requests and by marks on its nodes, and what its Preemptions say of it."""

from __future__ import annotations

import json
import time

from demo.forms import JOBSET
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from gracepoint.wire.names import API_VERSION, GROUP
from tests.cluster.conftest import MARK
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

MAINTENANCE = "cloud.google.com/scheduled-maintenance-time"
RESOURCE = f"preemptions.{GROUP}"
REQUESTS = f"preemptionrequests.{GROUP}"


def request(run: TrainingRun, name: str, **spec: object) -> Json:
    """A request about a run; not created."""
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": "PreemptionRequest",
        "metadata": {"name": f"{name}-{MARK}", "namespace": run.namespace},
        "spec": {"jobSet": _reference(run), **spec},
    }


def _reference(run: TrainingRun) -> Json:
    kind = run.form.kind
    return {"name": run.name} if kind == JOBSET.kind else {"name": run.name, "kind": kind}


def ask(run: TrainingRun, name: str, **spec: object) -> str:
    """Creates a request; returns its name. A replica that is just ending does not answer the webhook.

    Raises:
        ClusterError: The API server refused it.
    """
    body = request(run, name, **spec)
    refusals: list[str] = []

    def answered() -> bool:
        done = run.cluster.kubectl("create", "-f", "-", stdin=json.dumps(body), check=False)
        refusals[:] = [done.stderr] if done.returncode else []
        return not any("failed calling webhook" in refusal for refusal in refusals)

    wait_until(f"request {name} to be answered", answered, timeout_s=30, every_s=0.5, hint=lambda: str(refusals))
    if refusals:
        raise ClusterError(f"request {name} was refused: {refusals[0]}")
    return str(body["metadata"]["name"])


def answer(run: TrainingRun, name: str, phase: str) -> Json:
    """Waits until the operator says that of a request; returns its status."""
    found: Json = {}

    def said() -> bool:
        done = run.cluster.kubectl("get", f"{REQUESTS}/{name}", f"--namespace={run.namespace}", "--output=json")
        found.update(json.loads(done.stdout).get("status", {}))
        return found.get("phase") == phase

    wait_until(f"request {name} to be {phase}", said, timeout_s=60, every_s=0.5, hint=lambda: str(found))
    return found


def names(run: TrainingRun) -> set[str]:
    """Of the Preemptions that there are now."""
    return {item["metadata"]["name"] for item in run.look().preemptions}


def fresh(run: TrainingRun, known: set[str]) -> Json:
    """Waits for the one Preemption that is not known yet; returns it."""
    found: list[Json] = []

    def there() -> bool:
        found[:] = [item for item in run.look().preemptions if item["metadata"]["name"] not in known]
        return bool(found)

    wait_until(f"a Preemption of {run.name}", there, timeout_s=60, every_s=0.5)
    assert len(found) == 1, [item["spec"] for item in found]
    return found[0]


def ended(run: TrainingRun, name: str, phase: Phase) -> Json:
    """Waits until a Preemption has ended so; returns it."""
    found: list[Json] = []

    def over() -> bool:
        found[:] = [item for item in run.look().preemptions if item["metadata"]["name"] == name]
        at = found[0].get("status", {}).get("phase") if found else None
        return at is not None and Phase(at).ended

    wait_until(f"{name} to end", over, timeout_s=90, every_s=0.5, hint=lambda: str(found))
    assert found[0]["status"]["phase"] == phase, found[0]["status"]
    return found[0]


def newest_step(run: TrainingRun) -> int:
    """The step that was recorded last, of which there is one."""
    newest = run.newest()
    assert newest is not None
    return newest.step


def schedule(cluster: Cluster, in_s: float, *nodes: str) -> None:
    """Announces a maintenance of these nodes, or of all."""
    value = f"{MAINTENANCE}={time.time() + in_s:.0f}"
    cluster.kubectl("label", "nodes", *(nodes or ("--all",)), "--overwrite", value)


def call_off(cluster: Cluster) -> None:
    """Takes every announced maintenance back."""
    cluster.kubectl("label", "nodes", "--all", f"{MAINTENANCE}-")
