"""Real pods that do not train, for reasons that are not their programs', and what JobSet counts of it."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.names import (
    DEFAULT_NOT_JOINED_EXIT_CODE,
    DEFAULT_SAVED_EXIT_CODE,
    JOBSET_LABEL_JOB_INDEX,
    JOBSET_LABEL_NAME,
    JOBSET_LABEL_REPLICATED_JOB,
    JOBSET_LABEL_RESTART_ATTEMPT,
    Env,
)
from tests.cluster import operator
from tests.cluster.conftest import ENVIRONMENT, NAMESPACE, POLICY, training_run
from tests.cluster.machine import end_at_once
from tests.cluster.small import JOBSETS, SLEEP, container, create, get, jobset, replicated_job
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

#: Leaves once, as after a save. JobSet's attempt is in the environment.
LEAVES = f"""
import os, sys, time
time.sleep(3)
if os.environ["{Env.RESTART_ATTEMPT}"] == "0":
    sys.exit({DEFAULT_SAVED_EXIT_CODE})
time.sleep(3600)
"""

#: Trains as the example does. In the first attempt, the process whose number is SLOW goes on after its SIGTERM, and
#: comes to ``attach`` when the other process of the second attempt does. That one has left before, as after a save.
STRAGGLES = f"""
import os, pathlib, runpy, signal, sys, time
import gracepoint, jax
output = pathlib.Path(next(arg for arg in sys.argv if arg.startswith("--output=")).partition("=")[2])
def wait_for(name):
    while not (output / name).exists():
        time.sleep(0.05)
is_slow = os.environ["{Env.JOB_INDEX}"] == os.environ["SLOW"]
if os.environ["{Env.RESTART_ATTEMPT}"] == "0":
    if not is_slow:
        wait_for("leave")
        sys.exit({DEFAULT_SAVED_EXIT_CODE})
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    (output / "there").touch()
    while not told:
        time.sleep(0.05)
    wait_for("second")
elif not is_slow:
    (output / "second").touch()
