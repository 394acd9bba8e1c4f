"""A pod finds its place in its environment and labels; nothing here could reach an API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracepoint.errors import SettingsError
from gracepoint.multihost.distributed import Place, detect, read_labels
from gracepoint.wire.names import Env

#: Of the second pod of the second of two Jobs, as a downward-API volume shows them.
LABELS = """\
batch.kubernetes.io/job-completion-index="1"
jobset.sigs.k8s.io/global-replicas="2"
jobset.sigs.k8s.io/job-index="1"
jobset.sigs.k8s.io/jobset-name="gpt"
jobset.sigs.k8s.io/jobset-uid="uid-7"
jobset.sigs.k8s.io/replicatedjob-name="workers"
jobset.sigs.k8s.io/replicatedjob-replicas="2"
jobset.sigs.k8s.io/restart-attempt="3"
team="a=b"
"""
INJECTED = {
    Env.JOBSET_NAME: "gpt",
    Env.REPLICATED_JOB: "workers",
    Env.PROCESS_COUNT: "8",
    Env.PROCESS_OFFSET: "2",
    Env.PODS_PER_JOB: "3",
    Env.JOB_INDEX: "1",
    "JOB_COMPLETION_INDEX": "2",
    Env.COORDINATOR_JOB: "leader",
    Env.COORDINATOR_PORT: "9000",
    Env.SUBDOMAIN: "net",
}


@pytest.fixture
def labels(tmp_path: Path) -> dict[str, str]:
    file = tmp_path / "labels"
    file.write_text(LABELS)
    return read_labels(str(file))


def test_an_injected_pod_needs_nothing_else() -> None:
    assert detect(INJECTED, {}, Place()) == Place("gpt-leader-0-0.net:9000", 8, 2 + 1 * 3 + 2)


def test_an_injected_pod_of_a_job_alone_needs_nothing_else() -> None:
    environ = {
        Env.JOBSET_NAME: "gpt",
        Env.PROCESS_COUNT: "4",
        Env.PODS_PER_JOB: "4",
        "JOB_COMPLETION_INDEX": "3",
        Env.COORDINATOR_PORT: "9000",
        Env.SUBDOMAIN: "net",
    }
    assert detect(environ, {}, Place()) == Place("gpt-0.net:9000", 4, 3)


def test_labels_alone_give_a_pod_its_index(labels: dict[str, str]) -> None:
    assert detect({}, labels, Place(num_processes=4)) == Place("gpt-workers-0-0.gpt:8476", 4, 3)


def test_the_environment_goes_before_the_labels(labels: dict[str, str]) -> None:
    environ = {"JOB_COMPLETION_INDEX": "0", Env.PROCESS_COUNT: "4", "JAX_COORDINATOR_PORT": "1234"}
    assert detect(environ, labels, Place()) == Place("gpt-workers-0-0.gpt:1234", 4, 2)


def test_arguments_go_before_everything(labels: dict[str, str]) -> None:
    given = Place("host:1", 16, 9)
    assert detect(INJECTED, labels, given) == given


def test_an_empty_variable_of_the_downward_api_says_nothing(labels: dict[str, str]) -> None:
    assert detect({Env.JOB_INDEX: ""}, labels, Place(num_processes=4)) == Place("gpt-workers-0-0.gpt:8476", 4, 3)


def test_the_jobsets_own_coordinator_is_taken(labels: dict[str, str]) -> None:
    labels["jobset.sigs.k8s.io/coordinator"] = "gpt-workers-0-0.other"
    found = detect({}, labels, Place(num_processes=4))
    assert found is not None
    assert found.coordinator_address == "gpt-workers-0-0.other:8476"


def test_a_coordinator_that_is_not_process_0_is_refused_in_process_0(labels: dict[str, str]) -> None:
    labels["jobset.sigs.k8s.io/coordinator"] = "gpt-driver-0-0.gpt"
    labels["jobset.sigs.k8s.io/job-index"] = "0"
    environ = {"JOB_COMPLETION_INDEX": "0"}
    with pytest.raises(SettingsError, match=r"expected the pod of process 0, gpt-workers-0-0, .* found gpt-driver-0-0"):
        detect(environ, labels, Place(num_processes=4))


def test_the_number_of_processes_is_in_no_label(labels: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=r"num_processes: .*JobSet 'gpt', which no label says"):
        detect({}, labels, Place())


def test_a_number_that_does_not_fit_the_jobs_is_refused(labels: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="a multiple of the 2 Jobs of JobSet 'gpt', found 5"):
        detect({}, labels, Place(num_processes=5))


def test_where_other_jobs_are_in_the_jobset_no_guess_is_made(labels: dict[str, str]) -> None:
    labels["jobset.sigs.k8s.io/global-replicas"] = "3"
    with pytest.raises(SettingsError, match=Env.PODS_PER_JOB):
        detect({}, labels, Place(num_processes=4))
    environ = {Env.PODS_PER_JOB: "2", Env.COORDINATOR_JOB: "workers"}
    assert detect(environ, labels, Place(num_processes=4)) == Place("gpt-workers-0-0.gpt:8476", 4, 3)


def test_in_a_plain_indexed_job_the_completion_index_is_the_process_id() -> None:
    assert detect({"JOB_COMPLETION_INDEX": "2"}, {}, Place()) == Place(None, None, 2)
    assert detect({"JOB_COMPLETION_INDEX": "2"}, {}, Place("host:1", 4, 0)) == Place("host:1", 4, 0)


def test_outside_of_kubernetes_nothing_is_detected() -> None:
    assert detect({"PATH": "/bin"}, {}, Place()) is None


def test_a_misspelt_variable_is_refused_here_too() -> None:
    with pytest.raises(SettingsError, match="GRACEPOINT_PROCESS_CUONT"):
        detect({**INJECTED, "GRACEPOINT_PROCESS_CUONT": "8"}, {}, Place())


def test_labels_that_are_not_shown_are_none(tmp_path: Path) -> None:
    assert read_labels(str(tmp_path / "labels")) == {}


def test_a_label_keeps_what_follows_its_first_equals_sign(labels: dict[str, str]) -> None:
    assert labels["team"] == "a=b"
