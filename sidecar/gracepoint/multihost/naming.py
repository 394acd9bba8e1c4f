"""Names for sets of processes: short ones for keys, and words for messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import TypeAlias

#: Names of pods by process index, for messages. None where a process has no pod, or its name is not known.
Pods: TypeAlias = Sequence[str | None]

#: How many processes a message names.
_AT_MOST = 10


def group_name(participants: Sequence[int], process_count: int) -> str:
    """Returns a short name of a sorted set of processes. Different sets have different names."""
    if len(participants) == process_count:
        return "all"
    return hashlib.sha256(json.dumps(list(participants)).encode()).hexdigest()[:12]


def pods_of(processes: Iterable[int], pods: Pods) -> list[str]:
    """Returns the names of the pods of some processes, of ten at most, without those that are not known."""
    found = (pods[index] for index in list(processes)[:_AT_MOST] if index < len(pods))
    return [name for name in found if name]


def named(processes: Iterable[int], names: Pods = ()) -> str:
    """Returns process indices in words, with their pods if known. Ten at most are named."""
    found = list(processes)
    shown = ", ".join(f"{i} ({names[i]})" if i < len(names) and names[i] else str(i) for i in found[:_AT_MOST])
    more = f" and {len(found) - _AT_MOST} more" if len(found) > _AT_MOST else ""
    return f"process{'es' if len(found) != 1 else ''} {shown}{more}"
