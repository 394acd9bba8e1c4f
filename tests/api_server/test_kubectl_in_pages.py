"""What pages tell to run with kubectl is what kubectl takes: its commands, and their options."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page_commands import cases, commands
from tests.testcluster.api_server import ApiServer


def of_kubectl() -> Iterator[tuple[Path, list[str], bool]]:
    """Whole lines: in sentences, commands are often named only."""
    for page, words, whole in commands("kubectl"):
        if whole and words[1] not in ("gracepoint", "--"):
            yield page, words[1:], whole


@functools.cache
def options(server: ApiServer, *command: str) -> frozenset[str]:
    """The options that the help of a command lists."""
    text = server.kubectl(*command).stdout
    return frozenset(re.findall(r"(?<![\w-])(--?[a-zA-Z][\w-]*)", text))


def unknown(server: ApiServer, words: list[str]) -> set[str]:
    """Options that kubectl does not take there."""
    names = list(words)
    while names[0].startswith("-"):  # kubectl -n NAMESPACE get ...
        names = names[1 if "=" in names[0] else 2 :]
    command = names[:2] if names[0] in ("rollout", "create") and not names[1].startswith("-") else names[:1]
    known = options(server, *command, "--help") | options(server, "options")
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)} - known


@pytest.mark.parametrize(("words", "whole"), cases(of_kubectl()))
def test_pages_show_what_kubectl_takes(server: ApiServer, words: list[str], whole: bool) -> None:
    assert unknown(server, words) == set()


def test_what_kubectl_does_not_take_is_noticed(server: ApiServer) -> None:
    assert unknown(server, ["-n", "research", "get", "pods", "--wide"]) == {"--wide"}
    assert unknown(server, ["rollout", "status", "--ignore-daemonsets"]) == {"--ignore-daemonsets"}
