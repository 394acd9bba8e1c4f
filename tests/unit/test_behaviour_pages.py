"""The pages that list behaviours: each item names tests that exist, or says what is different and why."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
#: Pages of one reference module each, and how many behaviours of it they list at least.
REFERENCES = {
    "orbax-multihost.md": 33,
    "jax-distributed.md": 37,
    "orbax-async-checkpointer.md": 51,
    "orbax-array-handlers.md": 111,
    "megatron-async-utils.md": 46,
}


@cache
def defined() -> frozenset[str]:
    """Returns the names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return frozenset(name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text()))


def items(page: str) -> list[str]:
    """Returns the items of the lists of a page, each as one line."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(r"^- .*(?:\n  \S.*)*", text, re.M)
    return [" ".join(line.strip() for line in item[2:].splitlines()) for item in found]


def named_tests(item: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", item)


@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md"))])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / page).read_text(encoding="utf-8")))
    assert named - defined() == set()


@pytest.mark.parametrize("page", REFERENCES)
def test_every_behaviour_has_a_test_or_is_different_for_a_reason(page: str) -> None:
    found = items(page)
    assert len(found) >= REFERENCES[page], "a behaviour that was listed is gone"
    for item in found:
        if item.startswith("Different: "):
            assert re.search(r" Here: .+ Why: .+", item), item
        else:
            assert named_tests(item), item


def test_the_page_about_several_processes_names_a_test_for_each_promise() -> None:
    promises = (DOCS / "multihost.md").read_text(encoding="utf-8").partition("## The tests of each sentence")[2]
    found = re.findall(r"^- .*(?:\n  \S.*)*", promises, re.M)
    assert len(found) > 20
    assert [item for item in found if not named_tests(item)] == []


if __name__ == "__main__":
    for name in REFERENCES:
        different = sum(item.startswith("Different: ") for item in items(name))
        print(f"{name}: {len(items(name)) - different} tested, {different} different")
