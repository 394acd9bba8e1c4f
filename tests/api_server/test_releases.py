"""Several releases of the chart in one cluster: refused by name, or each with namespaces of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.resources.crds import definitions
from tests.api_server.gang import Gang, until
from tests.api_server.releases import NAMESPACE, Operator, Release
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until

CRDS = [body["metadata"]["name"] for body in definitions().values()]


@pytest.fixture
def releases(server: ApiServer, tmp_path: Path) -> Iterator[tuple[Release, Release]]:
    """Two that are not installed yet."""
    made = []
    for name in ("gp", "other"):
        (tmp_path / name).mkdir()
        made.append(Release(server, tmp_path / name, name))
    yield made[0], made[1]
    made[0].remove()
    made[1].uninstall()


def test_a_second_release_is_refused_by_name(releases: tuple[Release, Release]) -> None:
    first, second = releases
    first.upgrade()
    why = second.refused("crds.install=false")
    assert f'Gracepoint is installed already: release "gp" in namespace "{NAMESPACE}"' in why
    assert "answers for all namespaces" in why
    assert f"helm uninstall gp --namespace {NAMESPACE}" in why
    assert "answers for all namespaces" in second.refused("crds.install=false", "watchNamespaces={default}")
    assert why == second.refused(), "whatever it says of the CRDs"
    first.upgrade("logFormat=json")


def test_releases_are_refused_a_namespace_that_both_watch(releases: tuple[Release, Release]) -> None:
    first, second = releases
    first.upgrade("watchNamespaces={default,kube-public}")
    assert "answers for default." in second.refused("crds.install=false", "watchNamespaces={default}")
    assert "answers for default, kube-public." in second.refused("crds.install=false")
    second.upgrade("watchNamespaces={kube-node-lease}")
    assert "answers for kube-node-lease." in first.refused("crds.install=false", "watchNamespaces={kube-node-lease}")


def warned(operator: Operator, message: str, namespace: str, kind: str) -> bool:
    lines = [json.loads(line) for line in operator.log.read_text().splitlines()]
    wanted = {"level": "WARNING", "message": message, "namespace": namespace, "kind": kind}
    return any(wanted.items() <= line.items() for line in lines)


def test_operator_says_that_another_release_came_without_helm(
    server: ApiServer, releases: tuple[Release, Release]
) -> None:
    """A tool that renders the chart without a cluster is not refused."""
    first, second = releases
    first.upgrade("logFormat=json")
    manifests = second.rendered()
    server.kubectl("apply", f"--namespace={NAMESPACE}", "--filename=-", stdin=manifests)
    try:
        with first.operator() as operator:
            said = lambda: "another release of Gracepoint answers for the same names" in operator.log.read_text()  # noqa: E731
            wait_until("the operator to say so", said, timeout_s=90, hint=operator.log.read_text)
        lines = [json.loads(line) for line in operator.log.read_text().splitlines()]
        (line,) = [line for line in lines if line["level"] == "ERROR" and "release" in line["message"]]
        assert (line["other"], line["namespaces"]) == (f"other-gracepoint.{NAMESPACE}.svc", "all namespaces")
        assert f'release "00-other-gracepoint" in namespace "{NAMESPACE}"' in first.refused("crds.install=false")
    finally:
        server.kubectl("delete", f"--namespace={NAMESPACE}", "--ignore-not-found", "--filename=-", stdin=manifests)


async def test_releases_with_namespaces_of_their_own_stand_side_by_side(
    server: ApiServer, releases: tuple[Release, Release]
) -> None:
    """With the rights of their accounts. Each records what happens in its own namespaces, and nobody in others."""
    api = KubeClient.connect(str(server.kubeconfig))
    gangs = [Gang(server, api, f"side-by-side-{name}") for name in ("gp", "other", "nobody")]
    for gang in gangs:
        await gang.make()
    watched = (f"{gangs[0].name},kube-public", gangs[1].name)
    with contextlib.ExitStack() as running:
        running.callback(api.close)
        for release, namespaces in zip(releases, watched, strict=True):
            release.upgrade(f"watchNamespaces={{{namespaces}}}", "logFormat=json")
        # Somebody has taken a right away: that concerns one namespace.
        server.kubectl("delete", "rolebinding", "gp-gracepoint-namespaces", "--namespace=kube-public")
        operators = [running.enter_context(release.operator()) for release in releases]
        for operator in operators:
            wait_until("the operator to be ready", operator.ready, timeout_s=180, hint=operator.log.read_text)
        for gang in gangs:
            await gang.taint(0)
        for gang in gangs[:2]:
            (record,) = await until(gang.records, f"a record in {gang.name}")
            assert record["metadata"]["name"] == gang.epoch(1)
        assert await gangs[2].records() == []
        said = functools.partial(warned, operators[0], "a kind fails, and is tried again", "kube-public", "pods")
        wait_until("the log to name the namespace", said, timeout_s=60, hint=operators[0].log.read_text)
        assert "WARNING" not in operators[1].log.read_text()


def test_release_of_another_name_says_how_it_takes_over_the_definitions(
    server: ApiServer, releases: tuple[Release, Release]
) -> None:
    """They stay when a release is removed, and Helm says only that they belong to it."""
    first, second = releases
    server.kubectl("label", "crd", *CRDS, "app.kubernetes.io/managed-by=Helm")
    owner = ("meta.helm.sh/release-name=gp", f"meta.helm.sh/release-namespace={NAMESPACE}")
    server.kubectl("annotate", "crd", *CRDS, *owner)
    try:
        first.install()
        first.uninstall()
        why = second.refused()
        assert f"the CRDs belong to release {NAMESPACE}/gp (namespace/name)" in why
        commands = re.findall(r"^ *kubectl (.*)$", why, re.MULTILINE)
        assert len(commands) == 2
        for command in commands:
            server.kubectl(*shlex.split(command))
        second.install()
        second.install("logFormat=json")
    finally:
        server.kubectl("label", "crd", *CRDS, "app.kubernetes.io/managed-by-")
        server.kubectl("annotate", "crd", *CRDS, "meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-")


def test_definitions_that_helm_did_not_install_are_taken_over_by_two_commands(
    releases: tuple[Release, Release], server: ApiServer
) -> None:
    first, _ = releases
    why = first.refused()
    assert "the CRDs belong to no release of Helm" in why
    take = functools.partial(server.kubectl, check=False)
    try:
        for command in re.findall(r"^ *kubectl (.*)$", why, re.MULTILINE):
            assert take(*shlex.split(command)).returncode == 0
        first.install()
    finally:
        take("label", "crd", *CRDS, "app.kubernetes.io/managed-by-")
        take("annotate", "crd", *CRDS, "meta.helm.sh/release-name-", "meta.helm.sh/release-namespace-")
