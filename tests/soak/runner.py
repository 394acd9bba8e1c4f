"""Goes through a soak: starts the run, disrupts it as planned, and looks at what came of it.

Everything happens in the caller's thread, apart from the pod watch and the metadata servers, which end with the soak.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from demo import install
from demo.install import Images
from demo.logs import PodLogs
from demo.snapshot import Json, Snapshot
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.messages import Phase
from tests import xla
from tests.cluster import machine, operator
from tests.metadata.servers import GceServer
from tests.soak import account, checks, report, trainer
from tests.soak.both_accounts import BothAccounts
from tests.soak.kinds import KINDS, Kind, Scene
from tests.soak.plan import Disruption
from tests.soak.pod_watch import PodWatch
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

NAMESPACE = "gracepoint-soak"
POLICY = "soak"
KEEP_LAST = 2
EVERY_STEPS = 15
#: A small model, and steps of a length that leaves time to disrupt it.
_FLAGS = {"width": 64, "layers": 1, "pace": 0.1}
_ENVIRONMENT = {"XLA_FLAGS": xla.FLAGS}
#: How long disruptions take depends on the machine, and the job trains meanwhile. So its last step is decided before
#: the last disruption: this many steps after the newest one. Until then it is one that no soak reaches.
_STEPS_TO_THE_END = 300
_STEPS_UNDECIDED = 10_000_000
_RESUMED_S = 240.0
_SAVED_S = 60.0
_RECORDED_S = 30.0
_END_S = 1800.0
_GONE_S = 60.0

_Metadata = dict[str, GceServer]


class Soak:
    """One soak on a cluster that has the operator.

    Args:
        cluster: The cluster.
        images: The images of operator and trainer.
        plan: What happens.
        seed: Of the plan, for the report.
        say: Where news go.
        logs: The folder for what helps to find out what went wrong.
    """

    def __init__(
        self,
        cluster: Cluster,
        images: Images,
        plan: Sequence[Disruption],
        *,
        seed: int,
        say: Callable[[str], None],
        logs: Path,
    ) -> None:
        self._cluster = cluster
        self._images = images
        self._plan = plan
        self._seed = seed
        self._say = say
        self._logs = PodLogs(cluster, logs)
        self._mark = time.strftime("%H%M%S")
        self._outcomes: list[report.Outcome] = []
        self._problems: list[str] = []
        self._compared: list[tuple[str, float, float]] = []

    def run(self, *, until_s: float = float("inf")) -> report.Found:
        """Runs the soak, and a run that nobody disturbs to compare with.

        Args:
            until_s: ``time.monotonic()``. The first disruption that begins later is the last one.

        Raises:
            ClusterError: The job did not come back, or did not end.
        """
        install.make_namespace(self._cluster, NAMESPACE)
        apply_policy(self._cluster, POLICY, namespace=NAMESPACE, change=_policy)
        disturbed = self._training_run("disturbed", steps=_STEPS_UNDECIDED, pace=_FLAGS["pace"])
        try:
            with self._metadata() as metadata, PodWatch(disturbed) as pods:
                disturbed.start(self._with_words(disturbed))
                accounts = BothAccounts(disturbed, POLICY, pods, self._logs.folder)
                memory: list[int] = []
                for disruption in self._plan:
                    last = disruption is self._plan[-1] or time.monotonic() > until_s
                    self._disrupt(disruption, disturbed, accounts, metadata, last=last)
                    memory = memory or checks.operator_bytes()
                    if last:
                        break
                disturbed.wait_for_end(timeout_s=_END_S)
                self._compared = accounts.finished()
            self._check_end(disturbed, memory)
            undisturbed = self._training_run("undisturbed", steps=disturbed.steps, pace=0.0)
            undisturbed.start()
            undisturbed.wait_for_end(timeout_s=_END_S)
            comparison = disturbed.compare(undisturbed)
            self._problems += [f"not as the undisturbed run: {each}" for each in comparison.differences]
        finally:
            install.save_logs(self._cluster, self._logs, NAMESPACE)
        for run in (disturbed, undisturbed):
            run.delete()
        self._problems += _remaining(lambda: checks.objects(disturbed) + checks.processes(disturbed))
        self._problems += checks.marks_on_nodes(self._cluster)
        return self.found()

    def found(self) -> report.Found:
        """Returns what was found so far."""
        problems = (*report.broken_promises(self._outcomes), *report.unlike(self._compared), *self._problems)
        return report.Found(self._seed, tuple(self._outcomes), tuple(self._compared), problems)

    def _training_run(self, name: str, *, steps: int, pace: float) -> TrainingRun:
        return TrainingRun(
            self._cluster,
            f"{name}-{self._mark}",
            namespace=NAMESPACE,
            image=self._images.trainer,
            steps=steps,
            policy=POLICY,
            flags={**_FLAGS, "pace": pace},
            environment=_ENVIRONMENT,
        )

    def _with_words(self, run: TrainingRun) -> Callable[[Json], None]:
        """Returns what lets the trainers run ``trainer.py``."""
        folder = run.cluster.shared_dir / "soak"
        folder.mkdir(exist_ok=True)
        source = Path(trainer.__file__)
        (folder / source.name).write_text(source.read_text())

        def change(jobset: Json) -> None:
            pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
            pod["containers"][0]["command"] = ["python", "-u", f"/shared/soak/{source.name}"]

        return change

    @contextlib.contextmanager
    def _metadata(self) -> Iterator[_Metadata]:
        """A metadata server for each node."""
        address = machine.local(self._cluster).record.network.host_ip
        with contextlib.ExitStack() as servers:
            found = {node: servers.enter_context(GceServer(address)) for node in self._cluster.nodes}
            folder = self._cluster.shared_dir / "soak"
            folder.mkdir(exist_ok=True)
            (folder / "metadata.json").write_text(json.dumps({node: server.url for node, server in found.items()}))
            yield found

    def _disrupt(
        self, disruption: Disruption, run: TrainingRun, accounts: BothAccounts, metadata: _Metadata, *, last: bool
    ) -> None:
        kind = KINDS[disruption.kind]
        run.wait_for_step(_newest(run) + disruption.after_steps, timeout_s=_RESUMED_S)
        targets = run.wait_for_pods()
        before = run.look()
        lives = accounts.lives()
        if last:
            run.steps = _newest(run) + _STEPS_TO_THE_END
            (run.cluster.shared_dir / "soak" / trainer.STEPS).write_text(str(run.steps))
        self._say(f"disruption {disruption.number}: {kind.name}, process {disruption.process}")
        began_s, at_step = time.time(), _newest(run)
        saved = _saved_once_more(run)
        scene = Scene(run, targets[disruption.process], metadata, saved)
        kind.act(scene)
        resumed = self._wait_for_resumption(run, kind, began_s)
        kind.mend(scene)
        after = run.look()
        accounts.note(f"{disruption.number} {kind.name}")
        lost = _lost(accounts.lives(), len(lives) - 1)
        counted = after.restarts_counted - before.restarts_counted
        outcome = report.Outcome(kind.name, kind.notice, lost, resumed - began_s, counted)
        self._outcomes.append(outcome)
        self._say(f"  at step {at_step}, {lost} steps lost, training again after {outcome.seconds:.1f} s")
        self._check_record(disruption, kind, run, before)

    def _wait_for_resumption(self, run: TrainingRun, kind: Kind, since_s: float) -> float:
        """Waits for the first step of the next start; returns when it was done."""
        begins: list[float] = []

        def trains() -> bool:
            begins[:] = [at for at in _first_steps(run) if at > since_s]
            return bool(begins)

        # A look at the API server tells if the job is over; the steps come from files.
        wait_until(
            f"{run.name} to train again after {kind.name}",
            trains,
            timeout_s=_RESUMED_S,
            hint=lambda: f"\n{run.look().describe()}",
        )
        return min(begins)

    def _check_record(self, disruption: Disruption, kind: Kind, run: TrainingRun, before: Snapshot) -> None:
        if not kind.recorded or not kind.notice:
            return
        known, what = {_name(record) for record in before.preemptions}, f"disruption {disruption.number}, {kind.name}"
        fresh: list[Json] = []

        def are_saved() -> bool:
            fresh[:] = [record for record in run.look().preemptions if _name(record) not in known]
            return bool(fresh) and all(_is_saved(record) for record in fresh)

        # The replicas of the operator may just have begun to serve again.
        with contextlib.suppress(ClusterError):
            wait_until(f"the record of {what}", are_saved, timeout_s=_RECORDED_S, every_s=1)
        if len(fresh) != 1:
            self._problems.append(f"{what}: {len(fresh)} Preemptions, expected 1")
        for record in fresh:
            if not _is_saved(record):
                status = record.get("status", {})
                self._problems.append(
                    f"{what}: Preemption {_name(record)} is {status.get('phase')} with {status.get('stepsLost')} steps "
                    f"lost: {status.get('message')}"
                )

    def _check_end(self, run: TrainingRun, memory: list[int]) -> None:
        """Looks at what the finished run has left."""
        operator.ready(self._cluster)
        self._problems += checks.files(run, KEEP_LAST)
        now = checks.operator_bytes()
        if memory and now and max(now) > max(memory) + checks.GROWTH_BYTES:
            self._problems.append(f"a replica of the operator has grown from {max(memory)} to {max(now)} bytes")
        self._say(f"memory of the operator's replicas: {memory} bytes after the first disruption, {now} in the end")


def _policy(spec: Json) -> None:
    spec["checkpoint"].update(everySteps=EVERY_STEPS, keepLast=KEEP_LAST)
    # A soak disrupts far more often than any cluster does.
    spec["exitBreaker"] = {"savedExits": 0}
    spec["cloudMetadata"] = ["GCE"]


def _name(record: Json) -> str:
    return str(record["metadata"]["name"])


def _is_saved(record: Json) -> bool:
    status = record.get("status", {})
    return bool(status.get("phase") == Phase.COMMITTED and status.get("stepsLost") == 0)


def _remaining(look: Callable[[], list[str]]) -> list[str]:
    """Returns what is left after the garbage collector had its time."""
    with contextlib.suppress(ClusterError):
        wait_until("all of it to be gone", lambda: not look(), timeout_s=_GONE_S, every_s=1)
    return look()


def _newest(run: TrainingRun) -> int:
    newest = run.newest()
    return newest.step if newest else 0


def _first_steps(run: TrainingRun) -> list[float]:
    """Returns when process 0 did the first step of each start."""
    found = []
    for path in run.output.glob("losses.process_0.attempt_*.jsonl"):
        with path.open() as file:
            line = file.readline()
        if line.endswith("\n"):
            found.append(float(json.loads(line)["unix_s"]))
    return sorted(found)


def _lost(lives: list[account.Life], number: int) -> int:
    return account.steps_lost(lives, number) if 0 <= number < len(lives) else 0


def _saved_once_more(run: TrainingRun) -> Callable[[], None]:
    """Returns what waits until the processes have said once more than now that their save is over."""

    def number() -> int:
        words = account.read_words(run.output)
        return sum(word.message.startswith("preempted saved=") for said in words.values() for word in said)

    before = number()

    def wait() -> None:
        wait_until(f"{run.name} to have saved", lambda: number() > before, timeout_s=_SAVED_S)

    return wait
