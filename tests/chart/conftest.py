"""Rendering the chart with a real helm.

helm is the one that the environment variable HELM names, else the one on the PATH, else the one that the test
cluster's parts are built with. Without any, the chart's tests are skipped.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.testcluster.api import ClusterError
from tests.testcluster.parts import program

CHART = Path(__file__).parents[2] / "charts" / "gracepoint"

#: Without a cluster, the chart makes no token.
WITH_TOKEN = ("--set", "admission.token=0123456789abcdef")

#: The parser in C, where PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Helm = Callable[..., "subprocess.CompletedProcess[str]"]
Render = Callable[..., list[dict[str, Any]]]


def _helm() -> str:
    found = os.environ.get("HELM") or shutil.which("helm")
    if found:
        return found
    try:
        return str(program("helm"))
    except ClusterError as error:
        pytest.skip(f"no helm: HELM is not set, none is on the PATH, and {error}")


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Runs helm on nothing but the chart: no cluster, no settings of this machine's user."""
    executable = _helm()
    home = tmp_path_factory.mktemp("helm")
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "KUBECONFIG": str(home / "none")}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [executable, *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture(scope="session")
def template(helm: Helm) -> Helm:
    """``helm template`` of a release ``gp`` in ``gp-system``, with a token unless the arguments set another one."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        # Built without its Makefile, helm believes in a very old Kubernetes.
        return helm("template", "gp", str(CHART), "-n", "gp-system", "--kube-version", "1.34.0", *WITH_TOKEN, *args)

    return run


@pytest.fixture(scope="session")
def render(template: Helm) -> Render:
    """The objects of a release with ``--set`` for each argument. They are rendered once, and copied for each test."""

    @functools.cache
    def rendered(*settings: str) -> list[dict[str, Any]]:
        done = template(*(part for setting in settings for part in ("--set", setting)))
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.load_all(done.stdout, _LOADER) if document]

    return lambda *settings: copy.deepcopy(rendered(*settings))
