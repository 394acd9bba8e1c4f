"""Whoever may edit a namespace takes requests back there, and changes and deletes no record."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.chart.conftest import Helm, helm, template
from tests.testcluster.api import ClusterError
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until
from tests.unit.operator.fakes import objects

__all__ = ["helm", "template"]

_KINDS = ("ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
_ALICE = "--as=alice"
_OPERATOR = "--as=system:serviceaccount:gp-system:gp-gracepoint"
_NAMESPACES = "--as=system:serviceaccount:kube-system:namespace-controller"
_RECORD = f"train-{objects.JOBSET_UID[:8]}-1"


@pytest.fixture(scope="module")
def people(api_server: ApiServer, template: Helm) -> Iterator[ApiServer]:
    """The chart's roles and policies; alice may edit the namespace."""
    rendered = template()
    assert rendered.returncode == 0, rendered.stderr
    wanted = [body for body in yaml.safe_load_all(rendered.stdout) if body and body["kind"] in _KINDS]
    api_server.create(*wanted)
    # Both stay if the fixture was there before, as nothing here ends namespaces.
    api_server.kubectl("create", "namespace", objects.NAMESPACE, check=False)
    api_server.kubectl(
        *("create", "rolebinding", "alice", f"--namespace={objects.NAMESPACE}"),
        *("--clusterrole=gp-gracepoint-edit", "--user=alice"),
        check=False,
    )
    record = objects.preemption(1)
    wait_until("the policy to be in force", lambda: _is_refused(api_server, record), timeout_s=60)
    try:
        yield api_server
    finally:
        rest = {"apiVersion": "v1", "kind": "List", "items": wanted}
        api_server.kubectl("delete", "-f", "-", stdin=json.dumps(rest))


def _is_refused(server: ApiServer, record: objects.Body) -> bool:
    done = server.kubectl("create", "--dry-run=server", "-f", "-", stdin=_text(record), check=False)
    return done.returncode != 0 and "which only the operator makes" in done.stderr


def _text(body: objects.Body) -> str:
    meta = {key: body["metadata"][key] for key in ("name", "namespace")}
    return json.dumps({**body, "apiVersion": "gracepoint.dev/v1beta1", "kind": "Preemption", "metadata": meta})


def test_who_may_ask_may_take_it_back(people: ApiServer) -> None:
    spec = {"jobSet": {"name": "train"}, "deadlineSeconds": 600}
    for name in ("one", "other"):
        body = {"metadata": {"name": name, "namespace": objects.NAMESPACE}, "spec": spec}
        people.kubectl("create", "-f", "-", _ALICE, stdin=_text(body))
    where = (f"--namespace={objects.NAMESPACE}", _ALICE)
    people.kubectl("patch", "preemption", "one", "--type=merge", '-p={"spec": {"retracted": true}}', *where)
    people.kubectl("delete", "preemption", "other", *where)
    people.kubectl("delete", "preemption", "one", *where)


def test_record_is_changed_and_deleted_only_by_operator_and_namespace_controller(people: ApiServer) -> None:
    where = f"--namespace={objects.NAMESPACE}"
    moves = '-p={"spec": {"moves": 1}}'
    change = ("patch", "preemption", _RECORD, "--type=merge", moves, where)
    for deleted_by in (_OPERATOR, _NAMESPACES):
        people.kubectl("create", "-f", "-", _OPERATOR, stdin=_text(objects.preemption(1)))
        for refused in (change, ("delete", "preemption", _RECORD, where)):
            with pytest.raises(ClusterError, match="which the operator changes and deletes"):
                people.kubectl(*refused, _ALICE)
        people.kubectl(*change, _OPERATOR)
        people.kubectl("delete", "preemption", _RECORD, where, deleted_by)
