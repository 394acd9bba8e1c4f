"""The tables of conformance: each behaviour names tests that exist, or says what is different and why."""

from __future__ import annotations

import pytest

from tests.contract import conformance

#: How many behaviours of each reference are listed at least.
LEAST = {
    "guarantees": 34,
    "orbax-multihost": 33,
    "jax-distributed": 37,
    "orbax-async-checkpointer": 51,
    "orbax-array-handlers": 111,
    "megatron-async-utils": 46,
}


def test_the_behaviours_of_each_reference_are_listed() -> None:
    assert {name: len(conformance.behaviours(name)) >= LEAST[name] for name in conformance.REFERENCES} == dict.fromkeys(
        LEAST, True
    ), "a behaviour that was listed is gone"


@pytest.mark.parametrize("reference", conformance.REFERENCES)
def test_every_behaviour_has_a_test_or_is_different_for_a_reason(reference: str) -> None:
    for row in conformance.behaviours(reference):
        if row.same:
            assert row.tests, row
            assert not row.theirs + row.here + row.why, row
        else:
            assert row.theirs, row
            assert row.here, row
            assert row.why, row


@pytest.mark.parametrize("table", [*conformance.REFERENCES, conformance.NAMES])
def test_every_test_that_a_table_names_exists(table: str) -> None:
    assert {test for row in conformance.rows(table) for test in row.tests} - conformance.defined_tests() == set()


@pytest.mark.parametrize("table", [*conformance.REFERENCES, conformance.NAMES])
def test_a_table_is_written_as_a_page_with_all_its_rows(table: str) -> None:
    lines = conformance.page(table).splitlines()
    tables = sum(line.startswith("| --") for line in lines)
    assert sum(line.startswith("|") for line in lines) == len(conformance.rows(table)) + 2 * tables
