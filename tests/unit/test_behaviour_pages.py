"""Each test that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.conformance import defined_tests

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md"))])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / page).read_text(encoding="utf-8")))
    assert named - defined_tests() == set()
