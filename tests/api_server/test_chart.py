"""The chart on a real API server: what it installs, what an upgrade leaves alone, and what the operator fills in."""

from __future__ import annotations

import base64
import json
import re
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint_operator.kube import objects
from gracepoint_operator.trust import bundle as pem
from tests.api_server.releases import CHART, NAMESPACE, PLACES, Release
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until


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


def unmarked(folder: Path) -> Path:
    """A chart that leaves no mark of who sets the authorities, as those up to 0.2."""
    made = shutil.copytree(CHART, folder / "former")
    admission = made / "templates" / "admission.yaml"
    text, number = re.subn(r'webhookAnnotations" \(list \$ \$\w+\)', 'annotations" $', admission.read_text())
    assert number == 2
    admission.write_text(text)
    return made


def test_a_rollback_to_the_chart_before_takes_no_authorities_away(release: Release, tmp_path: Path) -> None:
    release.upgrade(chart=unmarked(tmp_path))
    made = release.keep()
    release.upgrade()
    assert release.told() == {made.ca}
    release.roll_back(1)
    assert release.told() == {made.ca}


def test_the_earlier_chart_s_bundle_stays_until_the_operator_takes_over(release: Release, tmp_path: Path) -> None:
    text = pem.make_authority("helm", 1_750_000_000.0, 3650 * 86400.0).chain
    former = unmarked(tmp_path)
    admission = former / "templates" / "admission.yaml"
    line = f"      caBundle: {base64.b64encode(text.encode()).decode()}\n      service:\n"
    head, *others = re.split(r"(?s)      \{\{- with \$\w+ \}\}\n      caBundle.*?service:\n", admission.read_text())
    admission.write_text(line.join((head, *others)))
    assert len(others) == admission.read_text().count("      service:\n")
    release.upgrade(chart=former)
    assert release.told() == {text}
    for setting in ("logFormat=json", "logFormat=plain"):
        release.upgrade(setting)
        assert release.told() == {text}
    for revision in (2, 1):
        release.roll_back(revision)
        assert release.told() == {text}


def test_no_rollback_takes_the_authorities_away(release: Release) -> None:
    """Neither to the first revision, which was rendered before there were any, nor from it."""
    release.upgrade()
    made = release.keep()
    release.upgrade("logFormat=json")
    release.upgrade("logLevel=debug")
    for revision in (1, 3, 2):
        release.roll_back(revision)
        assert release.told() == {made.ca}


def test_authorities_of_the_chart_stay_when_the_operator_takes_over(release: Release) -> None:
    text = pem.make_authority("mine", 1_750_000_000.0, 3650 * 86400.0).chain
    values = json.dumps({"tls": {"mode": "existingSecret", "existingSecret": "mine", "caCertificate": text}})
    release.upgrade(values=values)
    assert release.told() == {text}
    release.upgrade()
    assert release.told() == {text}
    assert release.told() != {release.keep().ca}


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
    assert len(pem.read_certificates(made.ca)) == 2
    assert release.told() == {made.ca}


ACCOUNT = f"system:serviceaccount:{NAMESPACE}:gp-gracepoint"


def refusal(server: ApiServer, kind: objects.Kind, name: str, patch: object, user: str = ACCOUNT) -> str:
    """What the API server says of a JSON patch of the operator's account. Empty if it is accepted, in a dry run."""
    as_user = {"Impersonate-User": user} if user else {}
    request = urllib.request.Request(
        f"{server.url}{kind.path(None, name)}?dryRun=All",
        json.dumps(patch).encode(),
        {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json-patch+json", **as_user},
        method="PATCH",
    )
    try:
        with urllib.request.urlopen(request, timeout=10, context=ssl.create_default_context(cafile=server.ca)):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.load(error)["message"])


def replaced(path: str, value: object) -> list[dict[str, object]]:
    return [{"op": "add", "path": path, "value": value}]


