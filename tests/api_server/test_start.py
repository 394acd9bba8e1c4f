"""What a stranger's first start writes into the log: nothing that an administrator cannot use.

The API server is a fresh one, to which the chart brings its CRDs a moment before the operator starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_server.releases import Operator, Release
from tests.testcluster import parts
from tests.testcluster.api_server import ApiServer, open_api_server, why_not
from tests.testcluster.shell import wait_until

Line = dict[str, str]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if reason := why_not():
        pytest.skip(reason)
    with open_api_server(tmp_path_factory.mktemp("fresh")) as made:
        yield made


def lines(operator: Operator) -> list[Line]:
    return [json.loads(line) for line in operator.log.read_text().splitlines()]


def wait_for(operator: Operator, message: str) -> None:
    said = lambda: message in [line["message"] for line in lines(operator)]  # noqa: E731
    wait_until(f"the line {message!r}", said, timeout_s=60, hint=operator.log.read_text)


def test_every_line_of_a_start_is_of_use(fresh: ApiServer, tmp_path: Path) -> None:
    release = Release(fresh, tmp_path)
    release.install("logFormat=json")
    with release.operator("first") as operator:
        wait_until("the first replica to be ready", operator.ready, timeout_s=180)
        fresh.define(parts.module_folder("jobset") / "config" / "components" / "crd" / "bases")
        wait_for(operator, "a kind is installed now, and watched")
    found = lines(operator)
    (said,) = [line for line in found if line["level"] != "INFO"]
    assert (said["message"], said["kind"]) == (
        "the cluster lacks a kind, which is watched once it is installed",
        "jobsets",
    )
    assert [line for line in found if line["logger"].startswith("kopf")] == []

    with release.operator("second") as operator:
        wait_until("the second replica to be ready", operator.ready, timeout_s=180)
    assert [line["message"] for line in lines(operator)] == [
        "trusted authorities",
        "certificate served",
        "listening",
        "started",
        "ready",
    ]
