"""The wire format of every released version is kept in files: images live longer than operators.

``wire/v1/*.json`` hold one message each, as its sender wrote it; what follows a dash in the name is what it says.
They are never edited, only added to; a failure here means that a library in the field and a new operator would
misunderstand each other.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire import frames, messages
from gracepoint.wire.frames import Frame
from gracepoint.wire.messages import VERSION, Message, json_key

GOLDEN = Path(__file__).parent / "wire"
FILES = sorted(GOLDEN.glob("v*/*.json"))
NAMES = vars(messages) | vars(frames)


#: The messages that are sent by themselves.
KINDS = sorted({NAMES[path.stem.partition("-")[0]] for path in FILES}, key=lambda cls: cls.__name__)


def kind(path: Path) -> str:
    return path.stem.partition("-")[0]


def read(path: Path) -> Message:
    cls: type[Message] = NAMES[kind(path)]
    text = path.read_text()
    return Frame.read(text) if issubclass(cls, Frame) else cls.from_json(text)


def known_part(written: Any, golden: Any) -> Any:
    """What was written, without the fields that are younger than the file, also in messages within the message."""
    if isinstance(written, dict) and isinstance(golden, dict):
        return {key: known_part(value, golden[key]) for key, value in written.items() if key in golden}
    return written


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_golden_message_is_read_whole(path: Path) -> None:
    golden = json.loads(path.read_text())
    assert known_part(json.loads(read(path).to_json()), golden) == golden


def test_every_message_has_a_golden_file() -> None:
    parts = {"Message", "Frame", "StageTiming", "Spent", "SavedFor"}  # bases, and what stands inside other messages
    names = {
        name
        for name, value in NAMES.items()
        if isinstance(value, type) and issubclass(value, Message) and dataclasses.is_dataclass(value)
    }
    assert names - parts == {kind(path) for path in FILES if path.parent.name == f"v{VERSION}"}


@pytest.mark.parametrize("cls", [messages.Spent, *KINDS], ids=lambda cls: cls.__name__)
def test_every_field_is_in_a_golden_file(cls: type[Message]) -> None:
    found = [json.loads(path.read_text()) for path in FILES]
    of_it = [part for path, golden in zip(FILES, found, strict=True) for part in parts(cls, kind(path), golden)]
    assert {json_key(field.name) for field in dataclasses.fields(cls)} <= {key for part in of_it for key in part}


def parts(cls: type[Message], name: str, golden: dict[str, Any]) -> list[dict[str, Any]]:
    """What of a golden message is one of these."""
    if cls is messages.Spent:
        return [golden["spent"]] if isinstance(golden.get("spent"), dict) else []
    return [golden] if name == cls.__name__ else []
