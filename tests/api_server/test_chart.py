"""The chart on a real API server: what it installs, what an upgrade leaves alone, and what the operator fills in."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.observability.metrics import Metrics
from gracepoint_operator.trust import pem
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.trust.keeper import TrustKeeper, TrustPlaces
from tests.testcluster import parts
from tests.testcluster.api import ClusterError
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until

CHART = Path(__file__).parents[2] / "charts" / "gracepoint"
NAMESPACE = "gp-system"
PLACES = TrustPlaces(
    NAMESPACE, "gp-gracepoint-certificates", "gp-gracepoint-trust", "00-gp-gracepoint", "gp-gracepoint", "gp.svc"
)


class Release:
    """A release of the chart, and the operator's part that keeps certificate and trust."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        try:
            self._helm = str(parts.program("helm"))
        except ClusterError as reason:
            pytest.skip(str(reason))

    def upgrade(self, *settings: str, chart: Path = CHART) -> None:
        """Installs or upgrades. The CRDs are there already, and are no part of this."""
        arguments = [part for setting in ("crds.install=false", *settings) for part in ("--set", setting)]
        self._run("upgrade", "--install", "gp", str(chart), "--create-namespace", *arguments)

    def uninstall(self) -> None:
        """Removes the release, and waits until the API server calls its webhooks no more: other tests follow."""
        self._run("uninstall", "gp", "--ignore-not-found")
        self.server.kubectl("delete", "secret", "gp-gracepoint-tls", f"--namespace={NAMESPACE}", "--ignore-not-found")
        labelled = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": "probe", "namespace": "default", "labels": {LABEL_POLICY: "none"}},
            "spec": {"replicatedJobs": []},
        }

        def accepted() -> bool:
            arguments = ("create", "--dry-run=server", "--filename=-")
            return self.server.kubectl(*arguments, stdin=json.dumps(labelled), check=False).returncode == 0

        wait_until("a labelled JobSet to be accepted without the webhook", accepted, timeout_s=30)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        answer = self.server.kubectl("get", kind, name, f"--namespace={NAMESPACE}", "--output=json")
        found: dict[str, Any] = json.loads(answer.stdout)
        return found

    def keep(self) -> Certificates:
        """Runs one round of the operator's part. Returns what it serves and trusts."""

        async def once() -> Certificates:
            api = KubeClient.connect(str(self.server.kubeconfig))
            try:
                made = Certificates(self.folder, required=False)
                assert await TrustKeeper(api, made, PLACES, Metrics()).once()
                return made
            finally:
                api.close()

        return asyncio.run(once())

    def told(self) -> set[str]:
        """The authorities in the webhook configurations."""
        kinds = ("mutatingwebhookconfiguration", PLACES.mutating), ("validatingwebhookconfiguration", PLACES.validating)
        bodies = [self.get(kind, name) for kind, name in kinds]
        found = {webhook["clientConfig"].get("caBundle", "") for body in bodies for webhook in body["webhooks"]}
        return {base64.b64decode(text).decode() for text in found}

    def _run(self, *arguments: str) -> None:
        command = [self._helm, f"--kubeconfig={self.server.kubeconfig}", f"--namespace={NAMESPACE}", *arguments]
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def release(server: ApiServer, tmp_path: Path) -> Iterator[Release]:
    made = Release(server, tmp_path)
    yield made
    made.uninstall()


def test_an_upgrade_leaves_certificate_trust_and_token_alone(release: Release) -> None:
    release.upgrade()
    token = release.get("secret", "gp-gracepoint-webhooks")["data"]
    made = release.keep()
    assert made.served is not None
    assert release.told() == {made.ca}
    secret, bundle = release.get("secret", PLACES.secret)["data"], release.get("configmap", PLACES.config_map)["data"]
    release.upgrade("logFormat=json")
    assert release.get("secret", PLACES.secret)["data"] == secret
    assert release.get("configmap", PLACES.config_map)["data"] == bundle
    assert release.told() == {made.ca}
    assert release.get("secret", "gp-gracepoint-webhooks")["data"] == token
    assert release.keep().served == made.served


def test_the_earlier_chart_s_bundle_stays_until_the_operator_takes_over(release: Release, tmp_path: Path) -> None:
    text = pem.make_authority("helm", 1_750_000_000.0, 3650 * 86400.0).chain
    former = shutil.copytree(CHART, tmp_path / "former")
    admission = former / "templates" / "admission.yaml"
    line = f"      caBundle: {base64.b64encode(text.encode()).decode()}\n      service:\n"
    head, *others = re.split(r"(?s)      \{\{- with \$\w+ \}\}\n      caBundle.*?service:\n", admission.read_text())
    admission.write_text(line.join((head, *others)))
    assert len(others) == 6
    release.upgrade(chart=former)
    assert release.told() == {text}
    release.upgrade()
    assert release.told() == {text}


def test_the_certificate_of_an_earlier_chart_is_kept_and_followed(release: Release) -> None:
    """Charts before made it, and pods that run trust it."""
    authority = pem.make_authority("helm", 1_750_000_000.0, 3650 * 86400.0)
    leaf = pem.issue(authority, ["gp.svc"], 1_750_000_000.0, 3650 * 86400.0)
    texts = {"tls.crt": leaf.chain, "tls.key": leaf.key, "ca.crt": authority.chain}
    data = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    for name, text in texts.items():
        (release.folder / name).write_text(text)
    release.upgrade()
    metadata = {
        "name": "gp-gracepoint-tls",
        "namespace": NAMESPACE,
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "gp", "meta.helm.sh/release-namespace": NAMESPACE},
    }
    former = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": data}
    path = release.folder / "former.json"
    path.write_text(json.dumps(former))
    release.server.kubectl("apply", f"--filename={path}")
    for _ in range(2):
        release.upgrade()
        assert release.get("secret", "gp-gracepoint-tls")["data"] == data
    volumes = release.get("deployment", "gp-gracepoint")["spec"]["template"]["spec"]["volumes"]
    (mounted,) = (volume["projected"]["sources"] for volume in volumes if volume["name"] == "tls")
    assert {"key": "tls.crt", "path": "former/tls.crt"} in [item for s in mounted for item in s["secret"]["items"]]
    made = release.keep()
    assert made.served == leaf
    assert len(pem.read(made.ca)) == 2
    assert release.told() == {made.ca}
