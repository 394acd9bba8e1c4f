"""The documentation's site: it builds with all links checked, loads nothing from elsewhere, and has the reference."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.settings import Settings
from gracepoint.wire.names import ENV_JOB_COMPLETION_INDEX
from gracepoint_operator.metrics import Metrics
from website import reference

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
#: Sources of elements that a browser fetches by itself.
_FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?(https?:[^\"'> ]+)|<link[^>]*\shref=[\"']?(https?:[^\"'> ]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr  # strict: a link to nowhere is an error
    return folder


def shown(page: Path) -> str:
    """The page without the places at which a long name may be broken."""
    return page.read_text(encoding="utf-8").replace("<wbr>", "")


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    assert {str(page): found for page in pages if (found := _FETCHED.findall(page.read_text(encoding="utf-8")))} == {}


def test_search_needs_no_server(site: Path) -> None:
    # The index as a script, which a page from a disk may load.
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    for word in ("CheckpointPolicy", "kubectl gracepoint", "evictionHold", "BarrierTimeout"):
        assert word in index, word


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("reference/command-line.html", ["drill", "--deadline", "checkpoints", "--svg"]),
        ("reference/python.html", ["attach", "CheckpointManager", "BarrierTimeout", "write_options"]),
        ("reference/settings.html", ["GRACEPOINT_SAVE_EVERY_STEPS", "https://&lt;service&gt;"]),
        ("reference/resources.html", ["spec.evictionHold.boundSeconds", "status.timings[].p50Seconds"]),
        ("reference/events.html", ["CheckpointCommitted", "Resumed"]),
        ("concepts.html", ["images/preemption.svg"]),
        ("project/ARCHITECTURE.html", ["A taint becomes a commit"]),
    ],
)
def test_the_reference_is_made_from_the_code(site: Path, page: str, words: list[str]) -> None:
    text = shown(site / page)
    assert [word for word in words if word not in text] == []


def test_long_names_are_broken_between_their_parts(site: Path) -> None:
    text = (site / "reference" / "settings.html").read_text(encoding="utf-8")
    assert "<code>GRACEPOINT_<wbr>SAVE_<wbr>EVERY_<wbr>STEPS</code>" in text
    blocks = re.findall(r"<pre\b.*?</pre>", (site / "quickstart.html").read_text(encoding="utf-8"), re.S)
    assert blocks
    assert not [block for block in blocks if "<wbr>" in block]


def test_fields_and_rows_begin_and_end_on_lines_of_their_own(site: Path) -> None:
    policy = shown(site / "policy.html")
    assert re.search(r"evictionHold.enabled</code></strong> \(boolean; default: True\)<br />", policy)
    assert re.search(r"<br />\s*<em>Maintenance, sure, final; deadline: 660 s.</em>", shown(site / "signals.html"))


def test_every_metric_is_in_the_reference(site: Path) -> None:
    text = shown(site / "reference" / "metrics.html")
    assert [family.name for family in Metrics().families() if family.name not in text] == []


def public_methods() -> Iterator[str]:
    """Names of the documented methods and properties of the public classes, inherited ones included."""
    for package in ("gracepoint", "gracepoint.checkpoint", "gracepoint.multihost", "gracepoint.async_calls"):
        module = importlib.import_module(package)
        for name in module.__all__:
            bases = [b for b in getattr(getattr(module, name), "__mro__", ()) if b.__module__.startswith("gracepoint")]
            first = {member: base for base in reversed(bases) for member in vars(base)}  # a subclass's counts
            yield from (f"{package}.{name}.{member}" for member, base in first.items() if is_documented(base, member))


def is_documented(owner: type, member: str) -> bool:
    value = vars(owner)[member]
    value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    is_public = not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    return is_public and bool(value.__doc__)


def test_every_public_method_is_in_the_reference(site: Path) -> None:
    text = shown(site / "reference" / "python.html")
    assert [name for name in public_methods() if f'id="{name}"' not in text] == []


def test_the_reference_begins_with_what_a_training_loop_calls(site: Path) -> None:
    text = shown(site / "reference" / "python.html")
    places = [text.index(f'id="gracepoint.{name}"') for name in ("attach", "Session", "Preempted", "checkpoint.save")]
    assert places == sorted(places)


def test_settings_of_the_reference_are_those_that_the_library_reads() -> None:
    listed = re.findall(r"^\| `(\w+)` ", reference.settings(), re.M)
    assert len(listed) == len(dataclasses.fields(Settings))
    Settings.from_environment(dict.fromkeys(listed, ""))  # raises if it does not know one
    assert ENV_JOB_COMPLETION_INDEX in listed


def test_pages_of_the_reference_have_a_title() -> None:
    assert [name for name, text in reference.pages().items() if not text.startswith("# ")] == []


def test_sentences_of_the_reference_are_whole() -> None:
    assert [line for line in reference.command_line().splitlines() if re.match(r"\*.*\.\.\.$", line)] == []
