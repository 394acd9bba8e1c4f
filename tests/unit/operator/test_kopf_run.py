"""One run of kopf: what it sends to the API server."""

from __future__ import annotations

from gracepoint_operator import watches


def test_the_watches_say_to_the_api_server_who_asks() -> None:
    headers = watches.Connection(server="https://localhost", token="t").as_http_headers()
    assert headers["User-Agent"].startswith("gracepoint-operator/")
    assert headers["Authorization"] == "Bearer t"
