"""The page about the tests names files that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_file_of_cluster_tests_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", (ROOT / "docs/testing.md").read_text()))
    assert named
    assert named - {file.name for file in (ROOT / "tests/cluster").glob("test_*.py")} == set()
