"""A store that cannot rename and tells versions apart by their contents, as S3 does."""

from __future__ import annotations

import hashlib

from gracepoint.checkpoint.storage.storage_path import Generation
from tests.unit.checkpoint.storage.fakes.flat import FlatStore, Object


class DigestStore(FlatStore):
    """One bucket."""

    def set(self, key: str, data: bytes, note: str = "") -> Generation:
        number = int(hashlib.md5(data, usedforsecurity=False).hexdigest(), 16)
        self.objects[key] = Object(data, number, self.time_s, note)
        return Generation(str(number))
