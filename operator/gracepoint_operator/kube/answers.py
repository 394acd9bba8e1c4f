"""What the client of the API server returns. Pure."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

from gracepoint_operator.kube.errors import JsonObject

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Credentials:
    """What another client needs to reach the same API server. The files may be temporary."""

    server: str
    ca_path: str | None
    insecure: bool
    scheme: str | None
    token: str | None
    certificate_path: str | None
    private_key_path: str | None


@dataclasses.dataclass(frozen=True)
class ObjectList:
    """Every object of a kind.

    Attributes:
        items: The objects.
        metadata: The metadata of the list, with the resourceVersion at which it was read.
    """

    items: list[JsonObject]
    metadata: JsonObject


@dataclasses.dataclass(frozen=True)
class ListPage(Generic[_T]):
    """A part of a list.

    Attributes:
        items: What was read of each object.
        metadata: The metadata of the list, with the resourceVersion at which the whole list was read.
    """

    items: list[_T]
    metadata: JsonObject
