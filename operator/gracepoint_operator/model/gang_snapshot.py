"""Everything that matters to one workload, as one value. Pure."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from gracepoint_operator.kube.objects import LABEL_COMPLETION_INDEX, Node, Pod
from gracepoint_operator.model import evictions
from gracepoint_operator.model.preemption_record import PreemptionRecord, RequestRecord
from gracepoint_operator.resources import CheckpointPolicy, Laggard, Lags
from gracepoint_operator.signals import Mark
from gracepoint_operator.workloads import Job, Workload


@dataclasses.dataclass(frozen=True)
class GangSnapshot:
    """Everything that matters to one workload, read at one moment.

    Attributes:
        workload_uid: UID of the workload.
        workload: The workload. None if it is not known: it is gone, or has lost the label by which it is watched. In a
            namespace that is being deleted it counts as deleted.
        workload_gone: Whether the API server, when asked, said that the workload does not exist.
        jobs: Its Jobs by name.
        pods: All its pods, including those of older attempts. Pods of other namespaces are left out, since anybody may
            write any label.
        nodes: The nodes of those pods, by name.
        policy: Its CheckpointPolicy. None if there is none.
        preemptions: The records of its Preemptions, oldest first.
        requests: The requests for it, oldest first.
        marks: Possible signals, by the UID of the pod that they concern: on the pod, its node, Job, workload, ...
            Pods without any may be left out.
        since: When each mark was first seen, in seconds since the epoch.
        bound_at: When each pod was first seen bound, by UID.
        checked: UIDs of deleted pods whose Job and workload were read again after the deletion.
        unexplained: Marks of suspensions after which Kueue's Workload was not read yet, which says the reason.
    """

    workload_uid: str
    workload: Workload | None
    workload_gone: bool
    jobs: Mapping[str, Job]
    pods: tuple[Pod, ...]
    nodes: Mapping[str, Node]
    policy: CheckpointPolicy | None
    preemptions: tuple[PreemptionRecord, ...]
    requests: tuple[RequestRecord, ...]
    marks: Mapping[str, Sequence[Mark]]
    since: Mapping[str, float]
    bound_at: Mapping[str, float]
    checked: frozenset[str]
    unexplained: frozenset[str] = frozenset()

    @functools.cached_property
    def members(self) -> tuple[Pod, ...]:
        """The pods of the current attempt that the gang needs. Empty if the workload is deleted or finished.

        These are its processes, and those helpers whose end would end or restart the gang. A pod that has ended is
        included, unless its Job has replaced it by another pod.
        """
        return tuple(pod for pod in self._current if not pod.helps or self._ends_gang(pod))

    @functools.cached_property
    def processes(self) -> tuple[Pod, ...]:
        """The members that train: they are told, and agree."""
        return tuple(pod for pod in self._current if not pod.helps)

    @functools.cached_property
    def has_ended(self) -> bool:
        """True if a process has ended, or a helper has failed without which the gang does not go on."""
        return any(pod.finished and (not pod.helps or self._has_failed(pod)) for pod in self.members)

    @functools.cached_property
    def _current(self) -> tuple[Pod, ...]:
        workload = self.workload
        if workload is None or workload.deleted or workload.finished:
            return ()
        attempt = workload.restarts
        current = tuple(pod for pod in self.pods if pod.membership.restart_attempt == attempt and pod.policy)
        if not any(pod.finished for pod in current):
            return current
        taken = {(pod.job_name, pod.completion_index) for pod in current if not pod.finished}
        return tuple(pod for pod in current if not pod.finished or (pod.job_name, pod.completion_index) not in taken)

    @functools.cached_property
    def suspects(self) -> tuple[Pod, ...]:
        """The members of which anything is known that may be a signal. Nearly always few of them."""
        if self.requests:
            return self.members
        wanted = self.marks.keys() | evictions.attempted(self.since)
        return tuple(pod for pod in self.members if pod.uid in wanted) if wanted else ()

    def job_goes_on(self, pod: Pod) -> bool:
        """True if the Job of this pod exists, has not ended, and was not scaled down below this pod.

        A Job of the same name that was made after this pod's own Job was deleted is another one.
        """
        job = self.jobs.get(pod.job_name)
        if job is None or job.deleted or job.finished or pod.job_uid not in ("", job.uid):
            return False
        return job.completions is None or pod.completion_index < job.completions

    def _ends_gang(self, helper: Pod) -> bool:
        """True if the end of a helper's pod, by a disruption, would end or restart its workload as a whole."""
        job = self.jobs.get(helper.job_name)
        return job is not None and self.workload is not None and self.workload.ends_with(helper.replicated_job, job)

    def _has_failed(self, helper: Pod) -> bool:
        job = self.jobs.get(helper.job_name)
        return job is not None and job.failed

    def is_ordinary_life(self, pod: Pod) -> bool:
        """True if the end of this pod is not a disruption: its workload or Job ended, was deleted or has restarted."""
        return all(pod.uid != member.uid for member in self.members) or not self.job_goes_on(pod)


#: As many as the resource's schema allows.
_LAGGARDS_LIMIT, _LINES_LIMIT = 50, 4096
_SPANS_PER_LINE = 64
_LINE = re.compile(r"(.+)-\[([0-9,-]+)\]")
#: Places with a higher index are kept as texts: anybody may write any index into a label.
_INDEX_LIMIT = 1 << 20


# Which pods of a gang have sent no receipt, from the entries of all replicas. Pure.
#
# A pod sends its receipt to one of the replicas, so no replica alone knows which receipts are missing. Each replica
# writes into its own entry to which pods it sent the notice and which pods sent a receipt. Pods are listed by their
# place: the name without its random end, so that a thousand pods of one Job fit into one line such as
# ``train-workers-0-[0-499,501-999]``.


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


def missing(names: Iterable[str], told: Container[str], heard: Container[str]) -> list[Laggard]:
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
        first, _, last = span.partition("-")
        begin, end = (int(text) if len(text) < 8 and text.isdecimal() else -1 for text in (first, last or first))
        if not 0 <= begin <= end < _INDEX_LIMIT:
            return None
        bits |= ((1 << (end - begin + 1)) - 1) << begin
    return bits


def _spans(bits: int) -> Iterator[str]:
    """``0-3`` for neighbours, ``5`` for one alone."""
    for run in re.finditer("1+", f"{bits:b}"[::-1]):
        first, end = run.span()
        yield str(first) if end == first + 1 else f"{first}-{end - 1}"
