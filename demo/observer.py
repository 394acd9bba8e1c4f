"""Looks at a training run again and again, and says what has changed since. Starts no thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from demo.logs import PodLogs
from demo.narrator import Narrator
from demo.snapshot import Json, Snapshot
from demo.training import TrainingRun
from gracepoint_cli.timeline import STAGES
from tests.testcluster.api import ClusterError

_LOOK_EVERY_S = 0.5
_PROGRESS_EVERY_S = 3.0


class Observer:
    """What a person sees of one run: its progress, its pods and its preemptions, as they come.

    Args:
        run: The run.
        say: Where news go.
        logs: Follows every trainer that runs.
        look_every_s: Seconds between two looks.
    """

    def __init__(self, run: TrainingRun, say: Narrator, logs: PodLogs, *, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._look_every_s = look_every_s
        self._run = run
        self._say = say
        self._logs = logs
        self._pods: dict[str, str] = {}
        self._phases: dict[str, str] = {}
        self._stages: set[tuple[str, str]] = set()
        self._progress_said_s = 0.0
        self._said_step = 0

    def look(self) -> Snapshot:
        """Looks once, says the news, and returns what was seen."""
        snapshot = self._run.look()
        self._say_pods(snapshot)
        for preemption in snapshot.preemptions:
            self._say_preemption(preemption)
        self._say_progress()
        return snapshot

    def watch(
        self, what: str, until: Callable[[Snapshot], bool], *, timeout_s: float, may_end: bool = False
    ) -> Snapshot:
        """Looks until ``until`` is true of what is seen.

        Args:
            what: What is waited for, for the message.
            until: The condition.
            timeout_s: How long.
            may_end: Whether it may still become true after the JobSet has ended.

        Raises:
            ClusterError: The limit was reached, or the JobSet has ended.
        """
        gives_up = time.monotonic() + timeout_s
        while True:
            snapshot = self.look()
            if until(snapshot):
                return snapshot
            if snapshot.end and not may_end:
                raise ClusterError(f"waited for {what}, but the job is over: {snapshot.describe()}")
            if time.monotonic() > gives_up:
                raise ClusterError(f"waited {timeout_s:.0f} s for {what}: {snapshot.describe()}")
            time.sleep(self._look_every_s)

    @property
    def step(self) -> int:
        """The step that was recorded last; 0 before the first."""
        newest = self._run.newest()
        return newest.step if newest else 0

    def _say_pods(self, snapshot: Snapshot) -> None:
        for pod in snapshot.pods:
            state = pod.phase if pod.exit_code is None else f"left with exit code {pod.exit_code}"
            if pod.phase != "Pending":
                self._logs.follow(self._run.namespace, pod.name)
            if self._pods.get(pod.name) != state:
                self._pods[pod.name] = state
                where = f" on {pod.node}" if pod.node else ""
                self._say(f"trainer {pod.process}, attempt {pod.attempt}{where}: {state}")

    def _say_preemption(self, preemption: Json) -> None:
        name, status = preemption["metadata"]["name"], preemption.get("status", {})
        for timing in sorted(status.get("timings", []), key=lambda timing: float(timing["seconds"])):
            stage = timing["stage"]
            if (name, stage) not in self._stages:
                self._stages.add((name, stage))
                self._say(f"Preemption {name}: {STAGES.get(stage, stage)} at +{timing['seconds']:.3f} s")
        phase = status.get("phase", "Noticed")
        if self._phases.get(name) != phase:
            self._phases[name] = phase
            self._say(f"Preemption {name} is {phase}: {status.get('message', 'new')}")

    def _say_progress(self) -> None:
        newest = self._run.newest()
        due = self._say.elapsed_s - self._progress_said_s >= _PROGRESS_EVERY_S
        if newest is not None and newest.step != self._said_step and due:
            self._progress_said_s, self._said_step = self._say.elapsed_s, newest.step
            loss = float.fromhex(newest.loss)
            self._say(f"{self._run.name}: step {newest.step} of {self._run.steps}, loss {loss:.3f}")
