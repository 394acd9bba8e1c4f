"""Whose turn it is where one process acts for all, so that the requests do not multiply with the processes.

Any process may take over for one that has died. So the first processes act at once, and the others only if the first
have not.
"""

from __future__ import annotations

#: Seconds by rank: up to 8 processes are few enough to follow the first one quickly.
_STEPS = ((1, 0.0), (8, 0.1), (64, 0.2))
_MANY_S = 0.3
#: The others follow one after the other, so that most of them see what an earlier one has done.
_EACH_S = 0.00025


def after_s(rank: int) -> float:
    """Returns the seconds that a process waits before it does what any process could do for all now."""
    return next((wait_s for below, wait_s in _STEPS if rank < below), _MANY_S + _EACH_S * rank)


def polls(rank: int, look: int) -> bool:
    """Returns whether a process asks the store at one of its looks, which are numbered from 1.

    Process 0 asks at every look, process 1 at every fourth, process 2 at every ninth, and so on. All processes together
    ask less than twice as often as process 0 alone, however many they are.
    """
    return look % (rank + 1) ** 2 == 0
