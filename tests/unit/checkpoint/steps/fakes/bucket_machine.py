"""The saves, starts and deletions of ``flat_machine`` on a real object store, behind a proxy that cuts connections.

What happens is the proxy's: after a request that the test chooses, nothing reaches the store any more. Then the next
attempt starts, on connections of its own.
"""

from __future__ import annotations

import os
import time
import unittest.mock
from collections.abc import Callable
from typing import ClassVar

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.storage.objects.gcs import GcsApi
from gracepoint.checkpoint.storage.objects.object_store import BucketStore, ObjectPath
from gracepoint.checkpoint.storage.objects.s3 import S3Api
from gracepoint.errors import GracepointError
from tests.object_stores.fault_proxy import FaultProxy
from tests.object_stores.faults import cut_after
from tests.object_stores.servers import Bucket, Server
from tests.unit.checkpoint.steps.fakes.flat_machine import FlatMachine

_PATIENCE_S = 0.1


class VirtualStore(BucketStore):
    """A bucket whose clock the test moves on."""

    later_s = 0.0


class VirtualPath(ObjectPath):
    """A location there."""

    __slots__ = ()

    store: VirtualStore

    def sleep(self, seconds: float) -> None:
        self.store.later_s += seconds

    def now_s(self) -> float:
        return time.time() + self.store.later_s


def store_of(bucket: Bucket, *, patience_s: float = _PATIENCE_S, hedges: bool = False) -> VirtualStore:
    """Returns a store of the test's own for ``bucket``."""
    with unittest.mock.patch.dict(os.environ, bucket.environment):
        api = GcsApi(bucket.name) if bucket.scheme == "gs" else S3Api(bucket.name)
    return VirtualStore(api, hedges=hedges, patience_s=patience_s)


class BucketMachine(FlatMachine):
    """A machine on one bucket of ``server``, which it reaches through ``proxy`` and directly."""

    orbax: ClassVar[dict[int, tuple[str, ...]]] = {}

    def __init__(self, server: Server, proxy: FaultProxy) -> None:
        super().__init__()
        bucket = server.bucket()
        self.proxy = proxy
        self._near = store_of(bucket, patience_s=20.0)
        self._far = store_of(Bucket(bucket.scheme, bucket.name, proxy.url, server.environment(proxy.url)))
        self._last: int | None = None  # the last request that reaches the store
        self._use(self._near)

    def _go_on(self) -> None:
        if self._last is not None and self.proxy.number > self._last:
            raise TimeoutError("the connection was cut")

    def _use(self, store: VirtualStore) -> None:
        self.paths = Layout(VirtualPath(store, "checkpoints"))

    def cut(self, act: Callable[[], object], request: int, *, lose_last_reply: bool) -> bool:
        """Runs ``act``, which dies after a request. Then the next attempt starts. Returns whether ``act`` ended."""
        self._use(self._far)
        self.proxy.reset()
        self.proxy.set_rules(*cut_after(request, lose_last_reply=lose_last_reply))
        self._last = request
        try:
            act()
            ended = True
        except (OSError, GracepointError, AssertionError):
            ended = False
        finally:
            self._last = None
            self.proxy.set_rules()
            self._use(self._near)
        return ended

    def is_past(self, request: int) -> bool:
        """Returns whether the last ``cut`` came after all requests."""
        return self.proxy.number < request

    def _clock(self) -> float:
        return time.monotonic() + self._near.later_s

    def _sleep(self, seconds: float) -> None:
        self._near.later_s += seconds
        self._far.later_s += seconds
