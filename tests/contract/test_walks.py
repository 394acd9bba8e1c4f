"""The data's four walks stay short; ``tests.walks`` says what is counted."""

from __future__ import annotations

from functools import cache

import pytest

from tests.walks import BEGIN, END, PAGE, WALKS, Trace, Walk, described, put_into, walked

trace_of = cache(walked)


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.name)
def test_a_walk_passes_no_more_modules_than_its_bar(walk: Walk) -> None:
    passed = list(trace_of(walk).passed)
    assert len(passed) <= walk.bar, "\n".join(passed)


def test_the_page_has_the_walks_as_they_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    traces: list[tuple[Walk, Trace]] = [(walk, trace_of(walk)) for walk in WALKS]
    assert put_into(page, described(traces)) == page, "run: python -m tests.walks --write"


def test_a_page_without_the_lines_around_the_walks_is_not_written_over() -> None:
    with pytest.raises(ValueError, match="found no lines"):
        put_into(f"{END} {BEGIN}", "text")
