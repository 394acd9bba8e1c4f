"""A cluster for the demo's tests that is only an answer to kubectl."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.testcluster.api import Cluster


class Answers(Cluster):
    """Answers ``kubectl get`` with a list of objects, and keeps what is created."""

    shared_dir: Path = Path()

    def __init__(self, shared_dir: Path, *items: dict[str, Any]) -> None:
        self.shared_dir = shared_dir
        self.items = items
        self.created: list[dict[str, Any]] = []

    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        if args[0] == "create":
            self.created.append(json.loads(stdin or ""))
        return subprocess.CompletedProcess(args, 0, json.dumps({"items": self.items}), "")

    @property
    def nodes(self) -> tuple[str, ...]:
        raise NotImplementedError

    def helm(self, *args: str, timeout_s: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        raise NotImplementedError

    def build_image(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def lose_node(self, name: str, *, delete_object: bool = False) -> None:
        raise NotImplementedError

    def restore_node(self, name: str, *, timeout_s: float = 60) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
