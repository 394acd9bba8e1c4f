"""What is said of saves and deletions that fail while training goes on: conditions of the policy, and Events. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from gracepoint.wire.messages import Trouble, TroubleKind
from gracepoint_operator.decisions.statuses.event_notes import Note
from gracepoint_operator.resources import CheckpointPolicy, Condition, ConditionStatus
from gracepoint_operator.workloads import ANY_PLURAL

#: The condition of each kind, which is False while there is such trouble.
CONDITIONS = {TroubleKind.SAVES: "Saving", TroubleKind.DELETIONS: "CleanedUp"}
REASONS_FAIL = {TroubleKind.SAVES: "SavesFail", TroubleKind.DELETIONS: "DeletionsFail"}
REASONS_SUCCEED = {TroubleKind.SAVES: "SavesSucceed", TroubleKind.DELETIONS: "DeletionsSucceed"}
_FAILING = {
    TroubleKind.SAVES: "have periodic saves that fail",
    TroubleKind.DELETIONS: "have checkpoints or remains of saves that cannot be deleted",
}
_NONE = {TroubleKind.SAVES: "no periodic save fails", TroubleKind.DELETIONS: "no deletion fails"}


def in_words(trouble: Trouble) -> str:
    """Returns what is known of it, in one sentence."""
    if trouble.left_s is None:
        return trouble.message
    return f"{trouble.message}; training ends if this lasts another {trouble.left_s:.0f} s"


def note(trouble: Trouble) -> Note:
    """Returns the Event on the workload."""
    kind = TroubleKind(trouble.kind)
    if trouble.over:
        return Note(REASONS_SUCCEED[kind], trouble.message)
    return Note(REASONS_FAIL[kind], in_words(trouble), warning=True)


def condition(policy: CheckpointPolicy, kind: TroubleKind, failing: Mapping[str, str], now: float) -> Condition:
    """Returns the condition of one kind.

    Args:
        policy: The policy.
        kind: The kind.
        failing: What is known of each trouble of this kind, by the name of the workload.
        now: Seconds since the epoch.
    """
    message = _NONE[kind]
    if failing:
        names = sorted(failing)
        first = f"{names[0]}: {failing[names[0]]}"
        message = f"{len(names)} {ANY_PLURAL} {_FAILING[kind]} ({', '.join(names[:5])}). {first}"
    return Condition(
        type=CONDITIONS[kind],
        status=ConditionStatus.FALSE if failing else ConditionStatus.TRUE,
        reason=(REASONS_FAIL if failing else REASONS_SUCCEED)[kind],
        message=message[:4096],
        last_transition_time=datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0),
        observed_generation=policy.generation,
    )


def said(policy: CheckpointPolicy, kind: TroubleKind) -> tuple[bool, float] | None:
    """Returns whether the policy's condition says that there is trouble, and since when. None: it has none."""
    for found in policy.status.conditions or ():
        if found.type == CONDITIONS[kind]:
            return found.status is ConditionStatus.FALSE, found.last_transition_time.timestamp()
    return None
