"""Control groups are removed while the kernel and other processes remove them too, and limit processes for a while."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import limits
from tests.testcluster import cgroups
from tests.testcluster.system import cgroup_roots
from tests.waiting import until


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


@pytest.mark.integration
@pytest.mark.parametrize("ends", [pytest.param(False, id="it runs on"), pytest.param(True, id="it ends meanwhile")])
def test_a_process_has_less_of_a_processor_until_it_is_back_in_its_own_group(*, ends: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("it takes root to make a control group")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        groups = Path(f"/proc/{process.pid}/cgroup")
        before = groups.read_text()
        with limits.limited(process.pid, 0.1):
            (limited,) = set(groups.read_text().split()) - set(before.split())
            assert "/gracepoint-share-" in limited
            if ends:
                process.communicate(b"\n", timeout=60)
        if not ends:
            assert groups.read_text() == before
            process.communicate(b"\n", timeout=60)
    assert not [path for root in cgroup_roots() for path in root.glob("gracepoint-share-*")]


@pytest.mark.integration
def test_the_kernel_tells_for_how_long_a_limited_process_could_not_run() -> None:
    if os.geteuid() != 0:
        pytest.skip("it takes root to make a control group")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            with limits.limited(process.pid, 0.1) as held_back_s:
                until(lambda: held_back_s() > 0.2, "the process to be held back")
        finally:
            process.kill()
