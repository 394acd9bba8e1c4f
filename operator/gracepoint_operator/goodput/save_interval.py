"""How often to save, from what a save costs and how often work is lost. Pure.

Let ``d`` be the time for which a save stops the training, and ``M`` the mean time between two losses. J. W. Young (A
first order approximation to the optimum checkpoint interval, CACM 17(9), 1974) finds the interval ``sqrt(2 d M)``.
J. T. Daly (A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22(3), 2006) refines it for losses that are so frequent that ``d`` is not small beside ``M``:

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d      if d < 2M
    M                                                          otherwise

Both assume that a disruption loses all steps since the last save. A preemption that is announced early enough loses
none, however rarely the job saves. So a disruption counts by the probability that it loses steps. With ``k`` of ``n``
disruptions so far that did, it is ``(k + 1) / (n + 2)`` (Laplace's rule of succession): it is never 0, as the next one
may come without a notice.
"""

from __future__ import annotations

import dataclasses
import math

from gracepoint_operator.goodput.ledger import GoodputLedger


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A suggested interval, and what it follows from.

    Attributes:
        cost_s: Seconds for which a periodic save stops the training.
        between_disruptions_s: Mean seconds for which processes run between two disruptions.
        between_losses_s: The same between two disruptions that lose steps.
        interval_s: Seconds from the end of a periodic save to the next one.
    """

    cost_s: float
    between_disruptions_s: float
    between_losses_s: float
    interval_s: float


def daly_s(cost_s: float, between_losses_s: float) -> float:
    """Returns the seconds from the end of a save to the next save. Both arguments are in seconds, above 0."""
    if cost_s >= 2 * between_losses_s:
        return between_losses_s
    part = cost_s / (2 * between_losses_s)
    return math.sqrt(2 * cost_s * between_losses_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def suggested(ledger: GoodputLedger, now_ms: int, *, at_least_s: float = 0.0) -> Suggestion | None:
    """Returns what follows from the account so far. None before the first disruption, and before the first save.

    Args:
        ledger: The account.
        now_ms: The time.
        at_least_s: Seconds that a save takes until it is committed. A save waits for the one before.
    """
    saves, saves_ms = ledger.all_saves
    running_s = ledger.running_ms(now_ms) / 1000
    if not (saves and saves_ms and ledger.disruptions and running_s):
        return None
    cost_s = saves_ms / saves / 1000
    between_s = running_s / ledger.disruptions
    losing = (ledger.all_losses + 1) / (ledger.disruptions + 2)
    return Suggestion(cost_s, between_s, between_s / losing, max(at_least_s, daly_s(cost_s, between_s / losing)))