sys.path.insert(0, "/app")
runpy.run_path("/app/train.py", run_name="__main__")
"""
#: Keeps a pod's object, so that its end can be read.
HELD = "gracepoint.test/held"
#: Seconds within which the straggler has left, once the second attempt is about to attach.
LEAVES_S = 10.0


def restarts(cluster: Cluster, name: str) -> tuple[int, int]:
    """All restarts of a JobSet, and those that count."""
    status = get(cluster, f"{JOBSETS}/{name}").get("status", {})
    return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)


def pods(cluster: Cluster, name: str, replicated: str) -> list[Json]:
    selector = f"--selector={JOBSET_LABEL_NAME}={name},{JOBSET_LABEL_REPLICATED_JOB}={replicated}"
    found: list[Json] = get(cluster, "pods", selector)["items"]
    return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def delete(cluster: Cluster, name: str) -> None:
    cluster.kubectl("delete", f"{JOBSETS}/{name}", f"--namespace={NAMESPACE}", "--wait=false")


def test_a_pod_that_its_kubelet_refuses_is_made_again_and_the_others_wait(installed: Cluster, images: Images) -> None:
    """More than its node has: nobody schedules it, as it names the node itself."""
    node = next(item["metadata"]["name"] for item in get(installed, "nodes")["items"])
    greedy = container("train", images.trainer, SLEEP, resources={"requests": {"cpu": "1000", "memory": "32Mi"}})
    body = jobset(
        "refused",
        replicated_job("waiting", container("train", images.trainer, SLEEP)),
        replicated_job("greedy", greedy, nodeName=node),
        policy=POLICY,
    )
    name = create(installed, body)[0]["metadata"]["name"]
    try:
        wait_until("the first pod to run", lambda: bool(pods(installed, name, "waiting")), timeout_s=60, every_s=0.5)
        (waiting,) = pods(installed, name, "waiting")
        seen: dict[str, Json] = {}

        def twice_refused() -> bool:
            seen.update({pod["metadata"]["uid"]: pod for pod in pods(installed, name, "greedy")})
            return sum(pod["status"].get("reason") == "OutOfcpu" for pod in seen.values()) >= 2

        wait_until("the kubelet to refuse two pods", twice_refused, timeout_s=120, every_s=0.5)
        (still,) = pods(installed, name, "waiting")
        assert still["metadata"]["uid"] == waiting["metadata"]["uid"]
        assert restarts(installed, name) == (0, 0)
    finally:
        delete(installed, name)


def test_pods_that_an_ordinary_sidecar_keeps_running_are_ended_with_consent(installed: Cluster, images: Images) -> None:
    operator.let_delete_pods(installed)

    def ends_sidecars(spec: Json) -> None:
        spec["sidecars"] = {"endWithTraining": True}

    apply_policy(installed, "sidecars", namespace=NAMESPACE, change=ends_sidecars)
    workers = replicated_job("workers", container("train", images.trainer, LEAVES), pods=2)
    workers["template"]["spec"]["template"]["spec"]["containers"].append(container("proxy", images.trainer, SLEEP))
    name = create(installed, jobset("sidecar", workers, policy="sidecars"))[0]["metadata"]["name"]
    try:

        def came_back() -> bool:
            phases = [pod["status"].get("phase") for pod in pods(installed, name, "workers")]
            return restarts(installed, name)[0] == 1 and phases == ["Running", "Running"]

        wait_until("the gang to come back", came_back, timeout_s=120, every_s=0.5)
        assert restarts(installed, name) == (1, 0)
    finally:
        delete(installed, name)


def process(run: TrainingRun, number: int, attempt: int) -> Json:
    """The pod of a process, where each process has a Job of its own."""
    labels = {
        JOBSET_LABEL_NAME: run.name,
        JOBSET_LABEL_JOB_INDEX: number,
        JOBSET_LABEL_RESTART_ATTEMPT: attempt,
    }
    selector = ",".join(f"{label}={value}" for label, value in labels.items())
    found: list[Json] = get(run.cluster, "pods", f"--selector={selector}")["items"]
    assert len(found) == 1, f"expected one pod of process {number} in attempt {attempt}, found {len(found)}"
    return found[0]


@contextlib.contextmanager
def held(cluster: Cluster, pod: str) -> Iterator[None]:
    """The object of a pod stays inside of this, also after its end."""

    def patch(finalizers: list[str]) -> bool:
        body = json.dumps({"metadata": {"finalizers": finalizers}})
        cluster.kubectl("patch", "pod", pod, f"--namespace={NAMESPACE}", "--type=merge", "--patch", body)
        return True

    def others() -> list[str]:
        return [name for name in get(cluster, f"pod/{pod}")["metadata"].get("finalizers", []) if name != HELD]

    patch([*others(), HELD])
    try:
        yield
    finally:
        wait_until(f"pod {pod} to be let go", lambda: patch(others()), timeout_s=20)


@pytest.mark.parametrize("slow", [0, pytest.param(1, marks=pytest.mark.variant)])
def test_a_process_that_outlives_its_attempt_is_refused_by_the_next_one_which_trains_with_its_own(
    slow: int, installed: Cluster, images: Images
) -> None:
    """JobSet makes each Job again as soon as its own pods are gone, so the pods of two attempts run side by side."""
    run = training_run(installed, images, f"straggler-{slow}", steps=10, environment={**ENVIRONMENT, "SLOW": str(slow)})

    def straggles(jobset: Json) -> None:
        (workers,) = jobset["spec"]["replicatedJobs"]
        workers["replicas"] = 2
        workers["template"]["spec"] |= {"parallelism": 1, "completions": 1}
        pod = workers["template"]["spec"]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = 120
        pod["containers"][0] |= {
            "command": ["python", "-u", "-c", STRAGGLES],
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }

    run.start(straggles)
    try:
        wait_until("the first attempt", (run.output / "there").exists, timeout_s=120)
        straggler = process(run, slow, 0)["metadata"]["name"]
        with held(installed, straggler):
            (run.output / "leave").touch()

            def end() -> Json | None:
                status = get(installed, f"pod/{straggler}")["status"]["containerStatuses"][0]
                ended: Json | None = status["state"].get("terminated")
                return ended

            wait_until(f"the end of {straggler}", lambda: end() is not None, timeout_s=120)
            ended = end() or {}
            other = process(run, 1 - slow, 1)
            second = other["metadata"]["name"]
            assert ended["exitCode"] == DEFAULT_NOT_JOINED_EXIT_CODE, ended
            assert (
                f"process {slow} ({straggler}) of attempt 0 leaves, as process {1 - slow} ({second}) of attempt 1 "
                "has started" in ended["message"]
            )
            finished_unix_s = datetime.datetime.fromisoformat(ended["finishedAt"]).timestamp()
            assert finished_unix_s - (run.output / "second").stat().st_mtime < LEAVES_S
            assert other["status"]["phase"] == "Running"
            assert restarts(installed, run.name) == (1, 0)
        run.wait_for_end(timeout_s=180)
        assert process(run, 1 - slow, 1)["metadata"]["uid"] == other["metadata"]["uid"]
        said = installed.kubectl("logs", second, f"--namespace={NAMESPACE}").stdout
        assert f"process {slow} ({straggler}) of attempt 0" in said
        assert restarts(installed, run.name) == (1, 0)
    finally:
        end_at_once(run)
