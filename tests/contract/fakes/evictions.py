"""An eviction review, sent to a replica over HTTPS as the API server sends it."""

from __future__ import annotations

import http.client
import json
import ssl

from tests.contract.fakes.replicas import Replica
from tests.unit.operator.fakes import objects


def evict(replica: Replica, path: str, *, port: int) -> tuple[int, str]:
    """Status and body of what is answered to an eviction review of a pod that trains."""
    name = objects.pod(0)["metadata"]["name"]
    request = {"uid": "r-1", "namespace": objects.NAMESPACE, "name": name, "object": {"kind": "Eviction"}}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    context = ssl.create_default_context(cadata=replica.ca)
    connection = http.client.HTTPSConnection("localhost", port, context=context)
    connection.request("POST", path, body=json.dumps(review))
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found
