"""A capability says what its maker wrote, and no text that somebody else made is one."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.errors import WireError
from gracepoint.wire.snapshot_requests import (
    LONGEST_CHARACTERS,
    Capability,
    NotGenuine,
    Right,
    read_capability,
    write_capability,
)

KEY, OTHER = bytes(32), bytes(range(32))
MADE = Capability(
    namespace="research",
    workload="0d4f2f6e-7c5a-4d0c-9a55-0c8b1f3d9f11",
    attempt=3,
    rights=frozenset({Right.WRITE, Right.READ}),
    until=1_700_000_000,
    max_bytes=1 << 40,
)
TEXT = write_capability(MADE, "a", KEY)


def test_it_is_read_as_it_was_written() -> None:
    assert read_capability(TEXT, {"a": KEY}) == MADE


def test_the_longest_names_fit() -> None:
    made = dataclasses.replace(MADE, namespace="n" * 63, workload="w" * 253, rights=frozenset(Right))
    text = write_capability(made, "k" * 32, KEY)
    assert len(text) <= LONGEST_CHARACTERS
    assert read_capability(text, {"k" * 32: KEY}) == made


def test_two_keys_are_known_during_a_rotation() -> None:
    new = write_capability(MADE, "b", OTHER)
    assert read_capability(TEXT, {"a": KEY, "b": OTHER}) == read_capability(new, {"a": KEY, "b": OTHER}) == MADE
    with pytest.raises(NotGenuine, match="known key"):
        read_capability(TEXT, {"b": OTHER})


def test_one_that_is_made_with_another_key_of_the_same_name_is_not_genuine() -> None:
    with pytest.raises(NotGenuine, match="MAC does not fit"):
        read_capability(TEXT, {"a": OTHER})


@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii", categories=("L", "N", "P")))
def test_no_character_can_be_changed(position: int, character: str) -> None:
    changed = TEXT[:position] + character + TEXT[position + 1 :]
    try:
        assert read_capability(changed, {"a": KEY}) == MADE
    except NotGenuine:
        return
    # Bits that Base64 does not use at the end of the MAC: the same bytes, so nothing else is allowed.
    assert changed == TEXT or position == len(TEXT) - 1


@given(st.text(max_size=3000))
def test_any_other_text_is_not_genuine(text: str) -> None:
    with pytest.raises(NotGenuine):
        read_capability(text, {"a": KEY})


def signed(payload: bytes) -> str:
    text = f"v1.a.{base64.urlsafe_b64encode(payload).rstrip(b'=').decode()}"
    mac = base64.urlsafe_b64encode(hmac.digest(KEY, text.encode(), hashlib.sha256)).rstrip(b"=")
    return f"{text}.{mac.decode()}"


FIELDS = {**dataclasses.asdict(MADE), "rights": ["read"]}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({**FIELDS, "only_from": "10.0.0.0/8"}, id="a limit that this version does not know"),
        pytest.param({**FIELDS, "rights": ["read", "own"]}, id="a right that it does not know"),
        pytest.param({name: value for name, value in FIELDS.items() if name != "until"}, id="a field is missing"),
        pytest.param({**FIELDS, "attempt": "3"}, id="a text for a number"),
        pytest.param({**FIELDS, "attempt": True}, id="a truth for a number"),
        pytest.param({**FIELDS, "until": 1e300}, id="a number that is no integer"),
        pytest.param({**FIELDS, "max_bytes": -1}, id="a negative number"),
        pytest.param({**FIELDS, "workload": "a/b"}, id="a name that is none"),
        pytest.param([], id="no object"),
    ],
)
def test_what_the_key_has_signed_but_nobody_understands_is_refused(fields: Any) -> None:
    with pytest.raises(NotGenuine):
        read_capability(signed(json.dumps(fields).encode()), {"a": KEY})


def test_deep_brackets_are_refused() -> None:
    with pytest.raises(NotGenuine):
        read_capability(signed(b"[" * 1400), {"a": KEY})


@pytest.mark.parametrize(
    ("key_id", "key", "found"),
    [("a", bytes(31), "found 31"), ("a.b", KEY, "letters"), ("", KEY, "letters"), ("k" * 33, KEY, "letters")],
)
def test_a_key_that_is_too_short_or_has_no_usable_name_is_refused(key_id: str, key: bytes, found: str) -> None:
    with pytest.raises(WireError, match=found):
        write_capability(MADE, key_id, key)
