"""What the lint finds in Jobs by themselves and in TrainJobs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracepoint_cli.lint.job_checks import LintReport, check
from gracepoint_cli.lint.manifests import jobset_of, named, objects
from tests.command_line import Done, command
from tests.unit.operator.fakes.samples import policy

Json = dict[str, Any]
EXAMPLES = Path(__file__).parents[4] / "examples"
CLAIMS = {"training": {"spec": {"accessModes": ["ReadWriteMany"]}}}


def example(name: str, kind: str) -> Json:
    found = named(objects((EXAMPLES / name).read_text(), name), kind, "transformer")
    assert found is not None
    return found


def job(*, pod: Json | None = None, **spec: Any) -> Json:
    body = example("job.yaml", "Job")
    body["spec"] |= spec
    body["spec"]["template"]["spec"] |= pod or {}
    return body


def lint(tmp_path: Path, *bodies: Json) -> Done:
    """Lints the objects with the example's policy and claim."""
    more = [yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text()) for name in ("policy", "claim")]
    (tmp_path / "x.yaml").write_text(yaml.safe_dump_all([*bodies, *more]))
    return command("lint", tmp_path / "x.yaml", "--offline", "-o", "json")


def rules(done: Done) -> set[str]:
    (report,) = done.json
    return {finding["rule"] for finding in report["findings"]}


def under(body: Json) -> LintReport:
    return check(body, policy("transformer", checkpoint={"directory": "/shared/{jobset}"}), CLAIMS)


def test_the_example_of_a_job_has_no_findings(tmp_path: Path) -> None:
    done = lint(tmp_path, job())
    assert (done.code, rules(done)) == (0, set())
    (report,) = done.json
    assert (report["kind"], report["name"], report["pathsOf"]) == ("Job", "transformer", None)


def test_a_preemption_of_a_job_is_described_in_sentences() -> None:
    said = " ".join(under(job()).effects)
    for words in ("2 processes.", "backoffLimitPerIndex (3)", "waits 10 s before the first replacement", "60 s, the"):
        assert words in said, said


@pytest.mark.parametrize(
    ("body", "rule", "words"),
    [
        pytest.param(job(completionMode=None), "release-contract", "completionMode: Indexed", id="no indices"),
        pytest.param(
            job(pod={"restartPolicy": None}), "release-contract", "Write restartPolicy: Never", id="no restart policy"
        ),
        pytest.param(
            job(pod={"terminationGracePeriodSeconds": None}),
            "default-grace-period",
            "which means 30 s",
            id="no grace period",
        ),
        pytest.param(job(backoffLimitPerIndex=0), "no-restarts", "ends the job for good", id="no restarts"),
        pytest.param(job(activeDeadlineSeconds=60), "time-limit", "the Job then fails", id="a time limit"),
    ],
)
def test_what_a_job_stumbles_over_is_found(body: Json, rule: str, words: str) -> None:
    (finding,) = [finding for finding in under(body).findings if finding.rule == rule]
    assert words in f"{finding.path} {finding.message}"
    assert "JobSet" not in finding.message


def test_a_stored_job_is_judged_by_what_it_has() -> None:
    stored = job(pod={"terminationGracePeriodSeconds": 30})
    stored["metadata"]["uid"] = "u"
    assert under(stored).findings == ()


def test_jobs_without_the_label_are_left_out_of_others(tmp_path: Path) -> None:
    other = job()
    other["metadata"] = {"name": "migrate"}
    assert [report["name"] for report in lint(tmp_path, other, job()).json] == ["transformer"]
    assert "no-policy" in rules(lint(tmp_path, other))


def test_a_trainjob_is_checked_as_the_jobset_that_is_made_of_it(tmp_path: Path) -> None:
    trainjob, runtime = (example("trainjob.yaml", kind) for kind in ("TrainJob", "TrainingRuntime"))
    done = lint(tmp_path, trainjob, runtime)
    assert (done.code, rules(done)) == (0, set()), done
    (report,) = done.json
    assert (report["kind"], report["pathsOf"]) == ("TrainJob", "of the JobSet that is made of it")
    assert "2 processes: node" in report["effects"][0]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param({"trainer": {"command": ["sh", "-c", "python x.py"]}}, "shell-as-first-process", id="command"),
        pytest.param(
            {
                "podSpecOverrides": [
                    {"targetJobs": [{"name": "node"}], "tolerations": [{"operator": "Exists"}]},
                ]
            },
            "catch-all-toleration",
            id="an override of the pods",
        ),
        pytest.param(
            {
                "podTemplateOverrides": [
                    {"targetJobs": [{"name": "node"}], "spec": {"tolerations": [{"operator": "Exists"}]}},
                ]
            },
            "catch-all-toleration",
            id="an override of the pods since 2.1",
        ),
        pytest.param({"runtimeRef": {"name": "other"}}, "runtime-not-seen", id="a runtime that is not there"),
        pytest.param({"trainer": ["x"]}, "unreadable", id="parts of another schema"),
    ],
)
def test_what_a_trainjob_says_of_its_pods_is_checked(tmp_path: Path, change: Json, rule: str) -> None:
    trainjob, runtime = (example("trainjob.yaml", kind) for kind in ("TrainJob", "TrainingRuntime"))
    trainjob["spec"] |= change
    assert rule in rules(lint(tmp_path, trainjob, runtime))


def test_a_trainjob_that_the_api_server_names_is_reported_by_its_prefix(tmp_path: Path) -> None:
    trainjob, runtime = (example("trainjob.yaml", kind) for kind in ("TrainJob", "TrainingRuntime"))
    del trainjob["metadata"]["name"]
    trainjob["metadata"]["generateName"] = "llm-"
    assert [report["name"] for report in lint(tmp_path, trainjob, runtime).json] == ["llm-..."]


def test_what_one_file_lacks_is_taken_from_another(tmp_path: Path) -> None:
    """A file with a policy alone is no error, in whatever order the files are given."""
    policy, jobset = EXAMPLES / "policy.yaml", EXAMPLES / "jobset.yaml"
    for files in ((policy, jobset), (jobset, policy)):
        done = command("lint", "--offline", "-o", "json", *files)
        assert [report["kind"] for report in done.json] == ["JobSet"]
        assert "policy-not-seen" not in rules(done)
    done = command("lint", "--offline", policy)
    assert (done.code, "found CheckpointPolicy, expected" in done.err) == (1, True), done


def test_a_runtime_alone_is_no_job(tmp_path: Path) -> None:
    done = lint(tmp_path, example("trainjob.yaml", "TrainingRuntime"))
    assert done.code == 1
    assert "give both, in one file or in several" in done.err


def test_a_trainjob_sets_nodes_image_and_variables_of_its_runtime() -> None:
    trainjob, runtime = (example("trainjob.yaml", kind) for kind in ("TrainJob", "TrainingRuntime"))
    before = copy.deepcopy((trainjob, runtime))
    trainjob["spec"]["trainer"] = {"numNodes": 4, "image": "mine:2", "env": [{"name": "JAX_PLATFORMS", "value": "tpu"}]}
    made = jobset_of(trainjob, runtime)
    spec = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["parallelism"], spec["completions"], container["image"]) == (4, 4, "mine:2")
    assert container["env"] == [{"name": "JAX_PLATFORMS", "value": "tpu"}]
    assert made["metadata"]["labels"] == {"gracepoint.dev/policy": "transformer"}
    del trainjob["spec"]["trainer"]
    assert (trainjob, runtime) == before, "nothing given is changed"
