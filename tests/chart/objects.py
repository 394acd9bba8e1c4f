"""Helpers for tests of the chart: the objects that it renders, found by kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]


def of_kind(objects: Iterable[Json], kind: str) -> list[Json]:
    return [o for o in objects if o["kind"] == kind]


def one(objects: Iterable[Json], kind: str) -> Json:
    (found,) = of_kind(objects, kind)
    return found
