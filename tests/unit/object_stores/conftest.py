"""A proxy in front of the server of ``gs://``, and a client that sends it one request at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.servers import Server


@pytest.fixture
def proxy(gcs: Server) -> Iterator[FaultProxy]:
    with FaultProxy(gcs.url) as made:
        yield made