#: Values of each field of a webhook. Each webhook has another one than one of these.
OTHERS: dict[str, list[object]] = {
    "admissionReviewVersions": [["v1", "v1beta1"]],
    "failurePolicy": ["Ignore", "Fail"],
    "matchConditions": [[{"name": "none", "expression": "false"}]],
    "matchPolicy": ["Exact"],
    "name": ["secrets.gracepoint.dev"],
    "namespaceSelector": [{}],
    "objectSelector": [{"matchLabels": {"mine": "yes"}}],
    "reinvocationPolicy": ["Never"],
    "rules": [[{"apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*/*"], "operations": ["*"]}]],
    "sideEffects": ["None", "NoneOnDryRun"],
    "timeoutSeconds": [30],
}


def test_operator_changes_nothing_of_its_webhooks_but_the_authorities(release: Release) -> None:
    """Who may change the rest sees, and changes, any object of the cluster: the account would be an administrator's."""
    release.upgrade()
    server, why = release.server, "the operator changes nothing of its webhook configurations but caBundle"
    bundle = base64.b64encode(release.keep().ca.encode()).decode()
    mutating = (objects.MUTATING_WEBHOOKS, PLACES.mutating)
    validating = (objects.VALIDATING_WEBHOOKS, PLACES.validating)
    first = replaced("/metadata/labels/mine", "yes")
    wait_until("the admission policy", lambda: why in refusal(server, *mutating, first), timeout_s=60)
    for kind in (mutating, validating):
        webhook = "/webhooks/0"
        assert refusal(server, *kind, replaced(f"{webhook}/clientConfig/caBundle", bundle)) == ""
        present = release.get(kind[0].plural, kind[1])["webhooks"][0]
        for field, values in OTHERS.items():
            if field == "reinvocationPolicy" and kind is validating:
                continue  # has none
            patch = replaced(f"{webhook}/{field}", next(value for value in values if value != present.get(field)))
            assert why in refusal(server, *kind, patch), field
            assert refusal(server, *kind, patch, user="") == "", f"{field}: the API server itself does not object"
        client = f"{webhook}/clientConfig"
        others: dict[str, object] = {
            "url": replaced(client, {"url": "https://example.com/", "caBundle": bundle}),
            "service": replaced(f"{client}/service/name", "another"),
            "path": replaced(f"{client}/service/path", "/another"),
            "less": [{"op": "remove", "path": webhook}],
            "annotation": replaced("/metadata/annotations/mine", "yes"),
            "finalizer": replaced("/metadata/finalizers", ["example.com/never"]),
            "owner": replaced(
                "/metadata/ownerReferences", [{"apiVersion": "v1", "kind": "Namespace", "name": "x", "uid": "x"}]
            ),
        }
        for what, other in others.items():
            assert why in refusal(server, *kind, other), what


@pytest.mark.parametrize("version", ["server", pytest.param("newest", marks=pytest.mark.newest)])
def test_admission_policy_names_every_field_of_a_webhook(request: pytest.FixtureRequest, version: str) -> None:
    """A field that a later Kubernetes adds has to be compared, too."""
    made: ApiServer = request.getfixturevalue(version)
    found = json.loads(made.kubectl("get", "--raw=/openapi/v3/apis/admissionregistration.k8s.io/v1").stdout)
    schemas = {name.rpartition(".")[2]: schema for name, schema in found["components"]["schemas"].items()}
    fields = {name: schema.get("properties", {}).keys() for name, schema in schemas.items()}
    assert fields["MutatingWebhook"] - {"clientConfig"} == OTHERS.keys()
    assert fields["ValidatingWebhook"] - {"clientConfig"} == OTHERS.keys() - {"reinvocationPolicy"}
    assert fields["WebhookClientConfig"] == {"url", "service", "caBundle"}
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert fields[kind] == {"apiVersion", "kind", "metadata", "webhooks"}


def test_operator_may_not_touch_webhooks_whose_authorities_others_write(release: Release) -> None:
    text = pem.make_authority("mine", 1_750_000_000.0, 3650 * 86400.0).chain
    values = json.dumps({"tls": {"mode": "existingSecret", "existingSecret": "mine", "caCertificate": text}})
    release.upgrade(values=values)
    patch = replaced("/webhooks/0/clientConfig/caBundle", base64.b64encode(text.encode()).decode())
    for kind, name in ((objects.MUTATING_WEBHOOKS, PLACES.mutating), (objects.VALIDATING_WEBHOOKS, PLACES.validating)):
        assert "cannot patch resource" in refusal(release.server, kind, name, patch)
