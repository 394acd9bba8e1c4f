"""Control groups are removed while the kernel and other processes remove them too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testcluster import cgroups


def test_a_folder_that_vanishes_before_it_is_removed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "group"
    (top / "inner").mkdir(parents=True)
    walk = os.walk

    def vanishing(*args: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, folders, files in walk(*args, **options):
            if Path(place).name == "inner":
                os.rmdir(place)
            yield place, folders, files

    monkeypatch.setattr(os, "walk", vanishing)
    monkeypatch.setattr(cgroups, "cgroup_roots", lambda: [tmp_path])
    cgroups.remove("/group")
    assert not top.exists()
