"""A trainer that does not run is named where a user looks, and the gang starts again if the policy says so."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo import install
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.names import GROUP, Env
from tests.cluster import operator
from tests.cluster.conftest import ENVIRONMENT, NAMESPACE, training_policy, training_run
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY, KEPT_POLICY = "stalls", "stalls-kept"
MIDDLE, EVERY = 20, 10
#: Longer than the pods of a start come one after the other.
LIMIT_S = 15.0
#: In which a stall is told at the latest, beside what a busy machine takes.
TOLD_S = 30.0
#: Until the kubelet kills the stopped process.
GRACE_S = 15
#: Of the image.
PATH = "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"
#: Python runs this at its start. SIGUSR1 has the main thread hang in C code that holds the interpreter lock, until
#: another signal interrupts that.
HANGS = """
import ctypes, signal
def hang_in_c_code(number, frame):
    ctypes.PyDLL(None).sleep(600)
signal.signal(signal.SIGUSR1, hang_in_c_code)
signal.signal(signal.SIGUSR2, lambda number, frame: None)
"""
#: Until the keeper's words are in the policy on a busy machine.
SEEN_S = 90.0


@pytest.fixture
def run(installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    def change(spec: Json) -> None:
        spec["stalls"] = {"afterSeconds": LIMIT_S, "action": "Restart"}
        spec["checkpoint"]["everySteps"] = EVERY

    training_policy(installed, POLICY, change)
    made = training_run(installed, images, POLICY, POLICY)
    yield made
    made.delete()


def test_a_stopped_trainer_is_named_and_the_gang_restarts(run: TrainingRun, undisturbed: TrainingRun) -> None:
    def brief(jobset: Json) -> None:
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = GRACE_S

    run.start(brief)
    stopped = run.wait_for_trainers(MIDDLE)[1]
    trainer_of(stopped.name).suspend()
    said: list[str] = []

    def told() -> bool:
        status, message = progressing(run)
        said.extend([message] if status == "False" else [])
        return bool(said)

    wait_until("the policy to say so", told, timeout_s=LIMIT_S + TOLD_S, every_s=0.2)
    assert f"process 1 ({stopped.name})" in said[0]
    # A save that had begun before waits for the stopped process, too.
    assert re.search(r" in (training after|background save of) step \d+", said[0])
    query = ("get", "events", f"--namespace={NAMESPACE}", "--field-selector=reason=TrainingStalled", "--output=name")
    wait_until("the Event", lambda: bool(run.cluster.kubectl(*query).stdout), timeout_s=30)
    run.wait_for_end()  # the kubelet kills the stopped process when its grace period is over
    wait_until("the policy to say that it is over", lambda: progressing(run)[0] == "True", timeout_s=TOLD_S)
    snapshot = run.look()
    assert (snapshot.restarts, snapshot.restarts_counted) == (1, 1), "the program hung"
    # The stopped process did not write down its last steps. Everything that was written down is equal.
    differences = run.compare(undisturbed, most=2 * run.steps).differences
    assert [found for found in differences if not found.endswith("was not recorded")] == []


@pytest.fixture
def kept(installed: Cluster, images: install.Images) -> Iterator[TrainingRun]:
    """A run with a keeper beside each trainer, and py-spy in both containers."""

    def change(spec: Json) -> None:
        spec["stalls"] = {"afterSeconds": LIMIT_S, "action": "Report"}
        spec["checkpoint"].update(writer="Keeper", everySteps=EVERY)

    tools = installed.shared_dir / "tools"
    tools.mkdir(exist_ok=True)
    shutil.copy(Path(sys.executable).with_name("py-spy"), tools)
    (tools / "sitecustomize.py").write_text(HANGS)
    training_policy(installed, KEPT_POLICY, change)
    environment = {**ENVIRONMENT, "PATH": f"/shared/tools:{PATH}", "PYTHONPATH": "/shared/tools"}
    # So slow that the second stall comes before the end.
    made = training_run(installed, images, KEPT_POLICY, KEPT_POLICY, pace=0.5, environment=environment)
    yield made
    made.delete()


def share_processes(workload: Json) -> None:
    workload["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["shareProcessNamespace"] = True


def test_a_keeper_says_what_a_trainer_does_that_does_not_run(kept: TrainingRun, undisturbed: TrainingRun) -> None:
    kept.start(share_processes)
    pod = kept.wait_for_trainers(MIDDLE)[1].name
    trainer = trainer_of(pod)
    trainer.suspend()
    try:
        stopped = seen_by_keeper(kept, pod, "state T")
        assert stopped.startswith("is stopped by a signal (state T); it is at: File "), stopped
        # Whichever comes to its limit first: it is stopped anywhere, also where it begins a save.
        stages = ("training", "periodic save", "background save")
        shown = re.compile(rf'gracepoint_stalled_pods{{.*stage="({"|".join(stages)})",trainer="{pod}"')
        operator.wait_for_count(kept.cluster, f"the stall of {pod}", lambda now: any(map(shown.match, now)))
    finally:
        trainer.resume()
    wait_until("the end of the first stall", lambda: progressing(kept, KEPT_POLICY)[0] == "True", timeout_s=SEEN_S)
    trainer.send_signal(signal.SIGUSR1)
    hangs = seen_by_keeper(kept, pod, "hang_in_c_code")
    trainer.send_signal(signal.SIGUSR2)
    assert hangs.startswith("waits in the kernel (state S"), hangs
    assert hangs.endswith("in hang_in_c_code"), hangs
    kept.wait_for_end()
    wait_until("the end of the second", lambda: progressing(kept, KEPT_POLICY)[0] == "True", timeout_s=SEEN_S)
    assert kept.look().restarts == 0
    assert kept.compare(undisturbed).differences == ()


def seen_by_keeper(run: TrainingRun, pod: str, what: str) -> str:
    """Waits until the policy says that the keeper of a pod sees this of its trainer, process 1. Returns all of it."""
    words = f"process 1 ({pod}) does not run: as its worker process sees, it "
    said = [""]

    def told() -> bool:
        status, said[0] = progressing(run, KEPT_POLICY)
        return status == "False" and words in said[0] and what in said[0].partition(words)[2]

    def hint() -> str:
        query = ("logs", pod, f"--namespace={NAMESPACE}", "--container=gracepoint-keeper", "--tail=30")
        return f": {said[0]}\n{run.cluster.kubectl(*query).stdout}"

    wait_until("the policy to say so", told, timeout_s=LIMIT_S + SEEN_S, every_s=0.2, hint=hint)
    return said[0].partition(words)[2]


def progressing(run: TrainingRun, name: str = POLICY) -> tuple[str, str]:
    """Status and message of a policy's condition."""
    policies = run.cluster.listed(f"checkpointpolicies.{GROUP}", namespace=NAMESPACE)
    (policy,) = [each for each in policies if each["metadata"]["name"] == name]
    conditions = policy.get("status", {}).get("conditions", [])
    found = [each for each in conditions if each["type"] == "Progressing"]
    return (found[0]["status"], found[0]["message"]) if found else ("", "")


def trainer_of(pod: str) -> psutil.Process:
    """The training process of a pod, on this machine."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(Env.POD_NAME) == pod and "train.py" in " ".join(process.cmdline()):
                return process
    raise AssertionError(f"no training process of {pod} on this machine")
