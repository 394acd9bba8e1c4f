"""Snapshot servers as the chart installs them: restricted, within their memory, in updates, and when they die."""

from __future__ import annotations

import base64
import collections
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from demo.install import OPERATOR_NAMESPACE, Images, install_operator, make_namespace
from demo.snapshot import PROCESSES, Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from gracepoint.wire.snapshot_requests import Capability, Right, write_capability
from tests.cluster import operator
from tests.cluster.conftest import ENVIRONMENT, MARK, NAMESPACE, training_policy, training_run
from tests.cluster.machine import processes_in, processes_of
from tests.cluster.small import SLEEP, container, create, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until
from tests.testcluster.waiting import is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

POLICY = "snapshots"
SERVERS = "gracepoint-snapshots"
CAPACITY_MIB = 64
TRAINS = "trains"
SETTINGS = (
    "snapshots.enabled=true",
    f"snapshots.capacity={CAPACITY_MIB}Mi",
    f"snapshots.nodeSelector.{TRAINS}=it",
    "snapshots.terminationGracePeriodSeconds=40",
)
ENFORCED = "pod-security.kubernetes.io/enforce"

#: What a training pod does with the servers. It prints a JSON object.
PROGRAM = """
import hashlib, json, time
from gracepoint.deadline import Deadline
from gracepoint.snapshots.snapshot_client import SnapshotClient

given = json.loads(GIVEN)
clients = {}

def client(address):
    if address not in clients:
        host, _, port = address.rpartition(":")
        clients[address] = SnapshotClient((host, int(port)), server_name=given["name"],
            authorities=lambda: given["authorities"], capability=lambda: given["capability"])
    return clients[address]

def soon():
    return Deadline.after(20.0, time.monotonic)

def put(address, key, size):
    data = (key.encode() * (size // len(key) + 1))[:size]
    return client(address).put(key, [memoryview(data)], soon()).bytes

def get(address, key):
    entry = client(address).entry(key, soon())
    out = bytearray(entry.bytes)
    client(address).get_into(key, memoryview(out), soon())
    return bytes(out) == (key.encode() * (len(out) // len(key) + 1))[:len(out)]

def keys(address):
    return [entry.key for entry in client(address).entries("", soon())]

def fill(address, size):
    for number in range(1000):
        try:
            put(address, f"{number}/1/0/fill", size)
        except OSError as error:
            return [number, type(error).__name__]

def drop(address):
    return client(address).drop("", soon())

def used(address, workload=None):
    figures = client(address).stat(soon())
    return (figures if workload is None else figures["workloads"].get(workload, {})).get("used_bytes", 0)

answers = []
for what, *arguments in given["calls"]:
    try:
        answers.append(globals()[what](*arguments))
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
"""


@dataclasses.dataclass
class Job:
    """Two pods of a JobSet, on nodes of their own, that do what the test says."""

    cluster: Cluster
    images: Images
    uid: str
    namespace: str
    pods: dict[str, str]  # by node
    rights: frozenset[Right] = frozenset(Right)

    def ask(self, node: str, *calls: tuple[Any, ...]) -> list[Any]:
        """Runs calls of the program in the pod of a node; returns their answers."""
        given = {
            "name": f"{SERVERS}.{OPERATOR_NAMESPACE}.svc",
            "authorities": authorities(self.cluster),
            "capability": capability(self.cluster, self.namespace, self.uid, self.rights),
            "calls": calls,
        }
        done = self.cluster.kubectl(
            *("exec", "--stdin", self.pods[node], f"--namespace={self.namespace}", "--"),
            *("/opt/venv/bin/python", "-"),
            stdin=f"GIVEN = {json.dumps(given)!r}\n{PROGRAM}",
            timeout_s=120,
        )
        answers: list[Any] = json.loads(done.stdout)
        return answers


def authorities(cluster: Cluster) -> str:
    query = ("get", "configmap", "gracepoint-trust", f"--namespace={OPERATOR_NAMESPACE}", "--output=json")
    return str(json.loads(cluster.kubectl(*query).stdout)["data"]["ca-bundle.crt"])


