"""A JobSet of two processes on nodes of its own: how it fails, what is counted, and what the operator says of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from gracepoint.wire import names
from tests.restart_budget.control_plane import ControlPlane, Json, Refused, is_ended, now, path_of

#: Within so many seconds the operator must name a failure.
NAMED_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.25
_RUNS_WITHIN_S = 120.0
_GRACE_S = 5
_CPU = "600m"  # so that a node has room for one
_SIZE = 2


class NotReached(Exception):
    """What a gang should reach was not reached in time."""


@dataclasses.dataclass(frozen=True)
class Account:
    """What JobSet's controller has counted.

    Attributes:
        restarts: All restarts.
        counted: Those that count towards maxRestarts.
        end: How the JobSet ended: Completed or Failed. Empty while it goes on.
    """

    restarts: int
    counted: int
    end: str


class Gang:
    """A gang in a namespace of that name, on two nodes of that name.

    Args:
        plane: The control plane.
        name: Of the namespace.
        max_restarts: What the user writes. None: nothing.
        rules: What the user writes into the failure policy, if there is one.
    """

    def __init__(
        self, plane: ControlPlane, name: str, max_restarts: int | None = None, rules: Sequence[Json] = ()
    ) -> None:
        self.plane = plane
        self.api = plane.api
        self.name = name
        self.nodes = [f"{name}-{index}" for index in range(_SIZE)]
        self.max_restarts = max_restarts
        self.rules = list(rules)
        self.jobset = "train"
        self._made = 0
        self._refusal = ""

    def prepare(self) -> None:
        """Its namespace, policy and nodes."""
        self.api.create("/api/v1/namespaces", {"metadata": {"name": self.name}})
        policy = {
            "apiVersion": f"{names.GROUP}/{names.API_VERSION}",
            "kind": "CheckpointPolicy",
            "metadata": {"name": "careful"},
            # Nobody saves here, for whom an eviction could wait.
            "spec": {"checkpoint": {"directory": "/checkpoints/{jobset}"}, "evictionHold": {"enabled": False}},
        }
        self.api.create(self._ours("checkpointpolicies"), policy)
        for node in self.nodes:
            self.add_node(node)

    def add_node(self, node: str) -> None:
        self.plane.add_node(node, gang=self.name)

    def create(self) -> None:
        """The JobSet, and anew after one that has ended."""
        if self._made:
            self.api.delete(f"{self._jobsets}/{self.jobset}")
        self._made += 1
        self.jobset = f"train-{self._made}"
        # The webhooks may not know the policy yet.
        self._until(self._is_accepted, "the JobSet to be accepted", _RUNS_WITHIN_S, lambda: self._refusal)
        self.wait_to_run(0)

    def _is_accepted(self) -> bool:
        container = {"name": "train", "image": "train", "resources": {"requests": {"cpu": _CPU}}}
        grace = {"terminationGracePeriodSeconds": _GRACE_S}
        pod = {**grace, "restartPolicy": "Never", "nodeSelector": {"gang": self.name}, "containers": [container]}
        job = {"parallelism": _SIZE, "completions": _SIZE, "template": {"spec": pod}}
        spec: Json = {"replicatedJobs": [{"name": "workers", "template": {"spec": job}}]}
        if self.max_restarts is not None:
            spec["failurePolicy"] = {"maxRestarts": self.max_restarts, "rules": self.rules}
        body = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.jobset, "labels": {names.LABEL_POLICY: "careful"}},
            "spec": spec,
        }
        try:
            self.api.create(self._jobsets, body)
        except Refused as refused:
            self._refusal = str(refused)
            return False
        return True

    def suspend(self, suspended: bool) -> None:
        """As Kueue does."""
        self.api.merge(f"{self._jobsets}/{self.jobset}", {"spec": {"suspend": suspended}})

    def account(self) -> Account:
        status = self.api.get(f"{self._jobsets}/{self.jobset}").get("status") or {}
        return Account(
            int(status.get("restarts") or 0),
            int(status.get("restartsCountTowardsMax") or 0),
            str(status.get("terminalState") or ""),
        )

    def pods(self, attempt: int | None = None) -> list[Json]:
        """Its pods by their index, those that have ended before others; of one attempt, or of all."""
        of_gang = [
            pod
            for pod in self.api.get(f"/api/v1/namespaces/{self.name}/pods").get("items") or []
            if pod["metadata"].get("labels", {}).get(names.JOBSET_LABEL_NAME) == self.jobset
            and attempt in (None, int(pod["metadata"]["labels"][names.JOBSET_LABEL_RESTART_ATTEMPT]))
        ]
        return sorted(of_gang, key=lambda pod: (_index(pod), pod["status"].get("phase") in ("Pending", "Running")))

    def running(self) -> list[Json]:
        """The pods of the current attempt that run."""
        pods = self.pods(self.account().restarts)
        return [pod for pod in pods if pod["status"].get("phase") == "Running" and not _is_deleted(pod)]

    def wait_to_run(self, restarts: int) -> None:
        """Waits until it runs as a whole, after at least so many restarts, or has ended.

        Raises:
            NotReached: It did neither in time.
        """

        def runs() -> bool:
            account = self.account()
            return bool(account.end) or (account.restarts >= restarts and len(self.running()) == _SIZE)

        self._until(runs, "the gang to run", _RUNS_WITHIN_S, self._state)

    def wait_to_end(self) -> None:
        """Waits until the JobSet has ended.

        Raises:
            NotReached: It did not in time.
        """
        self._until(lambda: bool(self.account().end), "the JobSet to end", _RUNS_WITHIN_S, self._state)

    def exit(
        self,
        code: int,
        why: str = "Error",
        *,
        conditions: Sequence[Json] = (),
        status: Json | None = None,
        of: Json | None = None,
    ) -> None:
        """The containers of a pod, by default of the first process that runs, end with a code; see ``is_ended``.

        Its Job fails for that, and takes the other process along.
        """
        pod = of or self.running()[0]
        self.api.set_status(path_of(pod), is_ended(pod, code, why, conditions=conditions, status=status))

    def leave(self) -> None:
        """Ends as after a save: the JobSet restarts it without counting."""
        self.exit(names.DEFAULT_SAVED_EXIT_CODE)

    def disrupt(self, mark: str, about: str, **status: str) -> None:
        """The first pod is failed and marked as disrupted, as the kubelet or a controller does."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": mark, "message": about}
        self.exit(137, conditions=[{**condition, "lastTransitionTime": now()}], status={**status})

    def event(self, pod: Json, reason: str, message: str) -> None:
        """A kubelet's Event on a pod."""
        meta = pod["metadata"]
        regarding = {"apiVersion": "v1", "kind": "Pod", "fieldPath": ""}
        regarding |= {name: meta[name] for name in ("name", "namespace", "uid")}
        body = {
            "metadata": {"name": f"{meta['name']}.{time.monotonic_ns():x}", "namespace": meta["namespace"]},
            "involvedObject": regarding,
            "reason": reason,
            "message": message,
            "type": "Warning",
            "source": {"component": "kubelet", "host": pod["spec"]["nodeName"]},
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
        }
        self.api.create(f"/api/v1/namespaces/{meta['namespace']}/events", body)

    def said(self) -> dict[tuple[str, str], str]:
        """All that the operator says of it, by where it says it and when: Events, conditions and Preemptions."""
        told: dict[tuple[str, str], str] = {}
        for event in self.api.items(f"/apis/events.k8s.io/v1/namespaces/{self.name}/events"):
            if str(event.get("reportingController", "")).startswith("gracepoint"):
                at = str((event.get("series") or {}).get("lastObservedTime") or event.get("eventTime"))
                told[f"Event {event['metadata']['name']}", at] = f"{event.get('reason')}: {event.get('note')}"
        for plural in ("checkpointpolicies", "preemptions"):
            for body in self.api.items(self._ours(plural)):
                where = f"{plural}/{body['metadata']['name']}"
                for condition in body.get("status", {}).get("conditions") or []:
                    text = f"{condition['type']}={condition['status']} {condition['reason']}: {condition['message']}"
                    told[f"{where} {text}", str(condition["lastTransitionTime"])] = text
                if plural == "preemptions":
                    spec = body["spec"]
                    told[where, ""] = f"{spec['cause']}: {spec['signal']} {' '.join(spec.get('pods') or [])}"
        return told

    def _state(self) -> str:
        pods = [
            f"{pod['metadata']['name']} on {pod['spec'].get('nodeName', 'no node')}: {pod['status'].get('phase')}"
            f"{' deleted' if _is_deleted(pod) else ''}"
            for pod in self.pods()
        ]
        return f"{self.account()}, pods: {'; '.join(pods) or 'none'}"

    def _until(
        self, holds: Callable[[], bool], what: str, within_s: float, found: Callable[[], str] = lambda: ""
    ) -> None:
        give_up_at = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > give_up_at:
                raise NotReached(f"waited {within_s:.0f} s for {what}; found {found()}")
            time.sleep(_LOOK_EVERY_S)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Waits for something that follows within seconds where the machine has nothing else to do.

        Raises:
            NotReached: It did not.
        """
        self._until(holds, what, _RUNS_WITHIN_S, self._state)

    @property
    def _jobsets(self) -> str:
        return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{self.name}/jobsets"

    def _ours(self, plural: str) -> str:
        return f"/apis/{names.GROUP}/{names.API_VERSION}/namespaces/{self.name}/{plural}"


def _index(pod: Json) -> int:
    return int(pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index", 0))


def _is_deleted(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]
