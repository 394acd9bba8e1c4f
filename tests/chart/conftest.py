"""Rendering the chart with a real helm. Without any, the chart's tests are skipped."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.chart.helm import CHART, helm_program
from tests.testcluster.api import ClusterError

#: Without a cluster, the chart makes no token.
WITH_TOKEN = ("--set", "admission.token=0123456789abcdef")

#: The parser in C, where PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Helm = Callable[..., "subprocess.CompletedProcess[str]"]
Render = Callable[..., list[dict[str, Any]]]


def _helm() -> str:
    try:
        return helm_program()
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
