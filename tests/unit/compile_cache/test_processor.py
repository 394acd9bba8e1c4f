"""What a program for CPUs depends on: the kind of CPU, and not what changes from one moment to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracepoint import machine

CPUINFO = """processor\t: {number}
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
cpu MHz\t\t: {mhz}
flags\t\t: fpu avx2 {flags}
"""


def processor(root: Path, *, mhz: str = "2700.1", flags: str = "avx512f") -> str:
    (root / "proc").mkdir(exist_ok=True)
    text = "\n".join(CPUINFO.format(number=number, mhz=mhz, flags=flags) for number in range(2))
    (root / "proc/cpuinfo").write_text(text)
    return machine.processor(root)


def test_equal_machines_are_alike_at_any_clock_rate(tmp_path: Path) -> None:
    assert processor(tmp_path, mhz="2700.1") == processor(tmp_path, mhz="3500.9")


def test_machines_with_other_features_differ(tmp_path: Path) -> None:
    assert processor(tmp_path, flags="avx512f") != processor(tmp_path, flags="avx512f amx_tile")


@pytest.mark.parametrize("text", [None, "", "no colon\n"])
def test_without_features_the_architecture_is_left(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(text)
    assert machine.processor(tmp_path)
    assert "\n" not in machine.processor(tmp_path)
