"""Lists objects by HTTP. ``kubectl get`` is a process for each look, and asks for more than the objects.

Threads: none; any thread may ask.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.testcluster.api import ClusterError

_ANSWERS_WITHIN_S = 30.0


class Listing:
    """What an API server has. Each call makes a connection of its own.

    Args:
        kubeconfig: As the test clusters write it: JSON, with a token and the file of an authority.
    """

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._where = urlsplit(cluster["server"])
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._headers = {"Authorization": f"Bearer {user['token']}"}
        self._folders = {"": "/api/v1"}  # of groups, in the version that the API server prefers

    def of(self, resources: Sequence[str], namespace: str) -> list[dict[str, Any]]:
        """The objects of resources, such as ``pods`` or ``jobs.batch``, each with its kind, as kubectl shows them.

        Raises:
            ClusterError: The API server refused it, or did not answer.
        """
        host, port = str(self._where.hostname), self._where.port
        connection = http.client.HTTPSConnection(host, port, context=self._context, timeout=_ANSWERS_WITHIN_S)
        items: list[dict[str, Any]] = []
        try:
            with contextlib.closing(connection):
                for resource in resources:
                    items += self._list(connection, resource, namespace)
        except (OSError, http.client.HTTPException, ValueError) as error:
            wanted = ", ".join(resources)
            raise ClusterError(f"cannot list {wanted} in {namespace}: {type(error).__name__}: {error}") from error
        return items

    def _list(self, connection: http.client.HTTPSConnection, resource: str, namespace: str) -> list[dict[str, Any]]:
        plural, _, group = resource.partition(".")
        if group not in self._folders:
            version = self._get(connection, f"/apis/{group}")["preferredVersion"]
            self._folders[group] = f"/apis/{version['groupVersion']}"
        found = self._get(connection, f"{self._folders[group]}/namespaces/{namespace}/{plural}")
        kind = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
        return [{**kind, **item} for item in found["items"]]

    def _get(self, connection: http.client.HTTPSConnection, path: str) -> Any:
        connection.request("GET", path, headers=self._headers)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise ClusterError(f"GET {path}: {answer.status} {body.decode(errors='replace')[:500]}")
        return json.loads(body)
