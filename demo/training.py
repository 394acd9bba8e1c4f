"""A training job on a cluster: the example's JobSet or Job, started, watched and compared.

The manifests are the ones that users are given (``examples/*.yaml``); here only the image, the names and the
storage are set. Starts no thread; every wait has a limit and says at it what the job looked like.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from demo import records
from demo.forms import JOBSET, Form
from demo.snapshot import PROCESSES, Json, Pod, Snapshot
from gracepoint.wire import names
from gracepoint.wire.messages import Phase
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

EXAMPLES = Path(__file__).parents[1] / "examples"
_MOUNT = "/shared"
#: A look is a process that asks the API server: not for nothing, where it shares the processors with what it looks at.
_LOOK_EVERY_S = 1.0
_END_EVERY_S = 5.0
#: What trainers have recorded is read from files.
_READ_EVERY_S = 0.2


def apply_policy(
    cluster: Cluster,
    name: str = "transformer",
    *,
    namespace: str,
    change: Callable[[Json], None] = lambda spec: None,
) -> None:
    """Applies the example's CheckpointPolicy and waits until the operator calls it Ready.

    Args:
        cluster: Where.
        name: The policy's name.
        namespace: The policy's namespace, which exists.
        change: May change the spec in place.
    """
    policy = yaml.safe_load((EXAMPLES / "policy.yaml").read_text())
    policy["metadata"] |= {"name": name, "namespace": namespace}
    change(policy["spec"])
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(policy))
    resource = f"checkpointpolicies.{names.GROUP}/{name}"
    cluster.kubectl(
        "wait", resource, f"--namespace={namespace}", "--for=condition=Ready", "--timeout=60s", timeout_s=70
    )


class TrainingRun:
    """One JobSet or Job that trains the example's transformer with two processes.

    Args:
        cluster: Where it runs.
        name: The workload's name; new in its namespace, as checkpoints and records lie under it.
        namespace: Its namespace, which exists.
        image: The training image.
        steps: Steps to train.
        policy: Name of the CheckpointPolicy; None leaves the label away.
        flags: Further flags of ``examples/transformer/train.py``, such as ``{"width": 256}``.
        environment: Variables of the trainers beside the example's.
        form: The kind of workload that is created.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        namespace: str,
        image: str,
        steps: int,
        policy: str | None = "transformer",
        flags: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        form: Form = JOBSET,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.namespace = namespace
        self.steps = steps
        self.form = form
        self._image = image
        self._policy = policy
        self._flags = dict(flags or {})
        self._environment = dict(environment or {})

    @property
    def output(self) -> Path:
        """Folder of the run's records, on this machine."""
        return self.cluster.shared_dir / "output" / self.namespace / self.name

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints, on this machine."""
        return self.cluster.shared_dir / "checkpoints" / self.namespace / self.name

    def manifest(self) -> Json:
        """Returns the workload: the example's with this run's names, image, flags, environment and storage."""
        return self._manifests()[-1]

    def _manifests(self) -> list[Json]:
        """Returns what is created, the workload last."""
        items: list[Json] = list(yaml.safe_load_all((EXAMPLES / self.form.example).read_text()))
        labels = {names.LABEL_POLICY: self._policy} if self._policy else {}
        for other in items[:-1]:
            other["metadata"] = {"name": self.name, "namespace": self.namespace}
            if "selector" in other["spec"]:  # a Service
                other["spec"]["selector"] = {self.form.name_label: self.name}
        workload = items[-1]
        if "runtimeRef" in workload["spec"]:
            workload["spec"]["runtimeRef"]["name"] = self.name
        workload["metadata"] = {"name": self.name, "namespace": self.namespace, "labels": labels}
        pod = self.form.pod_template(items)["spec"]
        if "subdomain" in pod:
            pod["subdomain"] = self.name
        spread = pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]
        spread[self.form.name_label] = self.name
        container = pod["containers"][0]
        container["image"] = self._image
        flags = {
            "output": f"{_MOUNT}/output/{self.namespace}/{self.name}",
            "steps": self.steps,
            **self._flags,
        }
        container["args"] = [f"--{flag}={value}" for flag, value in flags.items()]
        container["env"] += [{"name": name, "value": value} for name, value in self._environment.items()]
        # One host plays all machines, so that its folder is the storage they share.
        host_path = {"path": str(self.cluster.shared_dir), "type": "Directory"}
        pod["volumes"] = [{"name": "shared", "hostPath": host_path}]
        return items

    def start(
        self,
        change: Callable[[Json], None] = lambda workload: None,
        template: Callable[[Json], None] = lambda template: None,
    ) -> None:
        """Creates the workload.

        Args:
            change: May change it in place before.
            template: The same for the template of its pods, which may be in another object.

        Raises:
            ClusterError: A run of this name was here before, or the API server refused the workload.
        """
        for folder in (self.output, self.checkpoints):
            if folder.exists():
                raise ClusterError(f"{folder} exists: a run named {self.name} was here before; choose another name")
        for folder in (self.output, self.checkpoints):
            folder.mkdir(parents=True)
            for each in (folder, folder.parent, folder.parent.parent):
                os.chmod(each, 0o777)  # trainers are not root
        items = self._manifests()
        change(items[-1])
        template(self.form.pod_template(items))
        for item in items:
            self.cluster.kubectl("create", "-f", "-", stdin=json.dumps(item))

    def delete(self) -> None:
        """Deletes the workload, if it is there, and waits until it and its pods are gone."""
        resources = [f"{self.form.created}/{self.name}", f"services/{self.name}"]
        self.cluster.kubectl("delete", *resources, f"--namespace={self.namespace}", "--ignore-not-found", timeout_s=90)
        self._wait(f"the pods of {self.name} to go", lambda: not self.look().pods, timeout_s=90, may_end=True)

    def look(self) -> Snapshot:
        """Asks the API server once for all that belongs to the run."""
        unix_s = time.time()
        kinds = (self.form.resource, "pods", f"preemptions.{names.GROUP}")
        items = self.cluster.listed(*kinds, namespace=self.namespace)
        return Snapshot.of(items, self.name, unix_s=unix_s, form=self.form)

    def newest(self) -> records.Step | None:
        """The step that was recorded last."""
        return records.newest(self.output)

    def wait_for_step(self, step: int, *, timeout_s: float = 240) -> None:
        """Waits until the newest recorded step is at least ``step``."""

        def reached() -> bool:
            newest = self.newest()
            return newest is not None and newest.step >= step

        self._wait(f"step {step} of {self.name}", reached, timeout_s=timeout_s, every_s=_READ_EVERY_S)

    def wait_for_pods(self) -> tuple[Pod, ...]:
        """Waits until every pod of the newest attempt is seen running; returns them by process."""
        found: tuple[Pod, ...] = ()

        def running() -> bool:
            nonlocal found
            found = self.look().running()
            return bool(found)

        self._wait(f"all pods of {self.name} to run", running, timeout_s=90)
        return found

    def wait_for_trainers(self, step: int) -> tuple[Pod, ...]:
        """Waits until the newest recorded step is at least ``step``; returns the pods that train, by process."""
        self.wait_for_step(step)
        return self.wait_for_pods()

    def wait_for_record(self, what: str, holds: Callable[[Json], bool], *, timeout_s: float = 150) -> Json:
        """Waits until ``holds`` is true of the newest Preemption's status; returns the Preemption.

        What is known of a preemption reaches its record from several sides, each at most once a second.
        """
        found: list[Json] = []

        def recorded() -> bool:
            found[:] = self.look().preemptions[-1:]
            return bool(found) and holds(found[0].get("status", {}))

        hint = f"the newest Preemption of {self.name} to say {what}"
        self._wait(hint, recorded, timeout_s=timeout_s, may_end=True, found=lambda: str(found))
        return found[0]

    def wait_for_phase(self, phase: Phase | None = None, *, epoch: int = -1, timeout_s: float = 60) -> Json:
        """Waits until a Preemption of this run is at a phase or past it.

        Args:
            phase: The phase; an end must be that very one. None: any end.
            epoch: Which Preemption, counted from 0; -1 is the newest.
            timeout_s: How long.

        Returns:
            The Preemption.

        Raises:
            ClusterError: It ended otherwise, or the limit was reached.
        """
        found: list[Json] = []

        def reached() -> bool:
            found[:] = self.look().preemptions[epoch : epoch + 1 or None]
            at = Phase(found[0].get("status", {}).get("phase", Phase.NOTICED)) if found else None
            if at is None or phase is None or at.ended or phase.ended:
                return at is not None and at.ended
            return at.rank >= phase.rank

        wanted = phase or "at an end"
        self._wait(f"the Preemption of {self.name} to be {wanted}", reached, timeout_s=timeout_s, may_end=True)
        status = found[0].get("status", {})
        if phase is not None and phase.ended and status["phase"] != phase:
            raise ClusterError(
                f"expected the Preemption {found[0]['metadata']['name']} to end as {phase}, "
                f"found {status['phase']}: {status.get('message', 'without a message')}"
            )
        return found[0]

    def wait_for_end(self, *, timeout_s: float = 300) -> None:
        """Waits until the workload has completed.

        Raises:
            ClusterError: It failed, or is still running at the limit.
        """
        self._wait(f"{self.name} to complete", lambda: self.look().end == "Completed", timeout_s=timeout_s)

    def compare(self, reference: TrainingRun, most: int = 5) -> records.Comparison:
        """Says whether this run did bit for bit what ``reference`` did; names ``most`` differences of a kind."""
        return records.compare(reference.output, self.output, steps=self.steps, processes=PROCESSES, most=most)

    def _wait(
        self,
        what: str,
        condition: Callable[[], bool],
        *,
        timeout_s: float,
        every_s: float = _LOOK_EVERY_S,
        may_end: bool = False,
        found: Callable[[], str] = lambda: "",
    ) -> None:
        """Like ``wait_until``, and gives up at once when the workload has ended: nothing comes any more."""
        gave_up: list[str] = []
        next_look_s = time.monotonic() + _END_EVERY_S

        def reached_or_ended() -> bool:
            nonlocal next_look_s
            if condition():
                return True
            if not may_end and time.monotonic() > next_look_s:
                next_look_s = time.monotonic() + _END_EVERY_S
                snapshot = self.look()
                if snapshot.end and not condition():
                    gave_up.append(snapshot.describe())
            return bool(gave_up)

        wait_until(what, reached_or_ended, timeout_s=timeout_s, every_s=every_s, hint=lambda: self._hint() + found())
        if gave_up:
            raise ClusterError(f"waited for {what}, but the job is over: {gave_up[0]}")

    def _hint(self) -> str:
        newest = self.newest()
        return f"\n{self.look().describe()}; newest step recorded: {newest.step if newest else 'none'}"
