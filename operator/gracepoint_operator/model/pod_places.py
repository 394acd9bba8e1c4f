"""Which pods of a gang got a notice and have sent no receipt, from the entries of all replicas. Pure.

A pod sends its receipt to one of the replicas, so no replica alone knows which receipts are missing. Each replica
writes into its own entry to which pods it sent the notice and which pods sent a receipt. Pods are listed by their
place: the name without its random end, so that a thousand pods of one Job fit into one line such as
``train-workers-0-[0-499,501-999]``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

from gracepoint_operator.kube.objects import LABEL_COMPLETION_INDEX, Pod
from gracepoint_operator.resources.preemption import Laggard, Lags

#: As many as the resource's schema allows.
_LAGGARDS_LIMIT, _LINES_LIMIT = 50, 4096
_SPANS_PER_LINE = 64
_LINE = re.compile(r"(.+)-\[([0-9,-]+)\]")
#: Places with a higher index are kept as texts: anybody may write any index into a label.
_INDEX_LIMIT = 1 << 20


def place_of(pod: Pod) -> str:
    """Returns the pod's place in the gang: its Job and completion index, or its name if it has no index."""
    return f"{pod.job_name}-{pod.completion_index}" if LABEL_COMPLETION_INDEX in pod.labels else pod.name


class Places:
    """A set of places. The indices of one Job are the bits of one number, so that thousands of places are cheap.

    Args:
        lines: Lines that ``lines`` made, or single places.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._indices: dict[str, int] = {}  # a place without its index -> the bits of its indices
        self._others: set[str] = set()
        self._lines: list[str] | None = None  # until a place is added
        for line in lines:
            match = _LINE.fullmatch(line)
            if match is None:
                self.add(line)
            elif (bits := _bits(match[2])) is None:
                self._others.add(line)
            else:
                self._indices[match[1]] = self._indices.get(match[1], 0) | bits

    def add(self, place: str) -> None:
        self._lines = None
        head, index = _split(place)
        if index is None:
            self._others.add(place)
        else:
            self._indices[head] = self._indices.get(head, 0) | 1 << index

    def __or__(self, other: Places) -> Places:
        both = Places()
        both._others = self._others | other._others
        both._indices = dict(self._indices)
        for head, bits in other._indices.items():
            both._indices[head] = both._indices.get(head, 0) | bits
        return both

    def __contains__(self, place: object) -> bool:
        if not isinstance(place, str):
            return False
        head, index = _split(place)
        return place in self._others if index is None else bool(self._indices.get(head, 0) >> index & 1)

    def __len__(self) -> int:
        return len(self._others) + sum(bits.bit_count() for bits in self._indices.values())

    def lines(self) -> list[str]:
        """The places as sorted lines of ranges."""
        if self._lines is None:
            lines = list(self._others)
            for head, bits in self._indices.items():
                spans = list(_spans(bits))
                for at in range(0, len(spans), _SPANS_PER_LINE):
                    text = ",".join(spans[at : at + _SPANS_PER_LINE])
                    lines.append(f"{head}-{text}" if text.isdecimal() else f"{head}-[{text}]")
            self._lines = sorted(lines)[:_LINES_LIMIT]
        return list(self._lines)


def missing(names: Iterable[str], notified: Container[str], acknowledging: Container[str]) -> list[Laggard]:
    """Returns the first 50 of these pods that have sent no receipt.

    Args:
        names: Names of the pods of the gang.
        notified: Places of the pods to which any replica has sent the notice.
        acknowledging: Places of the pods that have sent a receipt to any replica.
    """
    lagging = sorted(name for name in set(names) if not _is_of(name, acknowledging))[:_LAGGARDS_LIMIT]
    return [
        Laggard(pod=name, lags=Lags.NOT_ACKNOWLEDGED if _is_of(name, notified) else Lags.NOT_CONNECTED)
        for name in lagging
    ]


def _is_of(name: str, places: Container[str]) -> bool:
    return name.rpartition("-")[0] in places or name in places


def _split(place: str) -> tuple[str, int | None]:
    """Returns a place without its index, and the index. None: it has none that can be a bit."""
    head, _, tail = place.rpartition("-")
    if not (head and tail.isdecimal() and len(tail) < 8 and (tail[0] != "0" or tail == "0") and tail.isascii()):
        return place, None
    index = int(tail)
    return (head, index) if index < _INDEX_LIMIT else (place, None)


def _bits(spans: str) -> int | None:
    """Returns the bits of the indices in spans such as ``0-3,5``. None: anybody may have written this."""
    bits = 0
    for span in spans.split(","):
        first_text, _, last_text = span.partition("-")
        begin, end = (
            int(text) if len(text) < 8 and text.isdecimal() else -1 for text in (first_text, last_text or first_text)
        )
        if not 0 <= begin <= end < _INDEX_LIMIT:
            return None
        bits |= ((1 << (end - begin + 1)) - 1) << begin
    return bits


def _spans(bits: int) -> Iterator[str]:
    """``0-3`` for neighbours, ``5`` for one alone."""
    for run in re.finditer("1+", f"{bits:b}"[::-1]):
        first, end = run.span()
        yield str(first) if end == first + 1 else f"{first}-{end - 1}"
