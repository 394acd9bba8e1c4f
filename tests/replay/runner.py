"""Goes through a trace: makes the jobs, lets the faults happen to them, and looks at what came of each.

Everything happens in the caller's thread, apart from the pod watch and the metadata servers, which end with the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from demo import install, records
from demo import nodes as demo_nodes
from demo.forms import JOB, JOBSET
from demo.install import Images
from demo.logs import PodLogs
from demo.snapshot import PROCESSES, Json, Snapshot
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.messages import Phase
from tests import xla
from tests.cluster import asking, machine, operator, queues
from tests.metadata.servers import GceServer
from tests.replay import account, checks, clocks, report, results, trainer
from tests.replay.alerts import Alerts
from tests.replay.both_accounts import BothAccounts
from tests.replay.kinds import (
    ACTIVE_MAINTENANCE,
    KINDS,
    LABEL,
    PRIORITY,
    SNAPSHOT_SERVERS,
    TAINTS,
    TAKER,
    Kind,
    Scene,
    Then,
    call_off_event,
    prepare,
    release_nodes,
)
from tests.replay.owners import Owner, Owners
from tests.replay.pod_watch import PodWatch
from tests.replay.results import Result
from tests.replay.trace import Fault
from tests.replay.workloads import EVERY_STEPS, KEEP_LAST, POLICIES, UNDISTURBED, WORKLOADS, Store, Workload
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.local import LocalCluster
from tests.testcluster.shell import wait_until
from tests.testcluster.waiting import wait_for_rollout

NAMESPACE = "gracepoint-replay"
#: How the names of its jobs begin, and what they consist of.
_JOB_PREFIX, _MADE = "job-", "jobsets.jobset.x-k8s.io,jobs.batch,services"
#: Of the chart: a snapshot server on each node.
SETTINGS = ("snapshots.enabled=true", "snapshots.capacity=64Mi", f"snapshots.nodeSelector.{LABEL[0]}={LABEL[1]}")
#: A small model, and steps of a length that leaves time to disturb it.
_FLAGS = {"width": 64, "layers": 1}
_ENVIRONMENT = {"XLA_FLAGS": xla.FLAGS}
_MEMORY_LIMIT = "1Gi"
#: How long faults take depends on the machine, and the job trains meanwhile. So its last step is decided after its last
#: fault: this many steps after the newest one. Until then it is one that no replay reaches.
_STEPS_TO_THE_END = 300
_STEPS_UNDECIDED = 10_000_000
#: Steps after which the job has gone on.
_STEPS_AFTER = 20
_RESUMED_S = 600.0
_RECORDED_S = 180.0
_END_S = 1800.0
_GONE_S = 300.0
_MOST_DIFFERENCES = 1000

#: Whatever a fault leads to is one of its results, and must not end the replay.
_ANYTHING = (Exception, pytest.skip.Exception, pytest.fail.Exception)
#: The kind of what is done to each job before its end.
_THE_END = "pod-deleted"

_Metadata = dict[str, GceServer]


@dataclasses.dataclass
class _Job:
    """A training job, and what is known of it so far.

    Attributes:
        run: The job.
        workload: What it is.
        accounts: Of its time.
        metadata: The metadata servers of the nodes.
        store: The proxy in front of the store of its checkpoints. None: they are in a directory.
        owners: Of its Preemptions.
        done: What its faults led to.
        problems: What must not be, beside what its faults led to.
        memory: Of the operator's replicas after the first fault, in bytes.
        starts: How many starts there were when a fault was judged last. None: the one before was not judged.
        last: What happened last, in words, and how many starts it may still lead to.
        error: Why the last fault was not judged.
        ended: Whether it has come to its end.
        times: Of its start and its end, by their names in ``results.End``.
    """

    run: TrainingRun
    workload: Workload
    accounts: BothAccounts
    metadata: _Metadata
    store: Store
    owners: Owners = dataclasses.field(default_factory=Owners)
    done: list[Result] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    starts: int | None = 1
    last: tuple[str, int] = ("its start", 0)
    error: BaseException | None = None
    ended: bool = False
    times: dict[str, float] = dataclasses.field(default_factory=dict)

    def begin(self, fault: Fault | None, kind: Kind, lives: Sequence[account.Life], before: Snapshot) -> None:
        """Something happens next: a fault, or the deletion before the end. Nothing may have happened beside."""
        name = f"fault {fault.fault}, {kind.name}" if fault else "the deletion at its end"
        self.owners.begin(Owner(name, kind.records[1], kind.causes), before.preemptions)
        if self.starts is not None:
            self.problems += account.beside(lives, self.starts, *self.last, one_by_one=self.run.form is JOB)
        self.last = (name, 0)
        self.starts = len(lives)

    def judged(self, fault: Fault, kind: Kind, before: int, now: int) -> None:
        """A fault was judged, before which there were ``before`` starts, and ``now`` after it."""
        self.starts, self.last = now, (f"fault {fault.fault}, {kind.name}", kind.later_starts(now - before))

    def not_judged(self) -> None:
        self.starts = None


class Replay:
    """A trace on a cluster that has the operator.

    Args:
        cluster: The cluster.
        images: The images of operator and trainer.
        alerts: Those of the operator.
        nodes: Those that may be disturbed, at least two.
        say: Where news go.
        folder: Where results go, and what helps to find out what went wrong.
    """

    def __init__(
        self,
        cluster: Cluster,
        images: Images,
        alerts: Alerts,
        *,
        nodes: tuple[str, ...],
        say: Callable[[str], None],
        folder: Path,
    ) -> None:
        self._alerts = alerts
        self._nodes = nodes
        self._cluster = cluster
        self._images = images
        self._say = say
        self._folder = folder
        self._mark = time.strftime("%H%M%S")
        self._made = 0
        self._commit = results.commit_of()
        self._own_taints: list[str] = []
        self.happened: set[Fault] = set()

    def prepare(self) -> None:
        """Takes away what a replay that was cut has left on the cluster, and makes what the jobs need.

        Raises:
            ClusterError: It could not be taken away, or be made.
        """
        install.make_namespace(self._cluster, NAMESPACE)
        restore(self._cluster, self._nodes)
        self._own_taints = checks.taints(self._cluster, self._nodes)
        self._delete_jobs()
        first = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": PRIORITY},
            "value": -10,
        }
        self._cluster.kubectl("apply", "-f", "-", stdin=json.dumps(first))
        for name, change in POLICIES.items():
            apply_policy(self._cluster, name, namespace=NAMESPACE, change=change)
        self._wait_for_snapshot_servers()

    def _delete_jobs(self) -> None:
        """Deletes the jobs of replays before this one, and waits until their pods are gone."""
        where = f"--namespace={NAMESPACE}"
        listed = self._cluster.kubectl("get", _MADE, where, "--output=name").stdout.split()
        if left := [name for name in listed if name.partition("/")[2].startswith(_JOB_PREFIX)]:
            begun_s = time.time()
            self._cluster.kubectl(
                *("delete", *left, where, "--ignore-not-found", "--cascade=foreground", f"--timeout={_GONE_S:.0f}s"),
                timeout_s=_GONE_S + 10,
            )
            self._alerts.excuse("the deletion of jobs before it", begun_s)

    def job(self, faults: Sequence[Fault], *, until_s: float = float("inf")) -> None:
        """Lets faults happen to one training job, and holds it against one that nobody disturbs.

        Whatever goes wrong with a fault or with the end of the job is one of its results. Which faults happened,
        ``happened`` says: not all, if time was over, or if one of them was not as expected.

        Args:
            faults: Of one job.
            until_s: ``time.monotonic()``. No fault begins later.

        Raises:
            ClusterError: The job did not start, or what it has left could not be taken away.
        """
        self._made += 1
        workload = WORKLOADS[faults[0].workload]
        run = self._training_run(f"{_JOB_PREFIX}{faults[0].job}-{self._made}", workload)
        try:
            self._train(run, workload, faults, until_s)
        except ClusterError:
            raise
        except BaseException:  # it was interrupted, and the cluster may be kept
            try:
                self._give_up(run)
            except ClusterError as lacking:
                self._say(f"  {lacking}")
            raise

    def _train(self, run: TrainingRun, workload: Workload, faults: Sequence[Fault], until_s: float) -> None:
        """See ``job``. After a ``ClusterError`` the run was given up."""
        folder = self._folder / "logs" / run.name
        around = workload.around(self._cluster, NAMESPACE)
        with self._metadata() as metadata, around as store, PodWatch(run) as pods:
            accounts = BothAccounts(run, workload.policy, pods, folder)
            job = _Job(run, workload, accounts, metadata, store)
            try:
                self._start(run, workload)
                run.wait_for_step(1, timeout_s=_RESUMED_S)
            except _ANYTHING as error:
                self._save_logs(run.name, run, error)
                self._give_up(run)
                raise ClusterError(f"{run.name} did not start: {_text(error)}") from error
            for fault in faults:
                if time.monotonic() > until_s:
                    break
                result = self._fault(fault, job)
                if not result.recovered:
                    broken = (*result.broken, *job.problems, *job.owners.surplus())
                    result = dataclasses.replace(result, broken=broken)
                results.append(result, self._folder / results.FILE.name)
                self.happened.add(fault)
                job.done.append(result)
                self._tell(result)
                if result.broken:
                    job.owners.excuse(f"fault {fault.fault}, {fault.kind}")
                    self._save_logs(f"{fault.seed}-{fault.fault}-{fault.kind}", run, job.error)
                if not result.recovered:
                    self._give_up(run)
                    return
                job.memory = job.memory or self._operator_bytes()
                if job.error is not None:  # the next ones come to a new job, of which more is known
                    break
            if not job.done:  # time was over
                self._give_up(run)
                return
            rows: list[tuple[str, float, float]] = []
            problems = self._guarded("its end", lambda: self._end(job, rows)) + job.problems + job.owners.surplus()
        if job.ended:
            problems += self._guarded("the comparison", lambda: self._compare(run, job.done))
        problems += self._guarded("what it leaves", lambda: self._remaining(run)) + self._alerts.look()
        end = results.End(
            seed=faults[0].seed,
            workload=workload.name,
            faults=tuple(result.fault for result in job.done),
            steps=run.steps,
            account=tuple(rows),
            broken=tuple(problems),
            at=_stamp(time.time()),
            commit=self._commit,
            **job.times,
        )
        results.append(end, self._folder / results.ENDS.name)
        for problem in problems:
            self._say(f"  the end of {run.name}: {problem}")
        if problems:
            self._save_logs(run.name, run)
            self._give_up(run)

    def _guarded(self, what: str, look: Callable[[], list[str]]) -> list[str]:
        """Returns what is wrong by ``look``, or that it could not be said."""
        try:
            return look()
        except _ANYTHING as error:
            return [f"{what} could not be judged: {_text(error)}"]

    def _start(self, run: TrainingRun, workload: Workload) -> None:
        def change(body: Json) -> None:
            _of_many_restarts(body)
            workload.change(body)

        def change_pods(template: Json) -> None:
            self._with_words(template)
            workload.change_pods(template)

        run.start(change, change_pods)

    def _training_run(
        self, name: str, workload: Workload, *, steps: int = _STEPS_UNDECIDED, pace: float = 0.1
    ) -> TrainingRun:
        return TrainingRun(
            self._cluster,
            f"{name}-{self._mark}",
            namespace=NAMESPACE,
            image=self._images.trainer,
            steps=steps,
            policy=workload.policy,
            flags={**_FLAGS, "pace": pace},
            environment=_ENVIRONMENT,
            form=workload.form,
        )

    def _with_words(self, template: Json) -> None:
        """Lets the trainers run ``trainer.py``, within a limit of their memory, with clocks that faults can set."""
        folder = self._cluster.shared_dir / "replay"
        folder.mkdir(exist_ok=True)
        source = Path(trainer.__file__)
        (folder / source.name).write_text(source.read_text())
        pod = template["spec"]
        pod["priorityClassName"] = PRIORITY
        pod["nodeSelector"] = dict([LABEL])
        (container,) = pod["containers"]
        container["command"] = ["python", "-u", f"/shared/replay/{source.name}"]
        container["resources"]["limits"] = {"memory": _MEMORY_LIMIT}
        if isinstance(self._cluster, LocalCluster):  # the nodes' machines are this one: they can run what it compiles
            variables = clocks.prepare(folder, "/shared/replay")
            container["env"] += [{"name": name, "value": value} for name, value in variables.items()]

    @contextlib.contextmanager
    def _metadata(self) -> Iterator[_Metadata]:
        """A metadata server for each node of a cluster of its own."""
        folder = self._cluster.shared_dir / "replay"
        folder.mkdir(exist_ok=True)
        if not isinstance(self._cluster, LocalCluster):
            (folder / "metadata.json").unlink(missing_ok=True)
            yield {}
            return
        address = self._cluster.record.network.host_ip
        with contextlib.ExitStack() as servers:
            found = {node: servers.enter_context(GceServer(address)) for node in self._nodes}
            (folder / "metadata.json").write_text(json.dumps({node: server.url for node, server in found.items()}))
            yield found

    def _fault(self, fault: Fault, job: _Job) -> Result:
        """Lets one fault happen, and looks at what came of it."""
        run, accounts, kind = job.run, job.accounts, KINDS[fault.kind]
        job.error = None
        began_s = time.time()
        missed = Result(
            seed=fault.seed,
            fault=fault.fault,
            kind=kind.name,
            announced=kind.announced,
            workload=job.workload.name,
            recovered=False,
            steps_lost=0,
            until_training_s=0.0,
            counted_restarts=0,
            at=_stamp(began_s),
            commit=self._commit,
            alerts=self._alerts.why_not,
            unheard=kind.unheard,
        )
        name = f"fault {fault.fault}, {kind.name}"
        self._say(f"fault {fault.fault} of seed {fault.seed}: {kind.name}, process {fault.process} of {run.name}")
        try:
            run.wait_for_step(_newest(run) + fault.after_steps, timeout_s=_RESUMED_S)
            pods = run.wait_for_pods()
            lives = self._settled(job)
            before = run.look()
            committed, newest = _committed(run), _newest(run)
            if job.store is not None and not committed and newest >= 2 * EVERY_STEPS:
                raise AssertionError(f"expected a complete checkpoint in the bucket after {newest} steps, found none")
            job.begin(fault, kind, lives, before)
            began_s = time.time()
            scene = Scene(
                *(run, pods, pods[fault.process], self._nodes, job.metadata, self._images.trainer),
                old={pod.name for pod in before.pods},
                since_s=began_s,
                store=job.store,
            )
            with kind.happens(scene):
                until_s = self._until_training(job, kind, scene)
            operator.ready(self._cluster)
            if kind.name.startswith("api-server"):  # what the scheduler does after it is no matter of the next fault
                machine.wait_for_scheduler(self._cluster, self._nodes[0], self._images.trainer)
                queues.ready(self._cluster)
            run.wait_for_pods()
            now = self._settled(job)
            accounts.note(f"{fault.fault} {kind.name}")
            after = run.look()
            stood_s = None
            if kind.then is Then.RESTARTS:
                stood_s = account.stood_s(now[len(lives) - 1 :], began_s, scene.since_s + until_s)
            lacking = account.lacking_snapshots(now, len(lives), account.read_words(run.output))
            result = dataclasses.replace(
                missed,
                stood_s=stood_s,
                unheard=kind.unheard or scene.unheard,
                lacking=sum(lacking),
                recovered=True,
                steps_lost=account.between(now, len(lives))[1],
                until_training_s=until_s,
                counted_restarts=after.restarts_counted - before.restarts_counted,
                at=_stamp(began_s),
            )
            broken = (
                *_broken_promises(result, kind),
                *account.lost_too_many(
                    now, len(lives), lacking, interval_steps=_interval(kind, job), most=2 * EVERY_STEPS
                ),
                *self._wrong_restarts(kind, before, after),
                *_wrong_starts(run, account.between(now, len(lives))[0], most=kind.starts),
                *_forgotten(committed, now[len(lives) :]),
                *self._wrong_records(kind, run, before),
                *_unequal(run),
                *self._alerts.judge(name, began_s, kind.alerts, _fresh(run, before)),
            )
            job.judged(fault, kind, len(lives), len(now))
            return dataclasses.replace(result, broken=broken)
        except _ANYTHING as error:  # a process was not found, or a look at the cluster failed
            job.error = error
            job.not_judged()
            recovered = self._trains_again(run)
            self._alerts.excuse(name, began_s)
            what = "not as expected, but it trains again" if recovered else "not recovered"
            return dataclasses.replace(
                missed, at=_stamp(began_s), recovered=recovered, broken=(f"{what}: {_text(error)}",)
            )

    def _settled(self, job: _Job) -> list[account.Life]:
        """Waits until the newest start has said which step it restored; returns all starts.

        Before, steps that were done again are not known to have been lost.
        """
        found: list[account.Life] = []

        def restored() -> bool:
            found[:] = job.accounts.lives()
            return bool(found) and found[-1].restored_step is not None

        wait_until(f"the newest start of {job.run.name} to restore", restored, timeout_s=_RESUMED_S, every_s=1)
        return found

    def _until_training(self, job: _Job, kind: Kind, scene: Scene) -> float:
        """Waits until the job has gone on, if it has to in a new start; returns how long it did not train."""
        run = job.run
        if kind.then is Then.GOES_ON:
            run.wait_for_step(_newest(run) + _STEPS_AFTER, timeout_s=_RESUMED_S)
            return _longest_pause(run, scene.since_s)
        begins: list[float] = []

        def trains() -> bool:
            if not any(at > scene.since_s for at in _first_steps(run)):  # quickly told
                return False
            first_s = account.trains_anew(job.accounts.lives(), scene.old, scene.since_s)
            begins[:] = [] if first_s is None else [first_s]
            return bool(begins)

        # A look at the API server tells if the job is over; the steps come from files.
        wait_until(
            f"{run.name} to train again after {kind.name}",
            trains,
            timeout_s=_RESUMED_S,
            hint=lambda: f"\n{run.look().describe()}",
        )
        return begins[0] - scene.since_s

    def _trains_again(self, run: TrainingRun) -> bool:
        """Takes away what a fault has left, and says whether the job goes on then."""
        try:
            restore(self._cluster, self._nodes)
            with contextlib.suppress(FileNotFoundError):  # as a bucket's, before there is anything in it
                run.checkpoints.chmod(0o777)
            run.wait_for_step(_newest(run) + _STEPS_AFTER, timeout_s=_RESUMED_S)
            run.wait_for_pods()
        except _ANYTHING as error:
            self._say(f"  {_text(error)}")
            return False
        return True

    def _wrong_restarts(self, kind: Kind, before: Snapshot, after: Snapshot) -> list[str]:
        if kind.then is Then.GOES_ON and after.restarts != before.restarts:
            return [f"{after.restarts - before.restarts} restarts, expected that it goes on"]
        return []

    def _wrong_records(self, kind: Kind, run: TrainingRun, before: Snapshot) -> list[str]:
        """What is wrong with the records of a fault."""
        least, most = kind.records
        fresh: list[Json] = []

        def are_there() -> bool:
            fresh[:] = _fresh(run, before)
            return len(fresh) >= least and all(_ended(record, kind) for record in fresh)

        # The replicas of the operator may just have begun to serve again.
        with contextlib.suppress(ClusterError):
            wait_until(f"the record of {kind.name}", are_there, timeout_s=_RECORDED_S, every_s=1)
        found = []
        if not least <= len(fresh) <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            found.append(f"{len(fresh)} Preemptions, expected {wanted}: {', '.join(map(_told, fresh)) or 'none'}")
        for record in fresh:
            if record["spec"]["cause"] not in kind.causes:
                causes = " or ".join(sorted(kind.causes)) or "none"
                found.append(f"the cause of a Preemption is {record['spec']['cause']}, expected {causes}")
            if kind.phases and not _ended(record, kind):
                found.append(f"{_told(record)}, expected {' or '.join(sorted(kind.phases))} with 0 steps lost")
        return found

    def _end(self, job: _Job, rows: list[tuple[str, float, float]]) -> list[str]:
        """Lets a job come to its end; returns what is wrong with what it has left. Both accounts of its time: ``rows``.

        One of its pods is deleted on the way, which must cost no step and leave one record.
        """
        run, accounts = job.run, job.accounts
        run.steps = _newest(run) + _STEPS_TO_THE_END
        (run.output / trainer.STEPS).write_text(str(run.steps))
        pod = run.wait_for_pods()[0]
        lives = self._settled(job)
        before = run.look()
        job.begin(None, KINDS[_THE_END], lives, before)
        deleted_s = time.time()
        run.cluster.kubectl("delete", "pod", pod.name, f"--namespace={NAMESPACE}", "--wait=false")
        run.wait_for_end(timeout_s=_END_S)
        job.ended = True
        rows += accounts.finished()
        found = self._wrong_records(KINDS[_THE_END], run, before)
        found += self._alerts.judge("the deletion at its end", deleted_s, KINDS[_THE_END].alerts, _fresh(run, before))
        problems = [f"{text}, at the end" for text in found]
        now = accounts.lives()
        starts, lost = account.between(now, len(lives))
        if lost:
            problems.append(f"{lost} steps lost at the end in spite of its notice")
        problems += [f"{text}, at the end" for text in _wrong_starts(run, starts, least=1, most=1)]
        job.owners.note(run.look().preemptions)
        job.times = _times(now, len(lives), deleted_s)
        problems += checks.files(run.checkpoints, KEEP_LAST)
        if run.form is JOBSET:
            unheard = sum(result.unheard for result in job.done)
            held_up = any(KINDS[result.kind].holds_up for result in job.done)
            problems += report.unlike(rows, len(now), unheard, held_up=held_up)
        grown = self._operator_bytes()
        if isinstance(self._cluster, LocalCluster) and not (job.memory and grown):
            problems.append(f"the memory of the operator's replicas was not measured: {job.memory}, then {grown}")
        if job.memory and grown and max(grown) > max(job.memory) + checks.GROWTH_BYTES:
            problems.append(f"a replica of the operator has grown from {max(job.memory)} to {max(grown)} bytes")
        self._say(f"memory of the operator's replicas: {job.memory} bytes after the first fault, {grown} in the end")
        return problems

    def _operator_bytes(self) -> list[int]:
        try:
            return checks.operator_bytes(self._cluster)
        except ClusterError as error:
            self._say(f"  {error}")
            return []

    def _compare(self, run: TrainingRun, done: Sequence[Result]) -> list[str]:
        """Says how the job differs from one that nobody disturbed."""
        other = self._training_run(f"{run.name.rpartition('-')[0]}-alone", UNDISTURBED, steps=run.steps, pace=0.0)
        try:
            other.start()
            other.wait_for_end(timeout_s=_END_S)
            found = run.compare(other, most=_MOST_DIFFERENCES).differences
        except ClusterError as error:
            return [f"the run that nobody disturbs: {error}"]
        finally:
            other.delete()
        # A killed process may have saved a step that it did not come to write down: each one and two of them at most.
        unwritten = [each for each in found if each.startswith("disturbed") and each.endswith("was not recorded")]
        if len(unwritten) <= 4 * PROCESSES * sum(not result.announced for result in done):
            found = tuple(each for each in found if each not in unwritten)
        return [f"not as the undisturbed run: {each}" for each in found[:20]]

    def _remaining(self, run: TrainingRun) -> list[str]:
        """Deletes a job, and says what is left after the garbage collector had its time."""

        def left() -> list[str]:
            taints = [taint for taint in checks.taints(self._cluster, self._nodes) if taint not in self._own_taints]
            return checks.objects(run) + checks.processes(run) + taints

        run.delete()
        with contextlib.suppress(ClusterError):
            wait_until("all of it to be gone", lambda: not left(), timeout_s=_GONE_S, every_s=1)
        return left()

    def _give_up(self, run: TrainingRun) -> None:
        """Ends a job that did not come back, and takes away what faults have left.

        Raises:
            ClusterError: The cluster does not come back.
        """
        begun_s = time.time()
        try:
            machine.end_at_once(run)
            restore(self._cluster, self._nodes)
            run.delete()
            self._wait_for_snapshot_servers()
            self._alerts.excuse(f"the end of {run.name} by force", begun_s)
        except _ANYTHING as error:
            raise ClusterError(f"the cluster did not come back after {run.name}: {_text(error)}") from error

    def _wait_for_snapshot_servers(self) -> None:
        servers = f"daemonset/{SNAPSHOT_SERVERS}"
        wait_for_rollout(self._cluster, servers, namespace=install.OPERATOR_NAMESPACE, timeout_s=180)

    def _save_logs(self, name: str, run: TrainingRun, error: BaseException | None = None) -> None:
        """Keeps what helps to find out what went wrong, also what processes said that are gone."""
        folder = self._folder / "logs" / name
        folder.mkdir(parents=True, exist_ok=True)
        if error is not None:
            (folder / "error.txt").write_text("".join(traceback.format_exception(error)))
        for path in run.output.glob("*.jsonl"):
            shutil.copy(path, folder)
        try:
            logs = PodLogs(self._cluster, folder)
            install.save_logs(self._cluster, logs, NAMESPACE)
            selected = ("--selector=batch.kubernetes.io/job-name", f"--namespace={NAMESPACE}")
            logs.save("trainers.log", "logs", *selected, "--all-containers", "--prefix", "--timestamps", "--tail=-1")
        except _ANYTHING as lacking:
            self._say(f"  not all logs: {_text(lacking)}")

    def _tell(self, result: Result) -> None:
        if not result.recovered:
            self._say(f"  {result.broken[0]}")
            return
        self._say(f"  {result.steps_lost} steps lost, training again after {result.until_training_s:.1f} s")
        for problem in result.broken:
            self._say(f"  BROKEN: {problem}")


def checkpoints_of(cluster: Cluster) -> Path:
    """The folder in which all jobs have their checkpoints, on this machine."""
    return cluster.shared_dir / "checkpoints" / NAMESPACE


def _of_many_restarts(workload: Json) -> None:
    """A program is to blame far more often than on any cluster."""
    if workload["kind"] == JOBSET.kind:
        workload["spec"]["failurePolicy"] = {"maxRestarts": 1000}


def restore(cluster: Cluster, nodes: tuple[str, ...]) -> None:
    """Brings back what faults have taken away.

    Raises:
        ClusterError: It does not come back.
    """
    if isinstance(cluster, LocalCluster):
        release_nodes(cluster, *nodes)
    for node in nodes:
        if isinstance(cluster, LocalCluster):
            there = cluster.kubectl("get", "node", node, "--ignore-not-found", "--output=name").stdout
            if node in cluster.nodes and not there:  # it was deleted, and held until now: its kubelet does not tell
                cluster.lose_node(node)
            if node not in cluster.nodes:
                cluster.restore_node(node, timeout_s=180)
            cluster.kubectl("patch", "node", node, "--type=merge", "--patch", '{"spec": {"taints": null}}')
        else:  # nodes have taints of their own
            for key in TAINTS:
                demo_nodes.untaint(cluster, node, key)
        cluster.kubectl("uncordon", node)
        prepare(cluster, node)
        cluster.kubectl("label", "node", node, f"{asking.MAINTENANCE}-", f"{ACTIVE_MAINTENANCE}-")
        call_off_event(cluster, node)
    for what in (
        (f"--namespace={NAMESPACE}", "resourcequota/none", "pod/urgent", f"jobs.batch/{TAKER}"),
        ("validatingwebhookconfigurations.admissionregistration.k8s.io/foreign",),
    ):
        cluster.kubectl("delete", *what, "--ignore-not-found", "--force", "--grace-period=0")
    operator.ready(cluster)


def _wrong_starts(run: TrainingRun, starts: int, *, least: int = 0, most: int | None) -> list[str]:
    """What is wrong with how often a JobSet started. The pods of a Job are replaced one by one."""
    if run.form is not JOBSET or least <= starts <= (starts if most is None else most):
        return []
    return [f"{starts} starts, expected {'' if least == most else 'at most '}{most}"]


def _interval(kind: Kind, job: _Job) -> int:
    """The steps from one save or snapshot to the next, if a fault of the kind may cost any; else 0."""
    return 0 if kind.announced or kind.then is Then.GOES_ON else job.workload.interval_steps


def _broken_promises(result: Result, kind: Kind) -> list[str]:
    """Which of its kind's promises a fault's result does not keep, beside the number of steps."""
    if result.counted_restarts > kind.counted:
        return [f"{result.counted_restarts} restarts count towards the limit, expected at most {kind.counted}"]
    return []


def _times(lives: Sequence[account.Life], before: int, deleted_s: float) -> dict[str, float]:
    """How long the start and the end of a job took, by their names in ``results.End``.

    Args:
        lives: All of its starts.
        before: How many there were when a pod was deleted before its end.
        deleted_s: When that was.
    """
    first, last = lives[0], lives[-1]
    first_s, again_s = account.first_step_s(first), account.first_step_s(last)
    if first_s is None or again_s is None:
        return {}
    return {
        "start_s": first_s - first.created_s,
        "again_s": account.stood_s(lives[before - 1 :], deleted_s, again_s),
        "over_s": max(0.0, last.gone_s - max(last.steps.values())),
    }


def _forgotten(committed: int, later: Sequence[account.Life]) -> list[str]:
    """Whether a later life went on from before the step that was complete in storage when the fault came."""
    restored = [life.restored_step for life in later if life.restored_step is not None]
    return [f"restored step {step}, but step {committed} was complete" for step in restored if step < committed]


def _unequal(run: TrainingRun) -> list[str]:
    """Says which steps were not the same each time that they were done."""
    seen: dict[tuple[int, int], tuple[str, str]] = {}
    found = []
    for step in records.read(run.output):
        values = (step.loss, step.batch)
        if seen.setdefault((step.process, step.step), values) != values:
            found.append(f"process {step.process}, step {step.step} was not the same when it was done again")
    return found[:5]


def _committed(run: TrainingRun) -> int:
    """The newest step that is complete in storage. 0: none."""
    return max(checks.complete_steps(run.checkpoints), default=0)


def _longest_pause(run: TrainingRun, since_s: float) -> float:
    """The longest time between two steps, from the last one before ``since_s`` on."""
    times = sorted(step.unix_s for step in records.read(run.output) if step.process == 0)
    before = [at for at in times if at < since_s][-1:]
    later = [*before, *(at for at in times if at >= since_s)]
    return max((two - one for one, two in itertools.pairwise(later)), default=0.0)


def _first_steps(run: TrainingRun) -> list[float]:
    """Returns when process 0 did the first step of each start."""
    found = []
    for path in run.output.glob("losses.process_0.attempt_*.jsonl"):
        with path.open() as file:
            line = file.readline()
        if line.endswith("\n"):
            found.append(float(json.loads(line)["unix_s"]))
    return sorted(found)


def _newest(run: TrainingRun) -> int:
    newest = run.newest()
    return newest.step if newest else 0


def _text(error: BaseException) -> str:
    """An error in words. Its own are enough if it is one that was made for a reader."""
    return str(error) if isinstance(error, ClusterError | AssertionError) else f"{type(error).__name__}: {error}"


def _fresh(run: TrainingRun, before: Snapshot) -> list[Json]:
    """The records that a run has and that it did not have before."""
    known = {_name(record) for record in before.preemptions}
    return [record for record in run.look().preemptions if _name(record) not in known]


def _name(record: Json) -> str:
    return str(record["metadata"]["name"])


def _told(record: Json) -> str:
    status = record.get("status", {})
    return (
        f"Preemption {_name(record)} ({record['spec']['cause']}) is {status.get('phase')} with "
        f"{status.get('stepsLost')} steps lost: {status.get('message')}"
    )


def _ended(record: Json, kind: Kind) -> bool:
    """Whether a record has ended, and as its kind's must."""
    status = record.get("status", {})
    phase = status.get("phase")
    if phase is None or not Phase(phase).ended:
        return False
    if not kind.phases:
        return True
    return phase in kind.phases and (phase != Phase.COMMITTED or status.get("stepsLost") == 0)


def _stamp(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="seconds")
