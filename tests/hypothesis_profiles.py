"""How many examples Hypothesis tries: all of them, or a fifth in `make test-unit` (``--hypothesis-profile=quick``).

A test that sets a number of its own says ``max_examples=examples(200)``. A test that goes through all moments at which
something can happen says ``portion(range(40))``. Tests in which something wrong on purpose is to be found try as many
as they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

T = TypeVar("T")

QUICK = "quick"
_ALL = 100  # Hypothesis's own default


def register() -> None:
    """Makes the profile known, before pytest loads the one that its command line names."""
    settings.register_profile(QUICK, max_examples=_ALL // 5)


def examples(count: int) -> int:
    """Returns ``count``, or its part in the profile that is loaded."""
    return max(1, count * settings().max_examples // _ALL)


def portion(values: Sequence[T]) -> Sequence[T]:
    """Returns ``values``, or a part of them in the profile that is loaded: from the first one on, evenly spread."""
    return values[:: max(1, _ALL // settings().max_examples)]
