"""The mutants of a module: each changes one place of its source text.

What is only said to people (docstrings, messages, logging), type annotations, decorators and the constants of a module
are not changed: no test is to hold them.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Iterator

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
#: Operators whose change is the same as the negation of the comparison.
_NEGATIONS = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
}
_NAMES = {"any": "all", "all": "any", "min": "max", "max": "min"}
_LOGGERS = {"log", "logger", "logging"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        line: Where it begins, from 1.
        place: The qualified name of the function or class; empty in the module itself.
        before: The lines that it changes, on one line.
        after: The same lines, changed.
        source: The whole module, changed.
        number: Of those of the same place, lines and change: 1 for the first one.
    """

    line: int
    place: str
    before: str
    after: str
    source: str
    number: int = 1

    @property
    def name(self) -> str:
        """Tells it from all others of the module, also after lines were added elsewhere."""
        return f"{self.place}: {self.before} => {self.after}" + (f" ({self.number})" if self.number > 1 else "")


def mutants(source: str) -> list[Mutant]:
    """Returns all mutants of a module that can be compiled, in the order of the text."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    made: list[Mutant] = []
    numbers: collections.Counter[str] = collections.Counter()
    for place, start, end, text in sorted(set(finder.found), key=lambda found: (found[1], found[2], found[3])):
        mutant = _mutant(source, place, start, end, text)
        if mutant is not None:
            numbers[mutant.name] += 1
            made.append(dataclasses.replace(mutant, number=numbers[mutant.name]))
    return made


def _mutant(source: str, place: str, start: int, end: int, text: str) -> Mutant | None:
    changed = source[:start] + text + source[end:]
    try:
        compile(changed, "mutant", "exec")
    except SyntaxError:
        return None
    first = source.rfind("\n", 0, start) + 1
    last = source.find("\n", end)
    last = len(source) if last < 0 else last
    before, after = source[first:last], changed[first : last + len(changed) - len(source)]
    line = source.count("\n", 0, start) + 1
    return Mutant(line, place, " ".join(before.split()), " ".join(after.split()), changed)


class _Finder(ast.NodeVisitor):
    """Collects the changes: place, first and last position in the text, new text."""

    def __init__(self, source: str) -> None:
        self.found: list[tuple[str, int, int, str]] = []
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line.encode()))
        self._bytes = source.encode()
        self._place: list[str] = []
        self._returns_bool = False  # whether the function that is visited has the annotation ``-> bool``

    # What is left as it is.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text; and Python 3.11 does not know the places of what stands in it."""

    def visit_arg(self, node: ast.arg) -> None:
        """Nothing but its annotation."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        outer = self._returns_bool
        returns = None if isinstance(node, ast.ClassDef) else node.returns
        self._returns_bool = isinstance(returns, ast.Name) and returns.id == "bool"
        self._place.append(node.name)
        for child in node.body:
            self.visit(child)
        self._place.pop()
        self._returns_bool = outer

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_ClassDef = visit_FunctionDef

    # What is changed.

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._between(left, right, _COMPARISONS[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        text = f" {'or' if isinstance(node.op, ast.And) else 'and'} ".join(f"({self._text(v)})" for v in node.values)
        self._replace(node, f"({text})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC:
            self._between(node.left, node.right, _ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _NAMES:
            self._replace(node.func, _NAMES[node.func.id])
        if not _is_logging(node):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int | float) and self._place:
            self._replace(node, repr(node.value + 1))

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        # Names that the condition binds have to be bound all the same.
        test = node.test
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        compared = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _NEGATIONS)
        if not negated and not compared:
            self._replace(test, f"not ({self._text(test)})")
        self.generic_visit(node)

    visit_While = visit_If
    visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._replace(test, "True")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and not _is_logging(value):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign | ast.AugAssign) -> None:
        # Without a name that is bound here nothing works, which says nothing about the tests.
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node, ast.AugAssign) or all(isinstance(item, ast.Attribute | ast.Subscript) for item in targets):
            self._replace(node, "pass")
        self.generic_visit(node)

    visit_AugAssign = visit_Assign

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace(node, "pass")
        elif self._returns_bool and isinstance(node.value, ast.Call | ast.Name | ast.Attribute):
            self._replace(node.value, f"not {self._text(node.value)}")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self._replace(node, "pass")

    visit_Break = visit_Continue

    # Text and places.

    def _offset(self, line: int, column: int) -> int:
        return len(self._bytes[: self._lines[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.found.append((".".join(self._place), *self._span(node), text))

    def _between(self, left: ast.expr, right: ast.expr, operator: str) -> None:
        """Changes the operator between two operands; spaces and parentheses around it are left."""
        start, end = self._span(left)[1], self._span(right)[0]
        text = self._source[start:end]
        start, end = start + len(text) - len(text.lstrip(" \n)")), end - len(text) + len(text.rstrip(" \n("))
        self.found.append((".".join(self._place), start, end, operator))


def _is_logging(node: ast.Call) -> bool:
    called = node.func
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in _LOGGERS


def names(found: list[Mutant]) -> Iterator[str]:
    """Names and lines, for people."""
    for mutant in found:
        yield f"{mutant.line:4} {mutant.name}"
