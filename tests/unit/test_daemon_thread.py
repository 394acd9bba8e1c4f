"""Threads that say by themselves when they have ended, and locks that no interruption leaves held."""

from __future__ import annotations

import ast
import functools
import itertools
import threading
from pathlib import Path

import pytest

import gracepoint
from gracepoint import threads
from gracepoint.errors import SaveFailed
from gracepoint.threads import BackgroundThread, DaemonThread, Ending, NoThread, ask_in_thread
from tests.forked import forked
from tests.interrupts import Interrupted, interrupt, interrupt_at, leave_unlocked
from tests.waiting import until

_TIMEOUT_S = 30.0
_NAME = "gracepoint: a save"


class Work:
    """A function that waits until it may go on."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.done.append("begun")
        self.begun.set()
        self.may_go_on.wait(_TIMEOUT_S)
        self.done.append("ended")


def until_no_thread_is_left() -> None:
    until(lambda: all(thread.name != _NAME for thread in threading.enumerate()), f"the end of {_NAME}")


@pytest.mark.parametrize("after_s", [0.01, 0.02, 0.05])
def test_a_thread_whose_wait_was_interrupted_still_runs(after_s: float) -> None:
    work, thread = Work(), BackgroundThread()
    thread.start("a save", work)
    for _ in range(3):
        assert interrupt(lambda: thread.wait(_TIMEOUT_S), after_s)
        assert thread.busy
    work.may_go_on.set()
    thread.wait(_TIMEOUT_S)
    assert not thread.busy
    assert work.done == ["begun", "ended"]


def test_wherever_a_start_is_interrupted_the_thread_runs_to_its_end_or_never() -> None:
    for number in itertools.count():
        work, thread = Work(), BackgroundThread()
        start = functools.partial(thread.start, "a save", work)
        if not interrupt_at(start, number, [threads]):
            break
        busy = thread.busy
        work.may_go_on.set()
        if busy:
            thread.wait(_TIMEOUT_S)
        until_no_thread_is_left()
        assert work.done == (["begun", "ended"] if busy else []), f"bytecode {number}"
        assert not thread.busy
    assert number > 50
    work.may_go_on.set()
    thread.wait(_TIMEOUT_S)


def test_wherever_a_wait_is_interrupted_the_thread_is_busy_until_it_has_ended() -> None:
    for number in itertools.count():
        work, thread = Work(), BackgroundThread()
        thread.start("a save", work)
        assert work.begun.wait(_TIMEOUT_S)
        try:
            wait = functools.partial(thread.wait, 0.0)
            reached = interrupt_at(wait, number, [threads])
        except SaveFailed:
            reached = False
        assert thread.busy, f"bytecode {number}"
        work.may_go_on.set()
        thread.wait(_TIMEOUT_S)
        assert work.done == ["begun", "ended"]
        if not reached:
            break
    assert number > 20


def test_a_thread_that_the_system_refuses_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = DaemonThread(lambda: None, _NAME)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
    seen: list[bool] = []
    monkeypatch.undo()
    asking = threading.Thread(target=lambda: seen.append(thread.ended))
    asking.start()
    asking.join(_TIMEOUT_S)
    assert seen == [True]
    assert thread.wait(0.0)


@pytest.mark.parametrize("handled", [None, KeyError("is handled meanwhile")])
def test_an_interruption_of_a_start_comes_as_it_is(monkeypatch: pytest.MonkeyPatch, handled: Exception | None) -> None:
    work = Work()
    thread = DaemonThread(work, _NAME)
    monkeypatch.setattr(threading.Event, "wait", leave_unlocked)
    with pytest.raises(Interrupted):
        start_while_handling(thread, handled)
    monkeypatch.undo()
    work.may_go_on.set()
    assert thread.wait(_TIMEOUT_S)
    assert work.done in ([], ["begun", "ended"])


@pytest.mark.parametrize("handled", [None, KeyError("is handled meanwhile")])
def test_a_start_that_the_system_refuses_raises_so_whatever_is_handled(
    monkeypatch: pytest.MonkeyPatch, handled: Exception | None
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NoThread, match="can't start new thread"):
        start_while_handling(DaemonThread(Work(), _NAME), handled)


def test_a_time_limit_that_is_a_runtime_error_is_not_taken_for_a_system_without_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Limit(RuntimeError):
        pass

    def out_of_time(event: threading.Event, timeout: float | None = None) -> bool:
        raise Limit

    work = Work()
    thread = DaemonThread(work, _NAME)
    monkeypatch.setattr(threading.Event, "wait", out_of_time)
    with pytest.raises(Limit):
        thread.start()
    monkeypatch.undo()
    work.may_go_on.set()
    assert thread.wait(_TIMEOUT_S)


def start_while_handling(thread: DaemonThread, handled: Exception | None) -> None:
    if handled is None:
        thread.start()
        return
    try:
        raise handled
    except KeyError:
        thread.start()


def test_whoever_ends_what_the_main_thread_waits_for_never_hangs_however_often_the_wait_is_interrupted() -> None:
    interrupts = 0
    for number in range(100):
        ending, called = Ending(), list[int]()
        ending.then(functools.partial(called.append, number))
        for _ in range(3):
            interrupts += interrupt(functools.partial(ending.wait, 0.002), 0.0003 + number * 0.00001)
        thread = DaemonThread(ending.end, _NAME)
        thread.start()
        assert ending.wait(_TIMEOUT_S)
        assert thread.wait(_TIMEOUT_S)
        ending.then(functools.partial(called.append, -number))
        assert called == [number, -number]
    assert interrupts > 100


def test_wherever_a_wait_for_an_end_is_interrupted_all_others_learn_of_the_end() -> None:
    for number in itertools.count():
        ending = Ending()
        waits = DaemonThread(ending.wait, _NAME)
        waits.start()
        ends = threading.Timer(0.02, ending.end)
        ends.start()
        reached = interrupt_at(ending.wait, number, [threads])
        assert waits.wait(_TIMEOUT_S), f"bytecode {number}"
        ends.join(_TIMEOUT_S)
        if not reached:
            break
    assert number > 20


def test_an_end_that_is_said_again_changes_nothing() -> None:
    ending, called = Ending(), list[str]()
    ending.then(functools.partial(called.append, "once"))
    ending.end(SaveFailed("first"))
    ending.end()
    assert str(ending.error) == "first"
    assert called == ["once"]
    assert ending.wait(0.0)


def test_an_error_of_what_is_done_at_an_end_is_logged_and_the_rest_is_done(caplog: pytest.LogCaptureFixture) -> None:
    ending, called = Ending(), list[str]()
    ending.then(functools.partial(_fail, SaveFailed("of a callback")))
    ending.then(functools.partial(called.append, "the rest"))
    ending.end()
    assert called == ["the rest"]
    assert "of a callback" in caplog.text


def test_an_error_of_the_function_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fail() -> None:
        raise ValueError("no")

    thread = DaemonThread(fail, _NAME)
    thread.start()
    assert thread.wait(_TIMEOUT_S)
    assert thread.ended


@pytest.mark.integration
def test_a_forked_child_has_no_thread_to_wait_for() -> None:
    work = Work()
    thread = DaemonThread(work, _NAME)
    thread.start()
    assert work.begun.wait(_TIMEOUT_S)
    assert forked(lambda: (thread.ended, thread.wait())) == "(True, True)"
    assert not thread.ended
    work.may_go_on.set()
    assert thread.wait(_TIMEOUT_S)


PACKAGE = Path(gracepoint.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
#: What ``with`` enters by a function of Python's. An exception between its end and the block leaves the lock held.
_ENTERED_IN_PYTHON = {"BoundedSemaphore", "Condition", "Semaphore"}
#: Locks that are taken by ``acquire`` without a ``finally`` around it, and why that is no harm.
_TAKEN_OTHERWISE = {
    # Held by whoever makes the ``Ending``, until the end. And the function that finds out whether a thread runs.
    "threads.py": ["self._running", "thread.start(): catch NoThread"],
    "checkpoint/storage/objects/persistence.py": ["self._slots"],  # not in the main thread; a slot, not a lock
    "checkpoint/storage/objects/requests.py": ["self._slots"],  # a slot that is lost is one helper less
}


class LeftHeld(ast.NodeVisitor):
    """Finds what takes a lock in such a way that an exception of a signal handler can leave it held for ever."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[str] = []
        self._entered_in_python: set[str] = set()
        self._released: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                self._find_made(node)
        self.visit(tree)

    def _find_made(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target, value in _pairs(targets[0], node.value):
            if isinstance(value, ast.Call) and _name(value.func) in _ENTERED_IN_PYTHON:
                self._entered_in_python.add(_name(target))
                if _name(value.func) == "Condition" and not value.args:
                    self.found.append(f"{ast.unparse(target)} has a lock without a name, which no `with` can take")

    def _find_starts(self, node: ast.With | ast.Try) -> None:
        for statement in node.body:
            for call in ast.walk(statement):
                if isinstance(call, ast.Call) and _name(call.func) in ("start", "start_thread"):
                    self.found.append(f"{ast.unparse(call)}: catch NoThread")

    def visit_With(self, node: ast.With) -> None:
        if any("suppress(RuntimeError" in ast.unparse(item.context_expr) for item in node.items):
            self._find_starts(node)
        for item in node.items:
            if _name(item.context_expr) in self._entered_in_python:
                self.found.append(f"with {ast.unparse(item.context_expr)}: enter its lock instead")
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        if any("RuntimeError" in ast.unparse(each.type) for each in node.handlers if each.type is not None):
            self._find_starts(node)
        releases = [
            ast.unparse(call.func.value)
            for statement in node.finalbody
            for call in ast.walk(statement)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "release"
        ]
        self._released += releases
        for statement in node.body:
            self.visit(statement)
        del self._released[len(self._released) - len(releases) :]
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) in ("concurrent.futures.wait", "futures.wait"):
            self.found.append(f"{ast.unparse(node)}: whoever sets a future may hang. Wait for an Ending")
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("acquire", "__enter__"):
            lock = ast.unparse(node.func.value)
            if lock not in self._released:
                self.found.append(lock)
        self.generic_visit(node)


