"""Admission reviews, sent to a replica over HTTPS as the API server sends them."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from tests.contract.fakes.replicas import Replica
from tests.unit.operator.fakes import objects


def evict(replica: Replica, path: str, *, port: int) -> tuple[int, str]:
    """Status and body of what is answered to an eviction review of a pod that trains."""
    name = objects.pod(0)["metadata"]["name"]
    return review(replica, path, {"kind": "Eviction"}, port=port, name=name)


def review(replica: Replica, path: str, body: Any, *, port: int, name: str = "") -> tuple[int, str]:
    """Status and body of what is answered to the review of an object."""
    request = {"uid": "r-1", "operation": "CREATE", "namespace": objects.NAMESPACE, "name": name, "object": body}
    message = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    context = ssl.create_default_context(cadata=replica.ca)
    connection = http.client.HTTPSConnection("localhost", port, context=context)
    connection.request("POST", path, body=json.dumps(message))
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found
