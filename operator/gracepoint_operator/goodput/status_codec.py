"""A ledger as a policy's status keeps it. Pure."""

from __future__ import annotations

import datetime

from gracepoint_operator.goodput.categories import Category, Spent
from gracepoint_operator.goodput.ledger import GoodputLedger
from gracepoint_operator.goodput.life import Life, StepMark
from gracepoint_operator.goodput.save_interval import Suggestion, suggested
from gracepoint_operator.resources import (
    GangLife,
    PassedStep,
    SaveSuggestion,
    SecondsByCategory,
    WorkloadGoodput,
)
from gracepoint_operator.workloads import WorkloadIdentity

_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_MS = datetime.timedelta(milliseconds=1)


def written(ledger: GoodputLedger, workload: WorkloadIdentity, now_ms: int, *, save_s: float = 0.0) -> WorkloadGoodput:
    """Returns the entry of a workload.

    Args:
        ledger: Its account.
        workload: The workload.
        now_ms: The time.
        save_s: Seconds that a save takes until it is committed. 0: not known.
    """
    state = ledger.state()
    return WorkloadGoodput(
        name=workload.name,
        uid=workload.uid,
        workload_kind=WorkloadGoodput.named(workload.kind),
        since=_time(ledger.since_ms),
        until=_time(max(ledger.since_ms, now_ms)),
        state=None if state is None else str(state),
        seconds=_seconds(ledger.spent(now_ms)),
        disruptions=ledger.disruptions,
        losses=ledger.all_losses,
        suggestion=_suggestion(suggested(ledger, now_ms, at_least_s=save_s)),
        settled_seconds=_seconds(ledger.settled) if ledger.settled else None,
        settled_losses=ledger.losses,
        settled_saves=ledger.saves,
        settled_save_seconds=ledger.saves_ms / 1000,
        finished=_optional(ledger.finished_ms),
        lives=[_life(life) for life in ledger.lives],
    )


def read(entry: WorkloadGoodput) -> GoodputLedger:
    """Returns the account that an entry keeps."""
    return GoodputLedger(
        since_ms=_ms(entry.since),
        settled={} if entry.settled_seconds is None else spent_of(entry.settled_seconds),
        lives=tuple(_read_life(life) for life in entry.lives),
        finished_ms=_optional_ms(entry.finished),
        disruptions=entry.disruptions,
        losses=entry.settled_losses,
        saves=entry.settled_saves,
        saves_ms=round(entry.settled_save_seconds * 1000),
    )


def spent_of(seconds: SecondsByCategory) -> Spent:
    """Returns milliseconds by category."""
    found = {category: getattr(seconds, category.value) for category in Category}
    return {category: round(value * 1000) for category, value in found.items() if value}


def _seconds(spent: Spent) -> SecondsByCategory:
    return SecondsByCategory(**{category.value: ms / 1000 for category, ms in spent.items() if ms})


def _suggestion(found: Suggestion | None) -> SaveSuggestion | None:
    if found is None:
        return None
    return SaveSuggestion(
        save_seconds=round(found.cost_s, 3),
        seconds_between_disruptions=round(found.between_disruptions_s, 1),
        seconds_between_losses=round(found.between_losses_s, 1),
        every_seconds=round(found.interval_s, 1),
    )


def _life(life: Life) -> GangLife:
    return GangLife(
        began=_time(life.began_ms),
        attempt=life.attempt,
        created=_time(life.created_ms),
        bound=_optional(life.bound_ms),
        bound_pods=life.bound_pods or None,
        started=_optional(life.started_ms),
        session=life.session or None,
        attached=_optional(life.attached_ms),
        joined=_optional(life.joined_ms),
        restored=_optional(life.restored_ms),
        first_step=life.first_step or None,
        trained=_optional(life.trained_ms),
        left=_optional(life.left_ms),
        stalled=_optional(life.stalled_ms),
        broke=_optional(life.broke_ms),
        gone=_optional(life.gone_ms),
        saving_seconds=life.saving_ms / 1000 or None,
        periodic_saves=life.saves or None,
        periodic_save_seconds=life.saves_ms / 1000 or None,
        saved=_optional(life.saved_ms),
        passed=[PassedStep(step=mark.step, trained_seconds=mark.trained_ms / 1000) for mark in life.marks] or None,
    )


def _read_life(life: GangLife) -> Life:
    return Life(
        began_ms=_ms(life.began),
        attempt=life.attempt,
        created_ms=_ms(life.created),
        bound_ms=_optional_ms(life.bound),
        bound_pods=life.bound_pods or 0,
        started_ms=_optional_ms(life.started),
        session=life.session or "",
        attached_ms=_optional_ms(life.attached),
        joined_ms=_optional_ms(life.joined),
        restored_ms=_optional_ms(life.restored),
        first_step=life.first_step or 0,
        trained_ms=_optional_ms(life.trained),
        left_ms=_optional_ms(life.left),
        stalled_ms=_optional_ms(life.stalled),
        broke_ms=_optional_ms(life.broke),
        gone_ms=_optional_ms(life.gone),
        saving_ms=round((life.saving_seconds or 0.0) * 1000),
        saves=life.periodic_saves or 0,
        saves_ms=round((life.periodic_save_seconds or 0.0) * 1000),
        saved_ms=_optional_ms(life.saved),
        marks=tuple(StepMark(item.step, round(item.trained_seconds * 1000)) for item in life.passed or ()),
    )


def _time(ms: int) -> datetime.datetime:
    return _EPOCH + ms * _MS


def _ms(time: datetime.datetime) -> int:
    return round((time - _EPOCH) / _MS)


def _optional(ms: int | None) -> datetime.datetime | None:
    return None if ms is None else _time(ms)


def _optional_ms(time: datetime.datetime | None) -> int | None:
    return None if time is None else _ms(time)
