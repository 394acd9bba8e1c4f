"""What is in a file is returned only if it is exactly the program that was asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.compile_cache.program_file import NotThisProgram, file_name, is_file_name, pack, unpack

KEY = "jit_train_step-0123456789abcdef"
PROGRAM = bytes(range(256)) * 4


@pytest.mark.long
@given(st.text(min_size=1, max_size=300), st.binary(max_size=200))
def test_a_program_is_read_as_it_was_written(key: str, program: bytes) -> None:
    assert unpack(key, pack(key, program)) == program


@given(st.text(min_size=1, max_size=300))
def test_the_name_of_a_file_is_known_again(key: str) -> None:
    name = file_name(key)
    assert is_file_name(name)
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name) < 200


def test_programs_with_equal_beginnings_have_different_files() -> None:
    assert file_name("jit_" + "f" * 200 + "-1") != file_name("jit_" + "f" * 200 + "-2")


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda data: data[:-1], "incomplete: it has 1023 bytes of the program, expected 1024", id="cut"),
        pytest.param(lambda data: data[:40], "the file is incomplete", id="cut in the header"),
        pytest.param(lambda data: data[:7], "incomplete: it has 7 bytes", id="cut in the first line"),
        pytest.param(lambda data: b"", "did not write the file", id="empty"),
        pytest.param(lambda data: data + b"more", "it has 1028 bytes of the program", id="longer"),
        pytest.param(flipped, "its bytes do not fit its SHA-256", id="a bit flipped"),
        pytest.param(lambda data: data.replace(b'"key"', b'"yek"'), "second line cannot be read", id="other header"),
        pytest.param(lambda data: data.replace(b'"bytes": ', b'"bytes"; '), "cannot be read", id="no JSON"),
        pytest.param(lambda data: b"\x78\x9c JAX's own", "did not write the file: it begins with", id="foreign"),
        pytest.param(lambda data: b"gracepoint compiled program 2\n{}\n", "did not write the file", id="newer"),
        pytest.param(lambda data: pack("jit_other-1", PROGRAM), "another program, 'jit_other-1'", id="another's"),
    ],
)
def test_a_file_that_is_not_the_program_is_refused(change: Callable[[bytes], bytes], says: str) -> None:
    with pytest.raises(NotThisProgram, match=says):
        unpack(KEY, change(pack(KEY, PROGRAM)))