def capability(cluster: Cluster, namespace: str, uid: str, rights: frozenset[Right]) -> str:
    """As the operator gives it, by the key that it keeps. Writers are of attempt 1; others may read those of all."""
    query = ("get", "secret", SERVERS, f"--namespace={OPERATOR_NAMESPACE}", "--output=json")
    keys = base64.b64decode(json.loads(cluster.kubectl(*query).stdout)["data"]["keys"]).decode()
    key_id, _, key = keys.splitlines()[0].partition(" ")
    allowed = Capability(
        namespace=namespace,
        workload=uid,
        attempt=1 if Right.WRITE in rights else 1 << 53,
        rights=rights,
        until=int(time.time()) + 3600,
        max_bytes=1 << 40,
    )
    return write_capability(allowed, key_id, base64.b64decode(key))


def pods_of_servers(cluster: Cluster) -> list[Json]:
    selector = f"gracepoint.dev/snapshot-server={SERVERS}"
    query = ("get", "pods", f"--namespace={OPERATOR_NAMESPACE}", f"--selector={selector}", "--output=json")
    found: list[Json] = json.loads(cluster.kubectl(*query).stdout)["items"]
    return found


def servers(cluster: Cluster) -> dict[str, str]:
    """The addresses of those that serve and stay, by node."""
    return {
        pod["spec"]["nodeName"]: f"{pod['status']['podIP']}:9470"
        for pod in pods_of_servers(cluster)
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
    }


def label(cluster: Cluster, node: str) -> None:
    """Makes a node one that the servers' selector chooses."""
    cluster.kubectl("label", "node", node, "--overwrite", f"{TRAINS}=it")


@pytest.fixture(scope="module")
def served(installed: Cluster, images: Images) -> Iterator[Cluster]:
    """The cluster with a snapshot server on each node, where nothing but restricted pods is admitted beside them."""
    enforced = ("label", "namespace", OPERATOR_NAMESPACE, "--overwrite")
    installed.kubectl(*enforced, f"{ENFORCED}=restricted")
    for node in installed.nodes:
        label(installed, node)
    try:
        install_operator(installed, images.operator, SETTINGS)
        wait_until(
            "a snapshot server on each node",
            lambda: set(servers(installed)) == set(installed.nodes),
            timeout_s=180,
            every_s=1,
            hint=lambda: json.dumps([pod["status"] for pod in pods_of_servers(installed)])[:4000],
        )
        wants_snapshots(installed, NAMESPACE)
        yield installed
    finally:
        installed.kubectl(*enforced, f"{ENFORCED}-")
        install_operator(installed, images.operator)


def wants_snapshots(cluster: Cluster, namespace: str) -> None:
    """Makes a policy with snapshots."""
    training_policy(
        cluster,
        POLICY,
        lambda spec: spec["checkpoint"].update(memory={"everySteps": 1, "copies": 2}),
        namespace=namespace,
    )


@contextlib.contextmanager
def job_in(cluster: Cluster, images: Images, namespace: str, name: str) -> Iterator[Job]:
    train = container("train", images.trainer, SLEEP)
    jobs = [replicated_job(f"on-{number}", train, nodeName=node) for number, node in enumerate(cluster.nodes)]
    body = jobset(f"{name}-", *jobs, policy=POLICY)
    body["metadata"]["namespace"] = namespace
    made, _ = create(cluster, body)
    selector = f"jobset.sigs.k8s.io/jobset-name={made['metadata']['name']}"
    query = ("get", "pods", f"--namespace={namespace}", f"--selector={selector}", "--output=json")
    found: list[Json] = []

    def run() -> bool:
        found[:] = json.loads(cluster.kubectl(*query).stdout)["items"]
        return len(found) == len(cluster.nodes) and all(map(is_ready, found))

    try:
        wait_until("the pods of the job to run", run, timeout_s=120, every_s=0.5)
        pods = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in found}
        yield Job(cluster, images, made["metadata"]["uid"], namespace, pods)
    finally:
        resource = f"jobsets.jobset.x-k8s.io/{made['metadata']['name']}"
        cluster.kubectl("delete", resource, f"--namespace={namespace}", "--ignore-not-found", "--wait=false")


