"""Images of a cluster: each is built once, whoever asks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.testcluster import images, parts


def test_clusters_that_start_at_once_build_an_image_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTCLUSTER_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "pause"
    program.write_text("program")
    built: list[str] = []
    builders = threading.Barrier(2)

    def build(name: str, dockerfile: Path, context: Path, options: Sequence[str]) -> images.Image:
        with contextlib.suppress(threading.BrokenBarrierError):
            builders.wait(timeout=0.2)  # time for others to come here too
        assert (context / "pause").read_text() == "program", "another one took the file away"
        built.append(name)
        manifest = images.blob("sha256:one")
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.touch()
        return images.Image(name, "sha256:one")

    monkeypatch.setattr(images, "build_context", build)
    monkeypatch.setattr(parts, "program", lambda name: program)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: images.of_program("gracepoint/pause", "pause"), range(4)))
    assert got == [images.Image("gracepoint/pause", "sha256:one")] * 4
    assert built == ["gracepoint/pause"]
