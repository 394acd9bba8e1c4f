"""How many cores a process can use: those that it may run on, and the limits of its containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from gracepoint import machine


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 16, id="no control groups"),
        pytest.param({"self": "0::/pod", "pod/cpu.max": "max 100000"}, 16, id="no limit"),
        pytest.param({"self": "0::/pod", "pod/cpu.max": "400000 100000"}, 4, id="limit of 4"),
        pytest.param({"self": "0::/pod", "pod/cpu.max": "150000 100000"}, 2, id="limit of 1.5"),
        pytest.param({"self": "0::/pod", "pod/cpu.max": "5000 100000"}, 1, id="limit of 0.05"),
        pytest.param({"self": "0::/pod", "pod/cpu.max": "3200000 100000"}, 16, id="limit above the cores"),
        pytest.param({"self": "0::/pod/one", "pod/cpu.max": "300000 100000"}, 3, id="limit of a group above"),
        pytest.param({"self": "0::/", "cpu.max": "200000 100000"}, 2, id="a container that sees its group as the root"),
        pytest.param(
            {
                "self": "5:memory:/pod\n4:cpu,cpuacct:/pod",
                "cpu/pod/cpu.cfs_quota_us": "600000",
                "cpu/pod/cpu.cfs_period_us": "100000",
            },
            6,
            id="version 1",
        ),
        pytest.param(
            {"self": "4:cpu:/pod", "cpu/pod/cpu.cfs_quota_us": "-1", "cpu/pod/cpu.cfs_period_us": "100000"},
            16,
            id="version 1 without a limit",
        ),
    ],
)
def test_cores_that_a_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for name, text in files.items():
        path = tmp_path / ("proc/self/cgroup" if name == "self" else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert machine.available_cores(tmp_path) == cores