@pytest.fixture
def job(request: pytest.FixtureRequest, served: Cluster, images: Images) -> Iterator[Job]:
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[:20].strip("-")
    with job_in(served, images, NAMESPACE, name) as job:
        yield job


def test_a_value_of_one_node_s_pod_is_read_by_another_s(served: Cluster, job: Job) -> None:
    first, second = served.nodes
    found = servers(served)
    calls = [("put", address, "5/1/0/params", 1 << 20) for address in found.values()]
    assert job.ask(first, *calls) == [1 << 20] * 2
    assert job.ask(second, *(("get", address, "5/1/0/params") for address in found.values())) == [True, True]
    with job_in(served, job.images, NAMESPACE, "stranger") as stranger:
        refused = stranger.ask(second, ("keys", found[first]), ("get", found[first], "5/1/0/params"))
        assert refused[0] == []
        assert "NoneType" in refused[1], "there is no such value for it"
    # The operator does not know of what a test has put there itself, and asks the servers every ten minutes only.
    assert job.ask(first, *(("drop", address) for address in found.values())) == [1, 1]


def test_a_server_fills_its_memory_and_lives(served: Cluster, job: Job) -> None:
    """All that it may hold, and the limit of its container is what the chart said."""
    node = served.nodes[0]
    address = servers(served)[node]
    (pod,) = (pod for pod in pods_of_servers(served) if pod["spec"]["nodeName"] == node)
    name = pod["metadata"]["name"]

    def memory(*files: str) -> int:
        """What one of the files says, in version 2 or 1 of control groups."""
        command = " || ".join(f"cat /sys/fs/cgroup/{file}" for file in files)
        done = served.kubectl("exec", name, f"--namespace={OPERATOR_NAMESPACE}", "--", "sh", "-c", command)
        return int(done.stdout)

    limit_bytes = memory("memory.max", "memory/memory.limit_in_bytes")
    assert limit_bytes == (CAPACITY_MIB << 20) * 257 // 256 + (256 << 20)
    # What earlier jobs have left is dropped some seconds after their end.
    wait_until("the server to be empty", lambda: job.ask(node, ("used", address)) == [0], timeout_s=60, every_s=1)
    (answer,) = job.ask(node, ("fill", address, 1 << 20))
    assert answer == [CAPACITY_MIB - 1, "SnapshotsFull"], "each value costs a page more than its bytes"
    used_bytes = memory("memory.current", "memory/memory.usage_in_bytes")
    assert (CAPACITY_MIB - 1) << 20 < used_bytes < limit_bytes
    assert job.ask(node, ("get", address, "0/1/0/fill"), ("drop", address)) == [True, CAPACITY_MIB - 1]
    (again,) = (pod for pod in pods_of_servers(served) if pod["spec"]["nodeName"] == node)
    assert (again["metadata"]["name"], again["status"]["containerStatuses"][0]["restartCount"]) == (name, 0)


def test_more_than_the_container_has_is_refused_at_the_start(served: Cluster) -> None:
    """It would be killed in the middle of training else."""
    pod = pods_of_servers(served)[0]
    name = pod["metadata"]["name"]
    command = ("python", "-m", "gracepoint.snapshots", "--certificate=/keys/tls.crt", "--key=/keys/tls.key")
    more = ("--capability-keys=/keys/keys", f"--capacity-bytes={CAPACITY_MIB * 10 << 20}", "--port=0")
    done = served.kubectl("exec", name, f"--namespace={OPERATOR_NAMESPACE}", "--", *command, *more, check=False)
    assert "give it more memory, or less capacity" in done.stderr
    assert done.returncode == 2


