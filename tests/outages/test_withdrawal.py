"""Whoever may edit a namespace asks for preemptions there and takes that back, and writes no record."""

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

_KINDS = ("ClusterRole", "ClusterRoleBinding")
_ALICE = "--as=alice"
_OPERATOR = "--as=system:serviceaccount:gp-system:gp-gracepoint"
_RECORD = f"train-{objects.JOBSET_UID[:8]}-1"


@pytest.fixture(scope="module")
def people(api_server: ApiServer, template: Helm) -> Iterator[ApiServer]:
    """The chart's roles; alice may edit the namespace."""
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
    wait_until("alice to have her rights", lambda: _may(api_server, "create", "preemptionrequests"), timeout_s=60)
    try:
        yield api_server
    finally:
        rest = {"apiVersion": "v1", "kind": "List", "items": wanted}
        api_server.kubectl("delete", "-f", "-", stdin=json.dumps(rest))


def _may(server: ApiServer, verb: str, resource: str) -> bool:
    where = f"--namespace={objects.NAMESPACE}"
    return server.kubectl("auth", "can-i", verb, resource, where, _ALICE, check=False).stdout.strip() == "yes"


def _text(body: objects.Body) -> str:
    meta = {key: body["metadata"][key] for key in ("name", "namespace")}
    return json.dumps({**body, "metadata": meta})


def test_who_may_ask_may_take_it_back(people: ApiServer) -> None:
    for name in ("one", "other"):
        people.kubectl("create", "-f", "-", _ALICE, stdin=_text(objects.request(name)))
    where = (f"--namespace={objects.NAMESPACE}", _ALICE)
    people.kubectl("patch", "preemptionrequest", "one", "--type=merge", '-p={"spec": {"retracted": true}}', *where)
    people.kubectl("delete", "preemptionrequest", "other", *where)
    people.kubectl("delete", "prereq", "one", *where)


def test_records_are_written_by_the_operator_and_read_by_people(people: ApiServer) -> None:
    where = f"--namespace={objects.NAMESPACE}"
    change = ("patch", "preemption", _RECORD, "--type=merge", '-p={"spec": {"moves": 1}}', where)
    status = (*change[:-2], '-p={"status": {"phase": "Committed"}}', "--subresource=status", where)
    record = _text(objects.preemption(1))
    with pytest.raises(ClusterError, match='cannot create resource "preemptions"'):
        people.kubectl("create", "-f", "-", _ALICE, stdin=record)
    people.kubectl("create", "-f", "-", _OPERATOR, stdin=record)
    for refused in (change, status, ("delete", "preemption", _RECORD, where)):
        with pytest.raises(ClusterError, match=r'cannot (get|patch|delete) resource "preemptions'):
            people.kubectl(*refused, _ALICE)
    people.kubectl(*change, _OPERATOR)
    assert people.kubectl("get", "preemption", _RECORD, where, _ALICE).stdout
    people.kubectl("delete", "preemption", _RECORD, where, _OPERATOR)


def test_an_administrator_who_asks_as_under_0_2_is_pointed_to_the_new_kind(people: ApiServer) -> None:
    body = objects.request("as-before") | {"apiVersion": "gracepoint.dev/v1alpha1", "kind": "Preemption"}
    with pytest.raises(ClusterError, match=r"create a PreemptionRequest \(gracepoint.dev/v1beta1\)") as refused:
        people.kubectl("create", "-f", "-", stdin=_text(body))
    assert "v1alpha1 Preemption is deprecated; write apiVersion: gracepoint.dev/v1beta1" in str(refused.value)
