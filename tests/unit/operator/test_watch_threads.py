"""The threads that watch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gracepoint_operator.cache.relister import ALWAYS
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.watches import Watches


def test_watches_that_never_started_can_be_closed() -> None:
    controller = cast(Any, SimpleNamespace(watched=ALWAYS, watches=SimpleNamespace(expect=lambda kinds: None)))
    Watches(controller, cast(Any, None), Metrics(), replica="replica-a").close(1.0)