@pytest.mark.variant
def test_a_rolling_update_loses_no_value_that_has_two_copies(served: Cluster, job: Job) -> None:
    """The job does what the library does: it sends its part to a new server, and drops it where a server is to end."""
    key, first = "5/1/0/params", served.nodes[0]
    before = {pod["metadata"]["uid"] for pod in pods_of_servers(served)}
    found = servers(served)
    assert job.ask(first, *(("put", address, key, 1 << 20) for address in found.values())) == [1 << 20] * 2
    lost: list[Any] = []

    def updated() -> bool:
        pods = pods_of_servers(served)
        alive = [f"{pod['status']['podIP']}:9470" for pod in pods if is_ready(pod)]
        staying = list(servers(served).values())
        answers = job.ask(first, *(("get", address, key) for address in alive))
        if True not in answers:
            lost.append(answers)
        has = {address for address, answer in zip(alive, answers, strict=True) if answer is True}
        job.ask(first, *(("put", address, key, 1 << 20) for address in staying if address not in has))
        if has & set(staying):
            job.ask(first, *(("drop", address) for address in has - set(staying)))
        return len(staying) == len(served.nodes) and not before & {pod["metadata"]["uid"] for pod in pods}

    served.kubectl("rollout", "restart", f"daemonset/{SERVERS}", f"--namespace={OPERATOR_NAMESPACE}")
    wait_until("all servers to be new ones", updated, timeout_s=240, every_s=0.5)
    assert lost == []
    assert job.ask(first, *(("get", address, key) for address in servers(served).values())) == [True, True]


@pytest.mark.variant
def test_a_node_that_is_off_takes_its_copy_along_and_comes_back_empty(served: Cluster, job: Job) -> None:
    first, second = served.nodes
    key, found = "5/1/0/params", servers(served)
    assert job.ask(first, *(("put", address, key, 1 << 20) for address in found.values())) == [1 << 20] * 2
    with operator.outliving(served):
        served.lose_node(second)
        try:
            assert job.ask(first, ("get", found[first], key)) == [True]
            (gone,) = job.ask(first, ("get", found[second], key))
            assert "SnapshotsUnavailable" in gone
        finally:
            served.restore_node(second)  # a new machine, and a new object
            label(served, second)
        wait_until("the server of the node", lambda: set(servers(served)) == {first, second}, timeout_s=180, every_s=1)
    with job_in(served, job.images, NAMESPACE, "witness") as witness:  # the job has lost a pod
        reader = dataclasses.replace(witness, uid=job.uid, rights=frozenset({Right.READ}))
        assert reader.ask(first, ("keys", servers(served)[second])) == [[]]


@pytest.mark.parametrize(
    "ends",
    [
        # tests/api_server has these of an operator without a cluster.
        pytest.param("the JobSet", marks=pytest.mark.variant),
        pytest.param("the namespace", marks=pytest.mark.variant),
        "the policy",
    ],
)
def test_nothing_is_left_in_the_servers_a_minute_after(served: Cluster, images: Images, ends: str) -> None:
    namespace = f"ends-{ends.split()[1].lower()}-{MARK}"
    make_namespace(served, namespace)
    wants_snapshots(served, namespace)
    flags = {"width": 64, "layers": 1, "pace": 0.5}
    run = TrainingRun(
        *(served, "ends"),
        namespace=namespace,
        image=images.trainer,
        steps=1000,
        policy=POLICY,
        flags=flags,
        environment=ENVIRONMENT,
    )
    first = served.nodes[0]
    try:
        with job_in(served, images, NAMESPACE, "witness") as witness:
            run.start()
            query = ("get", f"jobsets.jobset.x-k8s.io/{run.name}", f"--namespace={namespace}", "--output=json")
            uid = json.loads(served.kubectl(*query).stdout)["metadata"]["uid"]
            ask = [("used", address, uid) for address in servers(served).values()]
            wait_until("a snapshot in each server", lambda: 0 not in witness.ask(first, *ask), timeout_s=180, every_s=2)
            command = {
                "the JobSet": ("delete", "jobsets.jobset.x-k8s.io", "--all", f"--namespace={namespace}"),
                "the namespace": ("delete", "namespace", namespace),
                "the policy": ("delete", f"checkpointpolicies.gracepoint.dev/{POLICY}", f"--namespace={namespace}"),
            }[ends]
            served.kubectl(*command, "--wait=false")
            wait_until(
                f"the memory to be free after the end of {ends}",
                lambda: witness.ask(first, *ask) == [0] * len(ask),
                timeout_s=60,
                every_s=2,
            )
    finally:
        served.kubectl("delete", "namespace", namespace, "--ignore-not-found", "--wait=false")


