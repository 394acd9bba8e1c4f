"""How workloads and their Jobs and pods are read."""

from __future__ import annotations

import pytest

from gracepoint.wire import names
from gracepoint_operator import workloads
from gracepoint_operator.kube.objects import Membership
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.workloads import membership_of
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.objects import JOBSET_UID

UID, ATTEMPT = names.JOBSET_LABEL_UID, names.JOBSET_LABEL_RESTART_ATTEMPT


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        pytest.param({}, Membership(), id="no labels"),
        pytest.param({UID: "", ATTEMPT: "2"}, Membership(), id="empty UID"),
        pytest.param({UID: "u"}, Membership("u", 0), id="no attempt"),
        pytest.param({UID: "u", ATTEMPT: "2"}, Membership("u", 2), id="attempt"),
        pytest.param({UID: "u", ATTEMPT: "two"}, Membership("u", -1), id="attempt is no number"),
    ],
)
def test_labels_name_the_workload_and_the_attempt(labels: dict[str, str], expected: Membership) -> None:
    assert membership_of(labels) == expected


def test_jobs_and_pods_belong_to_their_workload() -> None:
    pod, job = workloads.read_pod(objects.pod(attempt=3)), workloads.read_job(objects.job())
    assert (pod.workload_uid, pod.restart_attempt, job.workload_uid) == (JOBSET_UID, 3, JOBSET_UID)


def test_each_type_reads_its_own_objects() -> None:
    read = workloads.BY_NAME["JobSet"].read(objects.jobset(restarts=2))
    assert (read.kind, read.name, read.uid, read.restarts) == ("JobSet", "train", JOBSET_UID, 2)
    assert (read.deleted, read.finished) == (False, False)


def test_a_kind_knows_its_place_in_the_api() -> None:
    kind = workloads.BY_NAME["JobSet"].kind
    assert (kind.group, kind.version, kind.api_version) == ("jobset.x-k8s.io", "v1alpha2", "jobset.x-k8s.io/v1alpha2")
    assert workloads.BY_PLACE[kind].name == "JobSet"


def test_a_name_that_no_record_takes_makes_a_pod_unreadable() -> None:
    body = objects.pod()
    body["metadata"]["name"] = "\ud800"  # half of a pair, which JSON can hold and UTF-8 cannot
    with pytest.raises(Unreadable, match="Unicode"):
        workloads.read_pod(body)
