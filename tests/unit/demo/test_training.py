from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.testcluster.api import Cluster, ClusterError
from tests.unit.demo.fakes.answers import Answers


def jobset(**status: object) -> dict[str, Any]:
    return {"kind": "JobSet", "metadata": {"name": "one"}, "status": status}


def pod(process: int, *, attempt: int = 0, phase: str = "Running", jobset: str = "one") -> dict[str, Any]:
    labels = {
        "jobset.sigs.k8s.io/jobset-name": jobset,
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        "batch.kubernetes.io/job-completion-index": str(process),
    }
    name = f"{jobset}-workers-0-{process}-{attempt}"
    metadata = {"name": name, "labels": labels}
    return {
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": "node-1"},
        "status": {"phase": phase},
    }


def preemption(epoch: int, phase: str | None = None) -> dict[str, Any]:
    status = {"phase": phase, "message": "why"} if phase else {}
    spec = {"jobSet": {"name": "one"}, "epoch": epoch}
    return {"kind": "Preemption", "metadata": {"name": f"one-{epoch}"}, "spec": spec, "status": status}


def run_on(cluster: Cluster) -> TrainingRun:
    return TrainingRun(cluster, "one", namespace="here", image="trainer:1", steps=7, flags={"width": 32})


def test_the_manifest_is_the_examples_with_the_runs_own_names(tmp_path: Path) -> None:
    made = run_on(Answers(tmp_path)).manifest()
    assert made["metadata"] == {
        "name": "one",
        "namespace": "here",
        "labels": {"gracepoint.dev/policy": "transformer"},
    }
    spec = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["image"] == "trainer:1"
    assert spec["containers"][0]["args"] == ["--output=/shared/output/here/one", "--steps=7", "--width=32"]
    assert spec["volumes"][0]["hostPath"]["path"] == str(tmp_path)
    (constraint,) = spec["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"] == {"jobset.sigs.k8s.io/jobset-name": "one"}


def test_a_run_without_a_policy_has_no_label(tmp_path: Path) -> None:
    run = TrainingRun(Answers(tmp_path), "one", namespace="here", image="i", steps=7, policy=None)
    assert run.manifest()["metadata"]["labels"] == {}


def test_variables_of_a_run_stand_next_to_the_examples(tmp_path: Path) -> None:
    run = TrainingRun(Answers(tmp_path), "one", namespace="here", image="i", steps=7, environment={"XLA_FLAGS": "-x"})
    container = run.manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["env"] == [{"name": "JAX_PLATFORMS", "value": "cpu"}, {"name": "XLA_FLAGS", "value": "-x"}]


def test_a_test_may_change_the_jobset_before_it_is_created(tmp_path: Path) -> None:
    cluster = Answers(tmp_path)
    run_on(cluster).start(change=lambda jobset: jobset["spec"].update(ttlSecondsAfterFinished=5))
    assert cluster.created[0]["spec"]["ttlSecondsAfterFinished"] == 5


def test_reused_name_is_refused_as_its_checkpoints_would_be_restored(tmp_path: Path) -> None:
    run_on(Answers(tmp_path)).start()
    with pytest.raises(ClusterError, match="a run named one was here before"):
        run_on(Answers(tmp_path)).start()


def test_a_look_sees_only_what_belongs_to_the_run(tmp_path: Path) -> None:
    others = [pod(0, jobset="two"), jobset() | {"metadata": {"name": "two"}}]
    cluster = Answers(tmp_path, *others, jobset(restarts=1), pod(1, attempt=1), pod(0, attempt=1))
    seen = run_on(cluster).look()
    assert [(p.process, p.attempt) for p in seen.pods] == [(0, 1), (1, 1)]
    assert seen.restarts == 1
    assert len(seen.running()) == 2


def test_the_pods_of_the_attempt_before_do_not_count_as_running(tmp_path: Path) -> None:
    assert run_on(Answers(tmp_path, jobset(restarts=1), pod(0), pod(1))).look().running() == ()


def test_waiting_for_a_phase_is_over_when_a_later_one_is_reached(tmp_path: Path) -> None:
    run = run_on(Answers(tmp_path, jobset(), preemption(0, "Durable")))
    assert run.wait_for_phase(Phase.AGREED, timeout_s=0)["metadata"]["name"] == "one-0"


def test_waiting_for_an_end_refuses_another_end_with_its_message(tmp_path: Path) -> None:
    run = run_on(Answers(tmp_path, jobset(), preemption(0, "Failed")))
    with pytest.raises(ClusterError, match="to end as Committed, found Failed: why"):
        run.wait_for_phase(Phase.COMMITTED, timeout_s=0)


def test_waiting_for_the_second_preemption_is_not_content_with_the_first(tmp_path: Path) -> None:
    run = run_on(Answers(tmp_path, jobset(), preemption(0, "Committed")))
    with pytest.raises(ClusterError, match="in vain"):
        run.wait_for_phase(epoch=1, timeout_s=0)


def test_record_may_be_completed_after_the_jobs_end(tmp_path: Path) -> None:
    class Slowly(Answers):
        """Tells more at each look."""

        def kubectl(self, *args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
            (_, record) = self.items
            record["status"]["received"] = record["status"].get("received", 0) + 1
            return super().kubectl(*args, **kwargs)

    run = run_on(Slowly(tmp_path, jobset(terminalState="Completed"), preemption(0, "Committed")))
    record = run.wait_for_record("both", lambda status: status["received"] == 2, timeout_s=10)
    assert record["status"]["received"] == 2


def test_waiting_for_a_record_ends_with_what_it_said_last(tmp_path: Path) -> None:
    run = run_on(Answers(tmp_path, jobset(), preemption(0, "Expired")))
    with pytest.raises(ClusterError, match=r"the newest Preemption of one to say that it ended(.|\n)*'Expired'"):
        run.wait_for_record("that it ended well", lambda status: status["phase"] == "Committed", timeout_s=0)


def test_the_trainers_are_returned_once_they_are_seen_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on(Answers(tmp_path, jobset(), pod(1), pod(0)))
    monkeypatch.setattr(run, "wait_for_step", lambda step: None)
    assert [trainer.process for trainer in run.wait_for_trainers(3)] == [0, 1]


def test_waiting_ends_with_how_the_job_looked(tmp_path: Path) -> None:
    run = run_on(Answers(tmp_path, jobset(), pod(0, phase="Pending")))
    with pytest.raises(ClusterError, match=r"one-workers-0-0-0 Pending on node-1; newest step recorded: none"):
        run.wait_for_step(3, timeout_s=0)


def test_a_completed_job_is_waited_for_no_longer(tmp_path: Path) -> None:
    run_on(Answers(tmp_path, jobset(terminalState="Completed"))).wait_for_end(timeout_s=0)
