"""What happened to a gang, as its pods show it. Pure.

The API server and the kubelet write times in whole seconds. If the operator sees a change in the same second, the
moment at which it sees it is the better guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gracepoint_operator.goodput.ledger import Ledger, Moment, Sighting, is_later
from gracepoint_operator.goodput.life import Life
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.model.gang_snapshot import GangSnapshot

_SECOND_MS = 1000


@dataclasses.dataclass(frozen=True)
class Look:
    """One look at the pods of a gang.

    Attributes:
        sightings: What was seen of the life that was known, and of a later one.
        pods: UIDs of the pods of the newest life, for the next look.
    """

    sightings: tuple[Sighting, ...]
    pods: frozenset[str]


def begun(gang: GangSnapshot, now_ms: int) -> Ledger:
    """Returns the ledger of a workload that has none yet. Of its earlier attempts, nothing is known."""
    workload = gang.workload
    if workload is not None and workload.restarts == 0 and workload.created_at > 0:
        return Ledger(since_ms=min(now_ms, _ms(workload.created_at)))
    newest = max((pod.restart_attempt for pod in gang.pods), default=0)
    created = [_ms(pod.created_at) for pod in gang.pods if pod.restart_attempt == newest]
    return Ledger(since_ms=min([now_ms, *created]))


def look(gang: GangSnapshot, life: Life | None, known: frozenset[str], now_ms: int) -> Look:
    """Looks at the pods of a gang.

    Args:
        gang: The gang.
        life: Its newest life that is known. None if there is none.
        known: What the look before returned as ``pods``. Empty if there was none.
        now_ms: The time.
    """
    pods = [pod for pod in gang.pods if pod.policy and pod.restart_attempt >= 0]
    newer = pods if life is None else [pod for pod in pods if _is_newer(life, pod)]
    attempt = max((pod.restart_attempt for pod in newer), default=0)
    newer = [pod for pod in newer if pod.restart_attempt == attempt]
    sightings = []
    of_life: list[Pod] = []
    if life is not None:
        of_life = [pod for pod in pods if not _is_newer(life, pod) and not _is_older(life, pod)]
        created = Moment(stamp_ms=life.created_ms, at_ms=life.created_ms)
        vanished = bool(known - {pod.uid for pod in pods})
        # What fails before all containers run is made anew, and does not end the life.
        ran = life.started_ms is not None
        sightings.append(_sighting(of_life, life.attempt, created, now_ms, vanished=vanished, ran=ran))
    if newer:
        created = _moment(min(pod.created_at for pod in newer), now_ms)
        sightings.append(_sighting(newer, attempt, created, now_ms, vanished=False, ran=False))
    return Look(tuple(sightings), frozenset(pod.uid for pod in newer or of_life))


def _is_newer(life: Life, pod: Pod) -> bool:
    if pod.restart_attempt != life.attempt:
        return pod.restart_attempt > life.attempt
    return is_later(life, _ms(pod.created_at))


def _is_older(life: Life, pod: Pod) -> bool:
    """True for a pod of an earlier life. A Job keeps its pods that have failed."""
    if pod.restart_attempt != life.attempt:
        return pod.restart_attempt < life.attempt
    second_ms = life.created_ms // _SECOND_MS * _SECOND_MS
    ended_at = pod.created_at if pod.ended_at is None else pod.ended_at
    # The pods of a life whose containers were started again are older than that life, and end later.
    return pod.finished and _ms(pod.created_at) < second_ms and _ms(ended_at) <= second_ms


def _sighting(
    pods: Sequence[Pod], attempt: int, created: Moment, now_ms: int, *, vanished: bool, ran: bool
) -> Sighting:
    living = [pod for pod in pods if not pod.finished]
    ended = [now_ms if pod.ended_at is None else _moment(pod.ended_at, now_ms).at_ms for pod in pods if pod.finished]
    if vanished or not pods:
        ended.append(now_ms)
    return Sighting(
        attempt=attempt,
        created=created,
        bound=_last([pod.bound_at if pod.node else None for pod in living], now_ms),
        started=_last([pod.started_at for pod in living], now_ms),
        broke_ms=min(ended) if ended and (ran or not living) else None,
        gone_ms=None if living else max(ended),
    )


def _last(times: Sequence[float | None], now_ms: int) -> Moment | None:
    """The latest of the times. None if one of them has not come, or there are none."""
    known = [at for at in times if at is not None]
    return _moment(max(known), now_ms) if known and len(known) == len(times) else None


def _moment(stamp: float, now_ms: int) -> Moment:
    """Guesses when something happened of which the API server has written the second."""
    stamp_ms = _ms(stamp)
    if stamp_ms <= now_ms < stamp_ms + _SECOND_MS:
        at_ms = now_ms
    elif now_ms < stamp_ms + 2 * _SECOND_MS:  # seen shortly after the end of that second; or our clock is behind
        at_ms = stamp_ms + (_SECOND_MS - 1 if now_ms >= stamp_ms else 0)
    else:
        at_ms = stamp_ms + _SECOND_MS // 2
    return Moment(stamp_ms=stamp_ms, at_ms=at_ms)


def _ms(at: float) -> int:
    return round(at * 1000)
