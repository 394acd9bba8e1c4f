"""What users, dashboards and other programs see of the product, as texts: ``observables/*.txt`` hold them.

``python -m tests.contract.observables`` writes the texts anew. A change in them is a change for somebody: it belongs
into the changelog. What has golden files already is not here: the wire (``wire/``), the custom resources (``crds/``),
the settings (docs/settings.md) and the formats of stored steps (``test_stored_versions``).
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import typer

from gracepoint import checkpoint
from gracepoint.wire.names import Env
from gracepoint_cli.app import app
from gracepoint_operator.metrics import Metrics

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "observables"
#: The modules from which training code imports.
PUBLIC = ("gracepoint", "gracepoint.async_calls", "gracepoint.checkpoint", "gracepoint.elastic", "gracepoint.multihost")
#: Types of defaults that are the same in every process.
_PLAIN = (type(None), bool, int, float, str, tuple)
SOURCES = ("sidecar/gracepoint", "operator/gracepoint_operator", "operator/gracepoint_cli")
#: Conditions, reasons of conditions and of Events, phases and causes are words of this form.
_REASON = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)+")
#: Random parts of names, checksums, and times. The size of the file that names its own folder.
_VARYING = re.compile(r"local-[0-9a-f]+|[0-9a-f]{16,}|\d{6,}(\.\d+)?|\d+\.\d{4,}|(?<=commit_success\.txt\": \[)\d+")


def public_names() -> Iterator[str]:
    """Yields each public name with its signature, and the methods of each class with theirs."""
    for name in PUBLIC:
        module = importlib.import_module(name)
        for each in sorted(getattr(module, "__all__", None) or (n for n in vars(module) if not n.startswith("_"))):
            value = getattr(module, each)
            yield f"{name}.{each}{_signature(value)}"
            if inspect.isclass(value):
                for member in sorted(n for n in dir(value) if not n.startswith("_") and _is_ours(value, n)):
                    yield f"  .{member}{_signature(inspect.getattr_static(value, member))}"


def _is_ours(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith("gracepoint"))


def _signature(value: Any) -> str:
    """The signature as every Python shows it. Those of others, and of enumerations, differ between its versions."""
    value = getattr(value, "__func__", value)
    if not callable(value):
        return ""
    is_others = not (getattr(value, "__module__", None) or "gracepoint").startswith("gracepoint")
    if is_others or isinstance(value, enum.EnumType):
        return "(...)"
    try:
        signature = inspect.signature(value)
    except ValueError:  # of a class in C
        return "(...)"
    plain = [
        each if isinstance(each.default, _PLAIN) or each.default is each.empty else each.replace(default=...)
        for each in signature.parameters.values()
    ]
    shown = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", str(signature.replace(parameters=plain)))
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", shown)


def metrics() -> Iterator[str]:
    """Yields the operator's metrics with their types."""
    for family in Metrics().families():
        yield f"{family.name} {family.type}"


def environment() -> Iterator[str]:
    """Yields the environment variables of training containers."""
    yield from sorted(value for name, value in vars(Env).items() if name.isupper())


def reasons() -> Iterator[str]:
    """Yields the words for conditions, reasons, phases and causes that the code contains."""
    words = set[str]()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            words |= {value for value in constants if isinstance(value, str) and _REASON.fullmatch(value)}
    yield from sorted(words)


def command_line() -> Iterator[str]:
    """Yields the commands with their arguments and options."""
    yield from _commands("gracepoint", typer.main.get_command(app))


def _commands(name: str, command: Any) -> Iterator[str]:
    yield name
    for parameter in command.params:
        options = " ".join((*parameter.opts, *parameter.secondary_opts))
        yield f"  {options}{'' if parameter.required else ', optional'}"
    for sub, each in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(f"{name} {sub}", each)


def saved_state() -> Iterator[str]:
    """Yields the files of saved states on a file system, without the random parts of names, and their JSON files."""
    state = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "step": 7}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(f"{folder}/one", state)
        with checkpoint.CheckpointManager(f"{folder}/run") as manager:
            manager.save(7, state)
            manager.wait_until_finished()
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                yield _VARYING.sub("*", str(path.relative_to(folder)))
                data = path.read_bytes()
                if data[:1] == b"{":
                    yield f"  {_VARYING.sub('*', json.dumps(json.loads(data), sort_keys=True))}"
                elif path.name != "commit_success.txt":
                    yield f"  {data.hex(' ')}"


TEXTS: dict[str, Callable[[], Iterator[str]]] = {
    each.__name__: each for each in (public_names, metrics, environment, reasons, command_line, saved_state)
}


def text(name: str) -> str:
    """Returns a text as it is now."""
    return "".join(f"{line}\n" for line in TEXTS[name]())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in TEXTS:
        (GOLDEN / f"{name}.txt").write_text(text(name))
