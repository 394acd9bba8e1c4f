"""The page about the test cluster names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/test-cluster.md").read_text()))
    files = (ROOT / "tests/cluster").glob("test_*.py")
    there = {name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)}
    assert named
    assert named - there == set()
