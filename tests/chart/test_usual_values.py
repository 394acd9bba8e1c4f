"""What people have set for other operators' charts is set here by the same names and in the same form."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.conftest import Helm, Render
from tests.chart.helm import CHART
from tests.chart.objects import Json, of_kind, one
from tests.chart.other_charts import CERT_MANAGER, KARPENTER, PROMETHEUS

Rendered = Callable[[str], list[Json]]


def pod_spec(objects: list[Json]) -> Json:
    spec: Json = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.fixture
def rendered(template: Helm, tmp_path: Path) -> Rendered:
    """The objects with the values of a file."""

    def of(values: str) -> list[Json]:
        path = tmp_path / "values.yaml"
        path.write_text(values)
        done = template("--values", str(path))
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return of


def test_values_of_cert_manager_do_here_what_they_do_there(rendered: Rendered) -> None:
    objects = rendered(CERT_MANAGER)
    values: Any = yaml.safe_load(CERT_MANAGER)
    deployment, pod, account = one(objects, "Deployment"), pod_spec(objects), one(objects, "ServiceAccount")
    (container,) = pod["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("quay.io/jetstack/gracepoint:v1", "Always")
    assert pod["imagePullSecrets"] == [{"name": "image-pull-secret"}]
    assert account["metadata"]["name"] == pod["serviceAccountName"] == "certs"
    assert account["metadata"]["annotations"] == values["serviceAccount"]["annotations"]
    assert account["metadata"]["labels"]["of"] == "account"
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert (budget["minAvailable"], "maxUnavailable" in budget) == (1, False)
    assert container["args"][-1] == "--log-level=debug"
    assert values["extraEnv"][0] in container["env"]
    assert deployment["metadata"]["annotations"] == values["deploymentAnnotations"]
    metadata = deployment["spec"]["template"]["metadata"]
    assert values["podLabels"].items() <= metadata["labels"].items()
    assert values["podAnnotations"].items() <= metadata["annotations"].items()
    for field in ("hostAliases", "nodeSelector", "topologySpreadConstraints"):
        assert pod[field] == values[field]
    assert values["tolerations"][0] in pod["tolerations"]
    assert container["resources"]["requests"] == values["resources"]["requests"]


def test_values_of_karpenter_do_here_what_they_do_there(rendered: Rendered) -> None:
    objects = rendered(KARPENTER)
    values: Any = yaml.safe_load(KARPENTER)
    deployment, pod = one(objects, "Deployment"), pod_spec(objects)
    assert (deployment["spec"]["replicas"], deployment["spec"]["revisionHistoryLimit"]) == (2, 3)
    assert deployment["spec"]["strategy"] == values["strategy"]
    assert one(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert pod["securityContext"]["fsGroup"] == 65536
    for field in ("priorityClassName", "terminationGracePeriodSeconds", "dnsPolicy", "dnsConfig", "affinity"):
        assert pod[field] == values[field]
    assert pod["imagePullSecrets"] == values["imagePullSecrets"]
    assert values["extraVolumes"][0] in pod["volumes"]
    assert values["extraVolumeMounts"][0] in pod["containers"][0]["volumeMounts"]


def test_values_of_the_prometheus_stack_do_here_what_they_do_there(rendered: Rendered) -> None:
    objects = rendered(PROMETHEUS)
    values: Any = yaml.safe_load(PROMETHEUS)
    pod, service = pod_spec(objects), one(objects, "Service")
    (container,) = pod["containers"]
    assert container["image"] == "registry.example.com/team/gracepoint:v2"
    assert pod["imagePullSecrets"] == [{"name": "as-a-name"}]
    assert [each["metadata"]["name"] for each in of_kind(objects, "ServiceAccount")] == ["gp-gracepoint-metrics"]
    assert pod["serviceAccountName"] == "theirs"
    assert service["metadata"]["annotations"] == values["service"]["annotations"]
    assert service["metadata"]["labels"]["of"] == "service"
    assert (service["spec"]["ipFamilyPolicy"], service["spec"]["ipFamilies"]) == ("PreferDualStack", ["IPv6", "IPv4"])
    assert pod["securityContext"] == values["podSecurityContext"]
    assert container["securityContext"] == values["securityContext"]
    assert pod["volumes"][-1] == values["extraVolumes"][0]
    arguments = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert (arguments["--log-format"], arguments["--log-level"]) == ("json", "error")
    assert one(objects, "PodMonitor")["metadata"]["labels"]["release"] == "prometheus"
    assert {each["metadata"]["labels"]["prometheus"] for each in objects if each["kind"] == "ConfigMap"} == {"stack"}


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_a_part_of_an_umbrella_chart_that_is_on_or_off(helm: Helm, tmp_path: Path, enabled: bool) -> None:
    umbrella = tmp_path / "platform"
    shutil.copytree(CHART, umbrella / "charts" / "gracepoint")
    chart = {
        "apiVersion": "v2",
        "name": "platform",
        "version": "1.0.0",
        "dependencies": [{"name": "gracepoint", "version": "0.x.x", "condition": "gracepoint.enabled"}],
    }
    values = {
        "global": {"imageRegistry": "registry.example.com", "storageClass": "fast", "security": {"allow": True}},
        "gracepoint": {"enabled": enabled, "commonLabels": {"team": "ml"}, "replicas": 3},
    }
    (umbrella / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (umbrella / "values.yaml").write_text(yaml.safe_dump(values))
    done = helm("template", "gp", str(umbrella), "-n", "gp-system", "--kube-version", "1.34.0")
    assert done.returncode == 0, done.stderr
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert bool(objects) == enabled
    if enabled:
        assert one(objects, "Deployment")["spec"]["replicas"] == 3
        assert pod_spec(objects)["containers"][0]["image"].startswith("registry.example.com/")
        assert len(base64.b64decode(next(o["data"]["token"] for o in of_kind(objects, "Secret") if "data" in o))) > 15
    assert helm("lint", str(umbrella), "--kube-version", "1.34.0").returncode == 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param("replicaCount=2", "'replicaCount' not allowed", id="another chart's name"),
        pytest.param("securityContext.fsGroup=1", "'fsGroup' not allowed", id="the pod's, set for the container"),
        pytest.param("podSecurityContext.readOnlyRootFilesystem=true", "not allowed", id="the container's for the pod"),
        pytest.param("podDisruptionBudget.minAvailabel=1", "'minAvailabel' not allowed", id="a slip"),
        pytest.param("podDisruptionBudget.minAvailable=one", "/podDisruptionBudget/minAvailable", id="no amount"),
        pytest.param("serviceAccount.anotations.a=b", "'anotations' not allowed", id="a slip below"),
        pytest.param("imagePullSecrets[0].nam=x", "/imagePullSecrets/0", id="a slip in a list"),
        pytest.param("strategy.rolling=1", "'rolling' not allowed", id="a slip in the strategy"),
        pytest.param("terminationGracePeriodSeconds=1", "/terminationGracePeriodSeconds", id="too short an end"),
    ],
)
def test_what_no_value_is_called_stays_an_error(template: Helm, setting: str, words: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


def test_pods_have_the_systems_priority_with_what_allows_it_or_none(render: Render, helm: Helm) -> None:
    objects = render()
    assert pod_spec(objects)["priorityClassName"] == "system-cluster-critical"
    quota = one(objects, "ResourceQuota")
    assert quota["spec"] == {
        "hard": {"pods": "1G"},
        "scopeSelector": {
            "matchExpressions": [
                {"scopeName": "PriorityClass", "operator": "In", "values": ["system-cluster-critical"]}
            ]
        },
    }
    without = render("priorityClassName=")
    assert "priorityClassName" not in pod_spec(without)
    assert not of_kind(without, "ResourceQuota")
    own = render("priorityClassName=high")
    assert (pod_spec(own)["priorityClassName"], of_kind(own, "ResourceQuota")) == ("high", [])
    done = helm("template", "gp", str(CHART), "--namespace=kube-system", "--kube-version=1.34.0")
    inside = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert pod_spec(inside)["priorityClassName"] == "system-cluster-critical"
    assert not of_kind(inside, "ResourceQuota"), "all pods of kube-system would be counted"
