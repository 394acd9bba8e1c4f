"""What happened to a gang, as its pods show it. Pure.

The API server and the kubelet write times in whole seconds. What the API server has written is seen at once, so that
the moment at which it is seen is the better guess. A kubelet looks at its containers once a second, and writes what it
has found afterwards. So it has happened in the written second, and in the second before the kubelet wrote it: the
middle of what both have in common is right on average. That a pod has ended (its phase) the kubelet writes another
second later. So what counts is when the end of its containers was first seen.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from gracepoint_operator.goodput.accounts import GoodputLedger, is_later
from gracepoint_operator.goodput.life import Life, Moment, PodsObservation
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.gang_snapshot import GangSnapshot

_SECOND_MS = 1000
#: How often a kubelet looks at its containers, and how long it takes about to write what it has found.
_LOOKS_MS = 1000
_WRITES_MS = 80
#: See ``look``. Watches of one replica are rarely further apart.
_DOUBT_MS = 10_000
#: A node that this replica has never seen counts as lost after this time. The watch of nodes may be behind until then.
_UNSEEN_MS = 30_000


@dataclasses.dataclass(frozen=True)
class LastLook:
    """What a replica knows of the newest life from looks before.

    Attributes:
        attempt: Number of the workload's restarts before it.
        created_ms: The second in which its first pod was created.
        pods: UIDs of its pods at the last look. Empty if this replica has seen none.
        nodes: Names of the nodes of these pods that this replica has seen.
        unseen: Nodes of these pods that this replica has never seen, though it sees others of the gang, and since when
            it has not. It may have begun after they vanished.
        absent_ms: Since when it was seen to have no pods, if this replica has never seen any.
        ended: By the UID of a pod whose containers have ended: when they did as the kubelet wrote it, and when this
            replica first saw that.
    """

    attempt: int
    created_ms: int
    pods: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    unseen: Mapping[str, int] = dataclasses.field(default_factory=dict)
    absent_ms: int | None = None
    ended: Mapping[str, tuple[float, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PodsSeen:
    """One look at the pods of a gang.

    Attributes:
        observations: What was seen of the life that was known, and of a later one.
        last_look: For the next look. None if there never were any pods.
        again_ms: When to look again even if nothing changes. None: there is no need to.
    """

    observations: tuple[PodsObservation, ...]
    last_look: LastLook | None
    again_ms: int | None = None


def begun(gang: GangSnapshot, now_ms: int) -> GoodputLedger:
    """Returns the ledger of a workload that has none yet. Of its earlier attempts, nothing is known."""
    workload = gang.workload
    if workload is not None and workload.restarts == 0 and workload.created_at > 0:
        return GoodputLedger(since_ms=min(now_ms, _ms(workload.created_at)))
    newest = max((pod.restart_attempt for pod in gang.pods if not pod.helps), default=0)
    created = [_ms(pod.created_at) for pod in gang.pods if pod.restart_attempt == newest and not pod.helps]
    return GoodputLedger(since_ms=min([now_ms, *created]))


def look(
    gang: GangSnapshot, life: Life | None, previous: LastLook | None, now_ms: int, *, before: Life | None = None
) -> PodsSeen:
    """Looks at the pods of a gang.

    The account may be ahead of the pods: another replica has seen new pods, and has written that, before they came to
    this one. So a life of which this replica has never seen a pod has ended only if none comes for ``_DOUBT_MS``, or if
    pods of a later life come.

    A process has ended when its node is deleted. Its pod may stay for a minute, until the control plane cleans up.

    Args:
        gang: The gang.
        life: Its newest life that is known. None if there is none.
        previous: What the look before returned. None if there was none.
        now_ms: The time.
        before: The life right before ``life``, if that one trained: its processes have to leave. Others that wait for
            one that is made again stay.
    """
    pods = [pod for pod in gang.pods if pod.policy and not pod.helps and pod.restart_attempt >= 0]
    newer = pods if life is None else [pod for pod in pods if _is_newer(life, pod)]
    of_life = [] if life is None else [pod for pod in pods if not _is_newer(life, pod) and not _is_older(life, pod)]
    # A pod that is made later than a life has started is newer already: what is left was made again before that.
    if not newer and (life is None or life.started_ms is None) and (newer := _successors(of_life)):
        of_life = [pod for pod in of_life if pod.finished]
    if newer:
        attempt = max(pod.restart_attempt for pod in newer)
        newer = [pod for pod in newer if pod.restart_attempt == attempt]
        created = _moment(min(pod.created_at for pod in newer), now_ms)
        ends = _ends(newer, {}, now_ms)
        observation = _observation(
            newer,
            attempt,
            created,
            now_ms,
            ends,
            ended_ms=[],
            ran=False,
            is_whole=_is_whole(gang, newer),
            is_overlapped=any(pod.node in gang.nodes and pod.ended_at is None for pod in of_life if not pod.finished),
        )
        pods_of_newer = frozenset(pod.uid for pod in newer)
        after = PodsSeen((observation,), LastLook(attempt, created.stamp_ms, pods_of_newer, ended=ends))
    else:
        after = PodsSeen((), previous)
    if life is None:
        return after
    second_ms = life.created_ms // _SECOND_MS * _SECOND_MS
    if previous is None or (previous.attempt, previous.created_ms) != (life.attempt, second_ms):
        previous = LastLook(life.attempt, second_ms)
    former = _former(of_life, second_ms, before)
    if others := former + _made_again(of_life, life):
        other_uids = {pod.uid for pod in others}
        of_life = [pod for pod in of_life if pod.uid not in other_uids]
    created = Moment(stamp_ms=life.created_ms, at_ms=life.created_ms)
    # What fails before all containers run is made again, and does not end the life.
    ran = life.started_ms is not None
    if of_life or former or previous.pods:
        vanished_ms = [now_ms] if previous.pods - {pod.uid for pod in pods} else []
        nodes = previous.nodes | gang.nodes.keys()
        unseen_nodes = _unseen(of_life, nodes, previous.unseen, now_ms) if gang.nodes else {}
        again_ms = min((since_ms + _UNSEEN_MS for since_ms in unseen_nodes.values()), default=None)
        lost_nodes = dict.fromkeys(previous.nodes - gang.nodes.keys(), now_ms)
        lost_nodes |= {node: since_ms for node, since_ms in unseen_nodes.items() if since_ms + _UNSEEN_MS <= now_ms}
        ends = _ends(of_life, previous.ended, now_ms)
        observation = _observation(
            of_life,
            life.attempt,
            created,
            now_ms,
            ends,
            ended_ms=vanished_ms,
            lost_nodes=lost_nodes,
            ran=ran,
            is_whole=life.joined_ms is not None or _is_whole(gang, of_life),  # it is not asked for once all have joined
            former=former,
        )
        last_look = dataclasses.replace(
            previous,
            pods=frozenset(pod.uid for pod in of_life),
            nodes=frozenset(pod.node for pod in of_life if pod.node in nodes),
            unseen=unseen_nodes,
            absent_ms=None,
            ended=ends,
        )
        if again_ms is not None and again_ms > now_ms:
            after = dataclasses.replace(after, again_ms=again_ms)
    else:
        absent_ms = now_ms if previous.absent_ms is None else previous.absent_ms
        last_look = dataclasses.replace(previous, absent_ms=absent_ms)
        if life.gone_ms is not None or (newer and previous.absent_ms is None):
            return after if newer else PodsSeen((), last_look)
        if now_ms - absent_ms < _DOUBT_MS and not newer:
            return PodsSeen((), last_look, absent_ms + _DOUBT_MS)
        observation = _observation([], life.attempt, created, now_ms, {}, ended_ms=[absent_ms], ran=ran)
    return PodsSeen((observation, *after.observations), after.last_look if newer else last_look, after.again_ms)


def _is_newer(life: Life, pod: Pod) -> bool:
    if pod.restart_attempt != life.attempt:
        return pod.restart_attempt > life.attempt
    return is_later(life, _ms(pod.created_at))


def _successors(pods: Sequence[Pod]) -> list[Pod]:
    """Returns the pods that were made after all others had ended: nobody has seen that a life ended and another began.

    A single pod that fails early is made again while the others stay, and is no successor. One that a kubelet refused
    may have been refused in the second in which all were made.
    """
    ends = [pod.ended_at if pod.started_at is not None else None for pod in pods if pod.finished]
    ended_at = max((math.inf if at is None else at for at in ends), default=math.inf)
    living_pods = [pod for pod in pods if not pod.finished]
    return living_pods if all(pod.created_at >= ended_at for pod in living_pods) else []


def _is_older(life: Life, pod: Pod) -> bool:
    """True for a pod of an earlier life. A Job keeps its pods that have failed."""
    if pod.restart_attempt != life.attempt:
        return pod.restart_attempt < life.attempt
    second_ms = life.created_ms // _SECOND_MS * _SECOND_MS
    ended_at = pod.created_at if pod.ended_at is None else pod.ended_at
    # The pods of a life whose containers were started again are older than that life, and end later.
    return pod.finished and _ms(pod.created_at) < second_ms and _ms(ended_at) <= second_ms


def _former(pods: Sequence[Pod], second_ms: int, before: Life | None) -> list[Pod]:
    """Returns those that are pods of the life before one that began when pods were made, in that second.

    The processes of one start do not end at once, and a Job replaces each of its pods when that one has ended. If
    containers are started again in the same pods, all of these are older than the life.
    """
    began_at = second_ms / _SECOND_MS
    if before is None or before.trained_ms is None or all(pod.created_at < began_at for pod in pods):
        return []
    trained_at = before.trained_ms / _SECOND_MS
    return [pod for pod in pods if pod.created_at < began_at and (pod.started_at or 0.0) < trained_at]


def _made_again(pods: Sequence[Pod], life: Life) -> list[Pod]:
    """Returns those that have ended and were made again in the same life, before all of its processes were there."""
    finished_pods = [pod for pod in pods if pod.finished]
    if not finished_pods:
        return []
    newest: dict[tuple[str, int], Pod] = {}
    for pod in pods:
        before = newest.setdefault((pod.job_name, pod.completion_index), pod)
        if (before.created_at, not before.finished) < (pod.created_at, not pod.finished):
            newest[pod.job_name, pod.completion_index] = pod
    started_at = -math.inf if life.started_ms is None else life.started_ms // _SECOND_MS
    return [
        pod
        for pod in finished_pods
        if _is_after(newest[pod.job_name, pod.completion_index], pod)
        # Refused before the last one was started; the one after it may have vanished since.
        or (pod.started_at is None and pod.ended_at is not None and pod.ended_at < started_at)
    ]


def _is_after(newest: Pod, pod: Pod) -> bool:
    if pod.ended_at is None:
        return newest.created_at > pod.created_at
    return newest is not pod and newest.created_at >= pod.ended_at


def _is_whole(gang: GangSnapshot, pods: Sequence[Pod]) -> bool:
    """True if these pods are all that the Jobs of the gang make, but for those of helpers.

    Those that have ended count if they ran. In the place of one that a kubelet refused, another comes.
    """
    there: dict[str, set[int]] = {}
    for pod in pods:
        if pod.started_at is not None or not pod.finished:
            there.setdefault(pod.job_name, set()).add(pod.completion_index)
    lacking = [job for name, job in gang.jobs.items() if len(there.get(name, ())) < job.pod_count]
    if not lacking:
        return True
    shown = {pod.job_name for pod in pods}
    helping = {pod.job_name for pod in gang.pods if pod.helps}
    return not any(
        job.name in shown or not (job.name in helping or job.deleted or job.finished or job.suspended)
        for job in lacking
    )


def _unseen(
    pods: Sequence[Pod], visible: AbstractSet[str], previous: Mapping[str, int], now_ms: int
) -> Mapping[str, int]:
    """As ``LastLook.unseen``, after another look."""
    nodes = {pod.node for pod in pods if pod.node and not pod.finished} - visible
    return {node: previous.get(node, now_ms) for node in nodes}


def _ends(
    pods: Sequence[Pod], previous: Mapping[str, tuple[float, int]], now_ms: int
) -> Mapping[str, tuple[float, int]]:
    """As ``LastLook.ended``, after another look."""
    ends: dict[str, tuple[float, int]] = {}
    for pod in pods:
        if pod.ended_at is not None:
            before = previous.get(pod.uid)
            is_known = before is not None and before[0] == pod.ended_at
            ends[pod.uid] = before if before is not None and is_known else (pod.ended_at, now_ms)
    return ends


def _observation(
    pods: Sequence[Pod],
    attempt: int,
    created: Moment,
    now_ms: int,
    ends: Mapping[str, tuple[float, int]],
    *,
    ended_ms: Sequence[int],
    lost_nodes: Mapping[str, int] = types.MappingProxyType({}),
    ran: bool,
    is_whole: bool = True,
    is_overlapped: bool = False,
    former: Sequence[Pod] = (),
) -> PodsObservation:
    """Returns what is seen of a life with these pods.

    Args:
        pods: Its pods.
        attempt: Number of the workload's restarts before it.
        created: When its first pod was created.
        now_ms: The time.
        ends: As ``LastLook.ended``.
        ended_ms: When pods ended that are not there any more.
        lost_nodes: Nodes that are not there any more, and when that was seen.
        ran: True if all its containers were started once.
        is_whole: False if some of its pods are not made yet.
        is_overlapped: As in ``PodsObservation``.
        former: Pods of the life before, which others are to replace in this one.
    """
    unfinished = [pod for pod in pods if not pod.finished]
    living_pods = [pod for pod in (*unfinished, *former) if not pod.finished and pod.node not in lost_nodes]
    by_kubelet = [ends.get(pod.uid) for pod in pods if pod.finished]
    ended_ms = [*ended_ms, *(now_ms if end is None else _moment_of_kubelet(*end).at_ms for end in by_kubelet)]
    broken_ms = [*ended_ms, *(lost_nodes[pod.node] for pod in unfinished if pod.node in lost_nodes)]
    return PodsObservation(
        attempt=attempt,
        created=created,
        bound=_last([pod.bound_at if pod.node else None for pod in unfinished], now_ms, _moment) if is_whole else None,
        pods=len(unfinished),
        started=_last([pod.started_at for pod in unfinished], now_ms, _moment_of_kubelet) if is_whole else None,
        broke_ms=min(broken_ms) if broken_ms and (ran or not living_pods) else None,
        gone_ms=None if living_pods else max(ended_ms, default=max(broken_ms, default=now_ms)),
        is_overlapped=is_overlapped,
    )


def _last(times: Sequence[float | None], now_ms: int, moment: Callable[[float, int], Moment]) -> Moment | None:
    """The latest of the times, as ``moment`` guesses it. None if one of them has not come, or there are none."""
    past = [at for at in times if at is not None]
    return moment(max(past), now_ms) if past and len(past) == len(times) else None


def _moment(stamp: float, now_ms: int) -> Moment:
    """Guesses when the API server wrote something, when only the second is known."""
    stamp_ms = _ms(stamp)
    if stamp_ms <= now_ms < stamp_ms + _SECOND_MS:
        at_ms = now_ms
    elif now_ms < stamp_ms + 2 * _SECOND_MS:  # seen shortly after the end of that second; or our clock is behind
        at_ms = stamp_ms + (_SECOND_MS - 1 if now_ms >= stamp_ms else 0)
    else:
        at_ms = stamp_ms + _SECOND_MS // 2
    return Moment(stamp_ms=stamp_ms, at_ms=at_ms)


def _moment_of_kubelet(stamp: float, now_ms: int) -> Moment:
    """Guesses when something happened to a container, when only the second is known, as the kubelet wrote it."""
    stamp_ms = _ms(stamp)
    latest_ms = now_ms - stamp_ms - _WRITES_MS
    earliest_ms = latest_ms - _LOOKS_MS
    if earliest_ms >= _SECOND_MS:  # it was not seen as it came
        return Moment(stamp_ms=stamp_ms, at_ms=stamp_ms + _SECOND_MS // 2)
    middle_ms = (max(0, earliest_ms) + max(0, min(latest_ms, _SECOND_MS - 1))) // 2
    return Moment(stamp_ms=stamp_ms, at_ms=stamp_ms + middle_ms)


def _ms(at: float) -> int:
    return round(at * 1000)


@dataclasses.dataclass(frozen=True)
class Exposure:
    """Whether a gang has a checkpoint that is young enough for a voluntary disruption. Pure.

    A disruption costs a gang what it has trained since its newest checkpoint, or since it was restored: right after a
    restore nothing can be lost, however old the checkpoint is. A gang is not protected if none of its processes reports
    its times, because then no report would end the protection.

    Attributes:
        protect: Whether the gang is to be protected from voluntary disruptions now.
        until_ms: When the protection has to begin if no newer checkpoint comes. None if the gang is protected already,
            or if only an event can change that.
    """

    protect: bool
    until_ms: int | None = None


def exposure(life: Life | None, younger_than_ms: int, now_ms: int) -> Exposure:
    """Returns whether a gang is to be protected.

    Args:
        life: The current life of the gang. None if there is no account of it.
        younger_than_ms: The gang may be disrupted while its newest checkpoint is younger than this.
        now_ms: The time.
    """
    if life is None or not life.session or life.gone_ms is not None:
        return Exposure(False)
    moments = [moment for moment in (life.restored_ms, life.saved_ms) if moment is not None]
    until_ms = max(moments, default=now_ms - younger_than_ms) + younger_than_ms
    return Exposure(True) if now_ms >= until_ms else Exposure(False, until_ms)
