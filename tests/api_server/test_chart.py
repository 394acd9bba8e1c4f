"""The chart on a real API server: what it installs, what an upgrade leaves alone, and what the operator fills in."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint_operator.trust import pem
from tests.api_server.releases import CHART, NAMESPACE, PLACES, Release
from tests.testcluster.api_server import ApiServer


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