#: Of the snapshots of jobs that make no save to storage.
EVERY_STEPS = 5


def snapshots_alone(cluster: Cluster) -> str:
    """Makes a policy without periodic saves to storage, and returns its name."""

    def alone(spec: Json) -> None:
        memory = {"everySteps": EVERY_STEPS, "copies": 2}
        spec["checkpoint"] |= {"everySteps": 0, "everySeconds": 0, "memory": memory}

    training_policy(cluster, "snapshots-alone", alone)
    return "snapshots-alone"


def restored_from_memory(run: TrainingRun) -> int:
    """The step that all processes of its last start have restored from the memory of nodes, as their logs say."""
    selector = f"jobset.sigs.k8s.io/jobset-name={run.name}"
    logs = run.cluster.kubectl("logs", f"--namespace={NAMESPACE}", f"--selector={selector}", "--tail=-1").stdout
    restored = {int(step) for step in re.findall(r"restored step=(\d+) from_memory=True", logs)}
    assert len(restored) == 1, f"expected one step in all processes, found {sorted(restored)}"
    return min(restored)


def safe_steps(reader: Job) -> list[int]:
    """For each server the newest step of which it has the parts of both processes. 0: there is none."""
    addresses = servers(reader.cluster).values()
    found = []
    for keys in reader.ask(reader.cluster.nodes[0], *(("keys", address) for address in addresses)):
        places = [key.split("/") for key in keys if "/!done/" in key] if isinstance(keys, list) else []  # no answer
        parts = collections.Counter(step for step, _ in {(int(step), part) for step, _, part, *_ in places})
        found.append(max((step for step, count in parts.items() if count == PROCESSES), default=0))
    return found


def update_servers(cluster: Cluster) -> None:
    cluster.kubectl("rollout", "restart", f"daemonset/{SERVERS}", f"--namespace={OPERATOR_NAMESPACE}")


def kill_a_server(cluster: Cluster) -> None:
    """Its container starts again, and has lost all."""
    name = pods_of_servers(cluster)[0]["metadata"]["name"]
    for process in processes_in(name, "gracepoint.snapshots"):
        process.kill()


def starts_of_servers(cluster: Cluster) -> set[str]:
    """What is unique to each start of each server that serves and stays."""
    return {
        pod["status"]["containerStatuses"][0]["containerID"]
        for pod in pods_of_servers(cluster)
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
    }


@pytest.mark.parametrize(
    ("end", "ended"),
    [
        pytest.param(update_servers, 2, id="update"),
        # Of tests/unit/snapshots without a gang, and of the replay.
        pytest.param(kill_a_server, 1, id="death", marks=pytest.mark.variant),
    ],
)
def test_servers_that_end_while_a_job_trains_cost_no_safe_step(
    served: Cluster, images: Images, end: Callable[[Cluster], None], ended: int
) -> None:
    run = training_run(served, images, f"beside-{ended}", snapshots_alone(served), steps=2000, pace=0.5)
    try:
        run.start()
        run.wait_for_step(2 * EVERY_STEPS)
        query = ("get", f"jobsets.jobset.x-k8s.io/{run.name}", f"--namespace={NAMESPACE}", "--output=json")
        uid = json.loads(served.kubectl(*query).stdout)["metadata"]["uid"]
        with job_in(served, images, NAMESPACE, "reader") as reader:
            reader = dataclasses.replace(reader, uid=uid, rights=frozenset({Right.READ}))
            wait_until("a step in both servers", lambda: 0 not in safe_steps(reader), timeout_s=120, every_s=1)
            before = starts_of_servers(served)
            newest = [max(safe_steps(reader))]
            end(served)

            def have_it() -> bool:
                steps, starts = safe_steps(reader), starts_of_servers(served)
                newest.append(max(steps))
                is_new = len(starts) == len(before) and len(starts - before) == ended
                return is_new and len(steps) == len(before) and 0 not in steps

            hint = f"{ended} new servers, and a step in both"
            wait_until(hint, have_it, timeout_s=300, every_s=1, hint=lambda: f"{newest}")
            assert newest == sorted(newest), "a step that was safe stays so, or a newer one is"
        for trainer in processes_of(run, "train.py"):
            trainer.kill()

        def is_back() -> bool:
            step = run.newest()
            return step is not None and step.attempt > 0

        wait_until("training to go on", is_back, timeout_s=180, every_s=1)
        assert restored_from_memory(run) >= newest[-1]
    finally:
        run.delete()


