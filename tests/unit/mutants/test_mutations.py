"""The tool that measures the tests: which mutants it makes of a module, and which of them it tries."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, Judged, judged, percent, sample
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.trials import Outcome


def changes(source: str) -> list[str]:
    """What the lines become, without the function around them."""
    body = textwrap.indent(textwrap.dedent(source).strip(), "    ")
    return [mutant.after for mutant in mutants(f"def f(a, b, c):\n{body}\n")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("return a < b", ["return a <= b"]),
        ("return a >= b", ["return a > b"]),
        ("return a == b", ["return a != b"]),
        ("return a is not b", ["return a is b"]),
        ("return a < b <= c", ["return a <= b <= c", "return a < b < c"]),
        ("return (a) < (b)", ["return (a) <= (b)"]),
        ("return a and b", ["return ((a) or (b))"]),
        ("return not a", ["return (a)"]),
        ("return any(a)", ["return all(a)"]),
        ("return max(a, 0)", ["return min(a, 0)", "return max(a, 1)"]),
        ("return a - b", ["return a + b"]),
        ("return True", ["return False"]),
        ("a.run()", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a += b", ["pass"]),
        ("raise a", ["pass"]),
        ("if a:\n    return", ["if not (a):", "pass"]),
        ("if a == b:\n    a.run()", ["if a != b:", "pass"]),
        ("while a:\n    break", ["while not (a):", "pass"]),
        ("return [x for x in a if x]", ["return [x for x in a if True]"]),
        ("return b if a else c", ["return b if not (a) else c"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_change_is_made_in_one_place(source: str, expected: list[str]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Only words."""',
        "log.warning(1, a=True)",
        "x = a",
        'return f"{a < b}"',
        "x: int = a",
        "def g(x: bool = a) -> None:\n    return x",
    ],
)
def test_what_is_said_to_people_or_the_type_checker_is_not_changed(source: str) -> None:
    assert changes(source) == []


def test_constants_of_a_module_are_not_changed_and_those_in_functions_are() -> None:
    assert [
        mutant.name for mutant in mutants("LIMIT_S = 10.0\n\n\nclass A:\n    def f(self):\n        return 3\n")
    ] == ["A.f: return 3 => return 4"]


def test_what_a_function_returns_as_a_truth_value_is_negated() -> None:
    source = "def f(a){}:\n    def g(a):\n        return a.b()\n\n    return a.b()\n"
    assert [mutant.name for mutant in mutants(source.format(" -> bool"))] == ["f: return a.b() => return not a.b()"]
    assert mutants(source.format("")) == []


def test_mutant_changes_that_line_also_after_multibyte_characters() -> None:
    source = 'def f(a):\n    """Größe."""\n    x = "ü" if a < 1 else "ö"\n    return x\n'
    found = {mutant.after: mutant.source for mutant in mutants(source)}
    assert found['x = "ü" if a <= 1 else "ö"'] == source.replace("<", "<=")


def test_same_change_at_two_places_is_two_mutants() -> None:
    source = "def f(a, b):\n    if a:\n        return False\n    if b:\n        return False\n"
    found = [(mutant.line, mutant.name) for mutant in mutants(source) if "return" in mutant.before]
    assert found == [(3, "f: return False => return True"), (5, "f: return False => return True (2)")]


def judged_module(name: str, **equivalent: str) -> Judged:
    return Judged(name, (), {key.replace("_", " "): why for key, why in equivalent.items()})


LEASE = "gracepoint.checkpoint.steps.lease"


def test_the_same_seed_chooses_the_same_mutants_and_another_one_others() -> None:
    module = Judged(judged()[LEASE].name, (), {})
    first, again, other = sample(module, 10, 0), sample(module, 10, 0), sample(module, 10, 1)
    assert first == again
    assert first != other
    assert len(first) == 10
    assert sample(module, None, 0) == module.mutants()


def test_what_no_test_noticed_once_is_always_tried() -> None:
    module = judged()[LEASE]
    assert {mutant.name for mutant in sample(module, 0, 0)} == set(module.once_unnoticed)
    some = {mutant.name for mutant in sample(module, 10, 0)}
    assert some > set(module.once_unnoticed)
    assert len(some) == 10 + len(module.once_unnoticed)


def test_a_known_mutant_whose_line_has_changed_is_told_and_left_out() -> None:
    module = Judged(LEASE, (), {}, ["claim: a line of the past => pass"])
    assert module.changed() == ["claim: a line of the past => pass"]
    assert sample(module, 0, 0) == []


def test_equivalent_mutants_are_skipped_and_missing_ones_are_errors() -> None:
    everything = Judged(LEASE, (), {}).mutants()
    name = everything[0].name
    assert name not in {mutant.name for mutant in Judged(LEASE, (), {name: "told by the test"}).mutants()}
    with pytest.raises(ValueError, match="has no such mutants any more"):
        judged_module(LEASE, gone="told by the test").mutants()


def test_a_module_that_was_renamed_is_named() -> None:
    with pytest.raises(ValueError, match=r"found the module gracepoint\.nowhere, which is in no source root"):
        judged_module("gracepoint.nowhere").mutants()


@pytest.mark.long
@pytest.mark.parametrize("name", judged())
def test_the_table_of_judges_names_modules_tests_and_mutants_that_are_there(name: str) -> None:
    module = judged()[name]
    assert module.mutants()
    assert [test for test in module.tests if not Path(ROOT, test).exists()] == []
    assert all(module.equivalent.values()), "each has its reason"
    assert module.changed() == [], "bring these names up to date: nobody tries them any more"


def test_the_share_of_what_was_detected_is_in_percent() -> None:
    mutant = Mutant(1, "", "a", "b", "b")
    outcomes = [Outcome(mutant, detected=number != 0, late=False) for number in range(20)]
    assert percent(outcomes) == 95.0
    assert percent([]) == 100.0
