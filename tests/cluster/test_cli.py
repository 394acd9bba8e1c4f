"""The command line with a job of each kind that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import install
from demo.forms import JOB, JOBSET, TRAINJOB, Form
from tests.cluster.conftest import NAMESPACE, training_run
from tests.cluster.machine import local
from tests.command_line import Done, command
from tests.testcluster import controllers
from tests.testcluster.api import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(JOBSET, id="JobSet"),
        pytest.param(JOB, id="Job", marks=pytest.mark.variant),
        pytest.param(TRAINJOB, id="TrainJob", marks=pytest.mark.controllers),
    ],
)
def test_a_job_is_rehearsed_drawn_shown_and_checked_from_a_pod(
    installed: Cluster, images: install.Images, tmp_path: Path, form: Form
) -> None:
    def ask(*arguments: object) -> Done:
        return command(*arguments, "--namespace", NAMESPACE, "--kubeconfig", installed.kubeconfig)

    if form is TRAINJOB:
        controllers.install(local(installed), controllers.TRAINER)
    created = form.created.partition(".")[0].removesuffix("s")
    run = training_run(installed, images, f"cli-{created}", steps=100_000, form=form)
    named = f"{created}/{run.name}"
    run.start()
    try:
        run.wait_for_trainers(10)
        # The first save of a drill compiles nothing new, and trainers of this machine are slow.
        drill = ask("drill", named, "--deadline", 60, "-o", "json")
        assert drill.code == 0, drill
        assert (drill.json["phase"], drill.json["processes"], drill.json["notAcknowledged"]) == ("Committed", 2, [])

        drawn = ask("timeline", drill.json["preemption"], "--svg", tmp_path / "drill.svg")
        assert drawn.code == 0, drawn
        assert "commits the checkpoint" in (tmp_path / "drill.svg").read_text()

        (job,) = [item for item in ask("status", "-o", "json").json["workloads"] if item["name"] == run.name]
        assert (job["kind"], job["madeBy"]) == (form.kind, "TrainJob" if form is TRAINJOB else None)
        assert (job["running"], job["injected"], job["lastPreemption"]["phase"]) == (2, True, "Committed")

        # The same step, as whoever looks at the volume finds it.
        saved = command("checkpoints", "verify", run.checkpoints / str(drill.json["step"]), "-o", "json")
        assert [report["ok"] for report in saved.json] == [True]

        doctor = ask("doctor", named, "-o", "json")
        states = {check["name"]: (check["state"], check["message"]) for check in doctor.json}
        for name in ("Kubernetes", "definitions", "JobSet", "operator", "webhooks"):
            assert states[name][0] == "ok", states
        for name in ("pod: library", "pod: channel", "pod: storage"):
            assert states[name][0] == "ok", states
        pods = installed.kubectl("get", "pods", f"--namespace={NAMESPACE}", "--output=name").stdout
        assert "-doctor-" not in pods
    finally:
        run.delete()
