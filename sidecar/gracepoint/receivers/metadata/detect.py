"""Finds out which cloud this is, with one request for each cloud to the address that they share."""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.receivers.metadata import aws, azure, gce
from gracepoint.receivers.metadata.client import MetadataClient, MetadataError

_TIMEOUT_S = 2.0


def detect(client: MetadataClient) -> str | None:
    """Returns the name of the cloud whose metadata server answers. None if none answers. Takes at most 12 s."""
    for cloud, is_it in _QUESTIONS.items():
        try:
            if is_it(client):
                return cloud
        except MetadataError:
            continue
    return None


def _gce(client: MetadataClient) -> bool:
    # The server also sends this header; see cloud.google.com/compute/docs/instances/detect-compute-engine.
    answer = client.request("/", gce.HEADERS, timeout_s=_TIMEOUT_S)
    return answer.headers.get("metadata-flavor") == "Google"


def _azure(client: MetadataClient) -> bool:
    answer = client.request(azure.NAME_PATH, azure.HEADERS, timeout_s=_TIMEOUT_S)
    return answer.status == 200


def _aws(client: MetadataClient) -> bool:
    answer = client.request(aws.TOKEN_PATH, aws.TOKEN_TTL_HEADERS, timeout_s=_TIMEOUT_S, method="PUT")
    return answer.status == 200 and answer.text.strip() != ""


_QUESTIONS: dict[str, Callable[[MetadataClient], bool]] = {"gce": _gce, "azure": _azure, "aws": _aws}
