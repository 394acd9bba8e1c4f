"""How a user names a workload on the command line."""

from __future__ import annotations

import pytest

from gracepoint_cli.cluster import Named, parse
from gracepoint_operator.workloads import MAKERS, TYPES
from tests.command_line import command


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        pytest.param("llm", None, "llm", id="a name"),
        pytest.param("job/llm", "Job", "llm", id="with its kind"),
        pytest.param("jobs/llm", "Job", "llm", id="in the plural"),
        pytest.param("job.batch/llm", "Job", "llm", id="as kubectl prints it"),
        pytest.param("JobSet/llm", "JobSet", "llm", id="as manifests write it"),
        pytest.param("jobset.jobset.x-k8s.io/llm", "JobSet", "llm", id="with its group"),
        pytest.param("trainjob/llm", "TrainJob", "llm", id="of the Trainer"),
    ],
)
def test_names_are_written_as_for_kubectl(text: str, kind: str | None, name: str) -> None:
    assert parse(text) == Named(kind, name)


@pytest.mark.parametrize("known", [*TYPES, *MAKERS], ids=lambda known: known.name)
def test_every_kind_of_the_operator_can_be_named(known: object) -> None:
    name = getattr(known, "name")  # noqa: B009
    assert parse(f"{name.lower()}/x").kind == name


@pytest.mark.parametrize("text", ["deployment/llm", "job.apps/llm", "job/", "a/job/llm"])
def test_other_kinds_are_refused_with_those_there_are(text: str) -> None:
    done = command("goodput", text)
    assert done.code == 2
    assert "jobset/NAME, job/NAME, trainjob/NAME" in done.err


def test_a_trainjob_means_its_jobset() -> None:
    assert parse("trainjob/llm").of_workload == "JobSet"
    assert parse("llm").of_workload is None
