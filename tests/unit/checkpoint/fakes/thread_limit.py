"""A system that allows only so many threads."""

from __future__ import annotations

import threading

import pytest


def allow_threads(monkeypatch: pytest.MonkeyPatch, allowed: int, *, name: str) -> None:
    """Lets ``allowed`` threads start whose names begin with ``name``. Others of this process may start meanwhile."""
    real, left = threading.Thread.start, [None] * allowed

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            if not left:
                raise RuntimeError("can't start new thread")
            left.pop()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the calling thread start no more threads. Others of this process may start some meanwhile."""
    real, tested = threading.Thread.start, threading.get_ident()

    def refused(thread: threading.Thread) -> None:
        if threading.get_ident() == tested:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
