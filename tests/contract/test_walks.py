"""The data's four walks stay short; ``tests.walks`` says what is counted."""

from __future__ import annotations

import pytest

from tests.walks import WALKS, Walk, walked

#: Walks that are longer than their bar as yet.
_TOO_LONG = {"state -> disk"}


@pytest.mark.parametrize(
    "walk",
    [
        pytest.param(
            walk, id=walk.name, marks=pytest.mark.xfail(reason="one module too long") if walk.name in _TOO_LONG else ()
        )
        for walk in WALKS
    ],
)
def test_a_walk_passes_no_more_modules_than_its_bar(walk: Walk) -> None:
    passed = list(walked(walk).passed)
    assert len(passed) <= walk.bar, "\n".join(passed)
