"""What becomes of SIGTERM and of the exit code between the kubelet and the training process. Pure.

The kubelet sends SIGTERM to the container's first process alone. The library must get it there, and its exit code must
be that of the container. Processes that load data must live until the save is done.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from gracepoint_cli.lint.findings import Finding, Severity

Json = dict[str, Any]

_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh"})
_WORKERS = re.compile(r"--?[\w.-]*(?:num[_-]?workers|worker[_-]?count|workers)[=\s]+([1-9]\d*)", re.IGNORECASE)
#: ``kill 0``, ``kill -TERM -$$``, ``kill -- -1``: what signals a process group.
_KILLS_GROUP = re.compile(
    r"\bkill\s+(?:(?:-s\s+\w+|-(?:SIG)?[A-Z]\w*|-\d+)\s+)?(?:--\s+)?(?:0\b|[\"']?-\$)"
    r"|\bkill\s+(?:-s\s+\w+|-\w+|--)\s+-\d+"
)
#: Flags of programs that start another one, if a value follows them.
_WITH_VALUE = {
    "tini": ("-p", "-e"),
    "docker-init": ("-p", "-e"),
    "dumb-init": ("-r", "--rewrite"),
    "timeout": ("-k", "-s"),
}
#: The variable that is the same as tini's flag -g, whatever its value.
_TINI_GROUP = "TINI_KILL_PROCESS_GROUP"
_PIPE = re.compile(r"(?<![|>])\|(?![|&])")


def findings(container: Json, path: str) -> Iterator[Finding]:
    """Checks the command of a training container.

    Args:
        container: The container.
        path: Where it is in the object.
    """
    words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    yield from _stop_signal(container, path)
    if not words:
        return
    variables = {str(v.get("name")): str(v.get("value") or "") for v in container.get("env") or ()}
    rest, group = _without_init(words, variables)
    script = _script(rest)
    if script is not None and not group:
        for command in re.findall(r"\bexec\s+(.+)", script):
            group = group or _without_init(command.split(), variables)[1]
    if not group and (found := _KILLS_GROUP.search(" ".join(words))):
        group = repr(found[0])
    if group:
        yield Finding(
            Severity.WARNING,
            "signal-to-group",
            f"{path}.command",
            f"found {group}, which sends SIGTERM to every process of the group. Workers that load data die at once, "
            "and the training needs them until the step that all processes agree on. Use tini without -g, dumb-init "
            "with --single-child or timeout with --foreground, or have the workers call "
            "gracepoint.leave_process_group() first",
        )
    if not container.get("command"):
        return  # the image's entry point comes before these words
    if script is not None:
        yield from _of_script(script, f"{path}.command")
    elif rest and rest[0].endswith(".sh"):
        yield Finding(
            Severity.INFO,
            "script-as-first-process",
            f"{path}.command",
            f"found the script {rest[0]}, which cannot be read here. A shell does not pass SIGTERM on: its last line "
            "must "
            "be `exec python ...`",
        )
    if workers := _WORKERS.search(" ".join(words)):
        yield Finding(
            Severity.INFO,
            "data-workers",
            f"{path}.args",
            f"found {workers[1]} worker processes. They must live until the save is done: they must not end on SIGTERM "
            "before the training process closes them, and nothing may kill the process group",
        )


def _stop_signal(container: Json, path: str) -> Iterator[Finding]:
    found = str((container.get("lifecycle") or {}).get("stopSignal") or "SIGTERM")
    if found not in ("SIGTERM", "SIGHUP"):
        yield Finding(
            Severity.WARNING,
            "stop-signal",
            f"{path}.lifecycle.stopSignal",
            f"found {found}, which the library does not take for a notice: if no other notice comes, nothing is saved. "
            "Remove it: SIGTERM is the default, unless the image has another STOPSIGNAL",
        )


def _without_init(words: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], str]:
    """Returns the command behind init programs, and the first of them that sends SIGTERM to the group.

    Args:
        words: The command.
        variables: The variables of the container.
    """
    rest, group = list(words), ""
    while rest:
        behind, found = _without_one(rest, variables)
        group = group or found
        if behind is None:
            break
        rest = behind
    return rest, group


def _without_one(words: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str] | None, str]:
    """As ``_without_init`` for the first word. None, if that is no such program."""
    name = PurePosixPath(words[0]).name
    if name not in ("tini", "dumb-init", "docker-init", "timeout"):
        return None, ""
    flags = []
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag == "--":
            break
        flags.append(flag)
        if flag in _WITH_VALUE.get(name, ()) and rest:
            rest.pop(0)
    if name == "timeout":
        return rest[1:], "" if {"-f", "--foreground"} & set(flags) else "timeout without --foreground"
    if name == "dumb-init":
        alone = {"-c", "--single-child"} & set(flags) or variables.get("DUMB_INIT_SETSID") == "0"
        return rest, "" if alone else "dumb-init without --single-child"
    if _TINI_GROUP in variables:
        return rest, _TINI_GROUP
    # A flag with a value, such as -p SIGTERM or -e 143, is not one of several letters.
    return rest, f"{name} -g" if any(re.fullmatch(r"-[a-z]*g[a-z]*", flag) for flag in flags) else ""


def _script(words: Sequence[str]) -> str | None:
    """Returns the script of ``sh -c SCRIPT``. None if the command has another form."""
    if not words or PurePosixPath(words[0]).name not in _SHELLS:
        return None
    for flag, script in itertools.pairwise(words[1:]):
        if re.fullmatch(r"-[a-z]*c[a-z]*", flag):
            return script
    return None


def _of_script(script: str, path: str) -> Iterator[Finding]:
    lines = [line.strip() for line in re.split(r"[\n;]|&&", script.replace("\\\n", " ")) if line.strip()]
    last = lines[-1] if lines else ""
    if _PIPE.search(last):
        if "pipefail" not in script:
            yield Finding(
                Severity.ERROR,
                "exit-code-lost",
                path,
                f"found a pipe, {_short(last)!r}: the container ends with the exit code of its last program, so that "
                "nobody sees that the work was saved, and the job fails. Write the log in the program, or redirect it",
            )
        yield _shell(Severity.WARNING, path, last)
    elif last.startswith("exec "):
        return
    elif re.search(r"\btrap\b", script):
        yield Finding(
            Severity.INFO,
            "shell-with-trap",
            path,
            "found a shell with a trap as the first process. It must pass SIGTERM on to the training process, wait "
            "for it, "
            "and end with its exit code. `exec python ...` does all three",
        )
    else:
        yield _shell(Severity.WARNING, path, last)


def _shell(severity: Severity, path: str, last: str) -> Finding:
    return Finding(
        severity,
        "shell-as-first-process",
        path,
        "found a shell as the first process, which does not pass SIGTERM on: if no notice came before, nothing is "
        "saved. "
        f"Write `exec {_short(last)}` in its last line, or put the program itself into command",
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"
