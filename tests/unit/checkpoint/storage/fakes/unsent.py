"""Buckets of S3 whose settings are the test's alone, and requests that are noted in place of being sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage.objects.http import Connections, Exchange, Request
from gracepoint.checkpoint.storage.objects.s3 import S3Api

#: Keys that any server of a test takes.
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


class Unsent(Exchange):
    """Notes requests in place of sending them. The reply is that there is no such object."""

    def __init__(self) -> None:
        super().__init__(Connections("http://127.0.0.1:1"))
        self.sent: list[Request] = []

    def send(self, request: Request) -> None:
        self.sent.append(request)
        self.status = 404

    def read(self) -> bytes:
        return b""


class S3Settings:
    """The settings of S3: those of the environment, which are restored at the end, and ``~/.aws/config``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._config = folder / "aws-config"
        self._monkeypatch = monkeypatch

    def bucket(self, environ: dict[str, str], name: str = "bucket", config: str = "") -> S3Api:
        """Returns a bucket with these settings and no others. ``config``: of the default profile."""
        for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
            self._monkeypatch.delenv(variable)
        self._config.write_text(f"[default]\n{config}\n")
        nowhere = {"AWS_SHARED_CREDENTIALS_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true"}
        for variable, value in {**nowhere, "AWS_CONFIG_FILE": str(self._config), **environ}.items():
            self._monkeypatch.setenv(variable, value)
        return S3Api(name)
