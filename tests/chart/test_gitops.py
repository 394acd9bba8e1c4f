"""What docs/operations.md has for Argo CD leaves alone what the operator fills in, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.chart.conftest import WITH_TOKEN, Helm
from tests.chart.helm import CHART
from tests.chart.objects import Json, of_kind

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
#: By the names that roles have for them.
KINDS = {
    "secrets": ("", "Secret"),
    "configmaps": ("", "ConfigMap"),
    "mutatingwebhookconfigurations": ("admissionregistration.k8s.io", "MutatingWebhookConfiguration"),
    "validatingwebhookconfigurations": ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration"),
}


def test_exactly_what_the_operator_may_change_is_ignored(helm: Helm) -> None:
    done = helm("template", "gracepoint", str(CHART), "--kube-version", "1.34.0", *WITH_TOKEN)
    objects: list[Json] = [body for body in yaml.safe_load_all(done.stdout) if body]
    rules = [rule for kind in ("Role", "ClusterRole") for role in of_kind(objects, kind) for rule in role["rules"]]
    writable = {
        (*KINDS[resource], name)
        for rule in rules
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [])
        if "patch" in rule["verbs"]
    }
    assert len(writable) == 5

    (block,) = re.findall(r"```yaml\n(ignoreDifferences:\n.*?)```", PAGE.read_text(), re.S)
    ignored = yaml.safe_load(block)["ignoreDifferences"]
    found = set()
    for entry in ignored:
        wanted = entry.get("group", ""), entry["kind"]
        names = [body["metadata"]["name"] for body in of_kind(objects, entry["kind"])]
        found |= {(*wanted, name) for name in names if name == entry.get("name", name)}
        if "Webhook" in entry["kind"]:
            assert entry["jqPathExpressions"] == [".webhooks[].clientConfig.caBundle"]
        else:
            assert entry["jsonPointers"] == ["/data"]
    assert found == writable
