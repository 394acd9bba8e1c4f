"""Watchers that are ended with their test.

``test_amazons_mock.py`` needs Amazon's own program (github.com/aws/amazon-ec2-metadata-mock) and is a part of the run
where ``AEMM`` says where it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from gracepoint.receivers import MetadataWatchers
from gracepoint.receivers.metadata import aws, azure, gce
from tests.unit.receivers.fakes.heard import Heard

collect_ignore = [] if "AEMM" in os.environ else ["test_amazons_mock.py"]

HOST = "node-7"
GRACE_PERIOD_S = 40.0
Watch = Callable[..., MetadataWatchers]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def watch(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches a server, looking often."""
    monkeypatch.setattr(aws.Item, "pause_s", 0.02)
    monkeypatch.setattr(azure.ScheduledEvents, "pause_s", 0.02)
    monkeypatch.setattr(gce, "_PAUSE_S", 0.02)
    monkeypatch.setattr(gce, "_WITHOUT_VALUE_PAUSE_S", 0.02)
    made: list[MetadataWatchers] = []

    def start(cloud: str, base_url: str, *, in_pod: bool = True, gce_notice_s: float = 0.0) -> MetadataWatchers:
        watchers = MetadataWatchers(
            [cloud],
            heard,
            host=HOST,
            in_pod=in_pod,
            grace_period_s=GRACE_PERIOD_S,
            gce_notice_s=gce_notice_s,
            base_url=base_url,
        )
        made.append(watchers)
        return made[-1]

    yield start
    for watchers in made:
        watchers.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("gracepoint-metadata")]
    assert left == []