@pytest.mark.parametrize("ends", [pytest.param("all trainers", marks=pytest.mark.variant), "a node"])
def test_a_job_goes_on_from_memory_though_storage_has_nothing_of_it(
    served: Cluster, images: Images, undisturbed: TrainingRun, ends: str
) -> None:
    """Nothing is announced, and no periodic save is made."""
    run = training_run(served, images, f"memory-{ends.split()[1]}", snapshots_alone(served), pace=0.5)
    try:
        run.start()
        pods = run.wait_for_trainers(1)
        run.wait_for_step(30)
        assert not [path for path in run.checkpoints.glob("*") if path.name.isdigit()]
        if ends == "a node":
            with operator.outliving(served):
                served.lose_node(pods[1].node, delete_object=True)
                served.restore_node(pods[1].node)
                label(served, pods[1].node)
        else:
            for trainer in processes_of(run, "train.py"):
                trainer.kill()
        run.wait_for_end(timeout_s=400)
        assert restored_from_memory(run) >= 30 - 3 * EVERY_STEPS, "three intervals at most, on a machine that is busy"
        differences = run.compare(undisturbed, most=run.steps * 2).differences
        assert [found for found in differences if not found.endswith("was not recorded")] == []
    finally:
        run.delete()


#: Files of a directory of checkpoints: earlier saves have written so many bytes a second.
SLOW_STORAGE = {"version": 1, "processes": PROCESSES, "bytes_per_s": {"streamed": [0.01], "snapshot": [0.01]}}
SPOT_TAINT = "cloud.google.com/impending-node-termination"


def test_a_job_whose_storage_is_too_slow_leaves_a_doomed_node_by_the_memory_of_others(
    served: Cluster, images: Images, undisturbed: TrainingRun
) -> None:
    def rarely(spec: Json) -> None:
        spec["checkpoint"] |= {"everySteps": 1000, "everySeconds": 0, "memory": {"everySteps": 1000, "copies": 2}}

    training_policy(served, "snapshots-rarely", rarely)
    run = training_run(served, images, "evacuated", "snapshots-rarely", pace=0.25)

    def on_slow_storage(_: Json) -> None:
        file = run.checkpoints / ".gracepoint-throughput"
        file.write_text(json.dumps(SLOW_STORAGE))
        file.chmod(0o666)  # trainers are not root

    try:
        run.start(on_slow_storage)
        doomed = run.wait_for_trainers(10)[1].node
        served.kubectl("taint", "node", doomed, f"{SPOT_TAINT}=:NoSchedule")
        evacuated = run.wait_for_phase(Phase.EVACUATED)["status"]
        assert (evacuated["choice"], evacuated["stepsLost"]) == ("Evacuate", 0)
        assert not [path for path in run.checkpoints.glob("*") if path.name.isdigit()]
        with operator.outliving(served):
            served.lose_node(doomed, delete_object=True)
            served.restore_node(doomed)  # a new machine, and a new object
            label(served, doomed)
        run.wait_for_end(timeout_s=300)
        assert restored_from_memory(run) == evacuated["step"]
        committed = run.wait_for_record("Committed", lambda status: status["phase"] == Phase.COMMITTED)["status"]
        assert (committed["step"], committed["stepsLost"]) == (evacuated["step"], 0)
        assert run.compare(undisturbed).differences == ()
    finally:
        run.delete()


def test_the_installation_with_servers_passes_helm_test(served: Cluster) -> None:
    done = served.helm("test", "gracepoint", f"--namespace={OPERATOR_NAMESPACE}", "--timeout=90s")
    assert "Succeeded" in done.stdout
