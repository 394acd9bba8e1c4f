"""Errors of the Kubernetes client become the operator's own."""

from __future__ import annotations

import pytest
from kubernetes.client.exceptions import ApiException

from gracepoint_operator.kube import client, errors


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (404, client.NotFound),
        (409, client.Conflict),
        (403, client.Refused),
        (422, client.Refused),
        (429, client.Unavailable),
        (500, client.Unavailable),
        (0, client.Unavailable),
    ],
)
def test_client_errors_are_translated_with_the_servers_message(status: int, expected: type[client.KubeError]) -> None:
    error = ApiException(status=status, reason="Because")
    error.body = '{"kind": "Status", "message": "pods are not there"}'
    translated = errors.of_status("GET /api/v1/pods", error)
    assert type(translated) is expected
    assert "GET /api/v1/pods" in str(translated)
    assert "pods are not there" in str(translated)
