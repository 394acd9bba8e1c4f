"""Which pods of a gang have sent no receipt, from the entries of all replicas. Pure.

A pod sends its receipt to one of the replicas, so no replica alone knows which receipts are missing. Each replica
writes into its own entry to which pods it sent the notice and which pods sent a receipt. Pods are listed by their
place: the name without its random end, so that a thousand pods of one Job fit into one line such as
``train-workers-0-[0-499,501-999]``.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterable, Iterator, Set

from gracepoint_operator.kube.objects import LABEL_COMPLETION_INDEX, Pod
from gracepoint_operator.resources import Laggard, Lags

#: As many as the resource's schema allows.
_LAGGARDS_LIMIT, _LINES_LIMIT = 50, 4096
_SPANS_PER_LINE = 64
_LINE = re.compile(r"(.+)-\[([0-9,-]+)\]")


def place_of(pod: Pod) -> str:
    """Returns the pod's place in the gang: its Job and completion index, or its name if it has no index."""
    return f"{pod.job_name}-{pod.completion_index}" if LABEL_COMPLETION_INDEX in pod.labels else pod.name


def packed(places: Iterable[str]) -> list[str]:
    """Returns places as sorted lines of ranges."""
    lines, indices = [], collections.defaultdict(list)
    for place in set(places):
        head, _, tail = place.rpartition("-")
        if head and tail.isdecimal() and str(int(tail)) == tail:
            indices[head].append(int(tail))
        else:
            lines.append(place)
    for head, found in indices.items():
        spans = list(_spans(sorted(found)))
        for at in range(0, len(spans), _SPANS_PER_LINE):
            text = ",".join(spans[at : at + _SPANS_PER_LINE])
            lines.append(f"{head}-{text}" if text.isdecimal() else f"{head}-[{text}]")
    return sorted(lines)[:_LINES_LIMIT]


def unpacked(lines: Iterable[str]) -> set[str]:
    """Returns the places in lines that ``packed`` made."""
    places = set()
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            places.add(line)
            continue
        for span in match[2].split(","):
            first, _, last = span.partition("-")
            places |= {f"{match[1]}-{index}" for index in range(int(first), int(last or first) + 1)}
    return places


def missing(names: Iterable[str], told: Set[str], heard: Set[str]) -> list[Laggard]:
    """Returns the first 50 of these pods that have sent no receipt.

    Args:
        names: Names of the pods of the gang.
        told: Places of the pods to which any replica has sent the notice.
        heard: Places of the pods that have sent a receipt to any replica.
    """
    lagging = sorted(name for name in set(names) if not _is_of(name, heard))[:_LAGGARDS_LIMIT]
    return [
        Laggard(pod=name, lags=Lags.NOT_ACKNOWLEDGED if _is_of(name, told) else Lags.NOT_CONNECTED) for name in lagging
    ]


def _is_of(name: str, places: Set[str]) -> bool:
    return name in places or name.rpartition("-")[0] in places


def _spans(indices: list[int]) -> Iterator[str]:
    """``0-3`` for neighbours, ``5`` for one alone."""
    for _, group in itertools.groupby(enumerate(indices), key=lambda item: item[1] - item[0]):
        found = [index for _, index in group]
        yield str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"
