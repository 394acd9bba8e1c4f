"""How many examples Hypothesis tries: all of them, or a fifth in `make test-unit` (``--hypothesis-profile=quick``).

A test that sets a number of its own says ``max_examples=examples(200)``. Tests in which something wrong on purpose is
to be found try as many as they need.
"""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"
_ALL = 100  # Hypothesis's own default


def register() -> None:
    """Makes the profile known, before pytest loads the one that its command line names."""
    settings.register_profile(QUICK, max_examples=_ALL // 5)


def examples(count: int) -> int:
    """Returns ``count``, or its part in the profile that is loaded."""
    return max(1, count * settings().max_examples // _ALL)