def _pairs(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_no_lock_is_taken_so_that_an_interruption_leaves_it_held(module: Path) -> None:
    found = LeftHeld(ast.parse((PACKAGE / module).read_text())).found
    assert sorted(set(found)) == _TAKEN_OTHERWISE.get(module.as_posix(), [])


@pytest.mark.parametrize(
    "source",
    [
        "self._changed = threading.Condition(self._lock)\nwith self._changed: pass",
        "self._a, self._b = threading.Condition(lock), Condition(lock)\nwith other, self._b: pass",
        "changed: Condition = Condition(lock)\nwith changed: pass",
        "self._changed = threading.Condition()",
        "self._slots = threading.Semaphore(3)\nwith self._slots: pass",
        "lock.acquire()\ntry:\n    pass\nfinally:\n    lock.release()",
        "try:\n    one.acquire()\nfinally:\n    another.release()",
        "lock.__enter__()",
        "a = threading.Thread(target=f)\ntry:\n    a.start()\nexcept RuntimeError:\n    pass",
        "try:\n    threading.Thread(target=f).start()\nexcept (OSError, RuntimeError) as error:\n    pass",
        "a = DaemonThread(f, name)\ntry:\n    a.start()\nexcept RuntimeError:\n    pass",
        "with contextlib.suppress(RuntimeError):\n    start_thread(a)",
        "concurrent.futures.wait([ended], timeout=1)",
    ],
)
def test_the_search_finds_locks_that_an_interruption_leaves_held(source: str) -> None:
    assert LeftHeld(ast.parse(source)).found


@pytest.mark.parametrize(
    "source",
    [
        "self._changed = threading.Condition(self._lock)\nwith self._lock:\n    self._changed.wait()",
        "try:\n    lock.acquire(timeout=1)\nfinally:\n    lock.release()",
        "a = threading.Thread(target=f)\ntry:\n    start_thread(a)\nexcept NoThread:\n    pass",
        "with contextlib.suppress(NoThread):\n    a.start()",
    ],
)
def test_the_search_accepts_locks_that_no_interruption_leaves_held(source: str) -> None:
    assert LeftHeld(ast.parse(source)).found == []


def test_an_answer_that_a_thread_brings_is_returned_and_its_error_is_raised() -> None:
    assert ask_in_thread(lambda: 7, _NAME, _TIMEOUT_S) == 7
    with pytest.raises(SaveFailed, match="why"):
        ask_in_thread(functools.partial(_fail, SaveFailed("why")), _NAME, _TIMEOUT_S)


def test_a_question_without_an_answer_is_given_up_in_time() -> None:
    goes_on = threading.Event()
    with pytest.raises(TimeoutError, match="no answer after 0.01 s"):
        ask_in_thread(functools.partial(goes_on.wait, _TIMEOUT_S), _NAME, 0.01)
    goes_on.set()


def _fail(error: Exception) -> None:
    raise error
