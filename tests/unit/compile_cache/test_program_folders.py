"""A changed image or topology begins a new folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from gracepoint.compile_cache.program_file import file_name
from gracepoint.compile_cache.program_folders import SHARED, Platform, ProgramPlace, folder_of, own_part, place_of

PLATFORM = Platform(
    jax="0.10.2",
    jaxlib="0.10.2+cuda",
    platform="gpu",
    platform_version="PJRT C API\ncuda 13000",
    devices={"NVIDIA H200": 8},
    processes=2,
)
NAME = file_name("jit_step-12")


def test_a_folder_s_name_tells_versions_and_topology() -> None:
    assert folder_of(PLATFORM).startswith("jax-0.10.2-jaxlib-0.10.2_cuda-gpu-2x8-")
    assert folder_of(PLATFORM) == folder_of(dataclasses.replace(PLATFORM))


@pytest.mark.parametrize(
    "changed",
    [
        {"jax": "0.10.3"},
        {"jaxlib": "0.10.2+rocm"},
        {"platform": "tpu"},
        {"platform_version": "PJRT C API\ncuda 13010"},
        {"devices": {"NVIDIA H200": 16}},
        {"devices": {"NVIDIA H100": 8}},
        {"devices": {"NVIDIA H200": 4, "NVIDIA H100": 4}},
        {"processes": 4},
        {"host": "x86_64 with AMX"},
        {"fingerprint": "17"},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_another_platform_has_another_folder(changed: dict[str, Any]) -> None:
    assert folder_of(dataclasses.replace(PLATFORM, **changed)) != folder_of(PLATFORM)


@pytest.mark.parametrize("part", [SHARED, own_part(0), own_part(1023)])
def test_programs_are_recognised_by_their_place(part: str) -> None:
    folder = folder_of(PLATFORM)
    assert place_of(f"{folder}/{part}/{NAME}") == ProgramPlace(folder, is_program=True)
    assert place_of(f"{folder}/{part}/.{NAME}.partial-0123456789abcdef") == ProgramPlace(folder, is_program=False)


@pytest.mark.parametrize(
    "key",
    [
        "README",
        f"all/{NAME}",
        f"{folder_of(PLATFORM)}/{NAME}",
        f"{folder_of(PLATFORM)}/mine/{NAME}",
        f"{folder_of(PLATFORM)}/all/notes.txt",
        f"{folder_of(PLATFORM)}/all/deeper/{NAME}",
        f"backup/{folder_of(PLATFORM)}/all/{NAME}",
        f"{folder_of(PLATFORM)}/all/.notes.partial-0123456789abcdef",
        "jit_step-0123-cache",
    ],
)
def test_other_files_are_not_ours(key: str) -> None:
    assert place_of(key) is None
