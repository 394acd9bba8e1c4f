"""The snapshot servers that the chart installs: who may reach them, what they may use, and how they end."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint.snapshots.__main__ import parser
from gracepoint.wire.names import LABEL_POLICY
from tests.chart.conftest import Helm, Render
from tests.chart.objects import Json, of_kind, one

ON = ("snapshots.enabled=true", "snapshots.capacity=64Gi", "snapshots.nodeSelector.pool=tpu")
MODES = [
    pytest.param([], "gp-gracepoint-snapshots", id="selfSigned"),
    pytest.param(["tls.mode=certManager"], "gp-gracepoint-snapshots-tls", id="certManager"),
    pytest.param(
        ["tls.mode=existingSecret", "tls.existingSecret=mine", "snapshots.existingSecret=theirs"],
        "theirs",
        id="existingSecret",
    ),
]
NAME = "gp-gracepoint-snapshots"


def named(objects: list[Json], kind: str) -> Json:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == NAME]
    return found


def pod(objects: list[Json]) -> Json:
    spec: Json = one(objects, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def arguments(objects: list[Json]) -> Any:
    """As the server itself reads them."""
    return parser().parse_args(pod(objects)["containers"][0]["args"])


def operator_arguments(objects: list[Json]) -> dict[str, str]:
    args = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    return dict(zip(args[::2], args[1::2], strict=True))


def test_there_are_none_unless_they_are_asked_for(render: Render) -> None:
    objects = render()
    assert not of_kind(objects, "DaemonSet")
    assert not [each for each in objects if "snapshots" in each["metadata"]["name"]]
    assert not [name for name in operator_arguments(objects) if "snapshot" in name]
    assert "--snapshots-url" not in str(one(objects, "Pod"))


def test_a_server_has_no_right_and_nothing_of_its_node_but_memory(render: Render) -> None:
    """The restricted Pod Security Standard, a read-only root, and no token."""
    spec = pod(render(*ON))
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        assert key not in spec
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "hostPort" not in container["ports"][0]
    assert {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}} == {"projected"}
    assert "env" not in container


@pytest.mark.parametrize(
    ("capacity", "capacity_bytes"),
    [("64Gi", 64 << 30), ("1Ti", 1 << 40), ("512Mi", 512 << 20), ("100G", 100 * 10**9)],
)
def test_memory_is_the_capacity_and_what_a_server_needs_beside_it(
    render: Render, capacity: str, capacity_bytes: int
) -> None:
    objects = render(*ON, f"snapshots.capacity={capacity}")
    assert arguments(objects).capacity_bytes == capacity_bytes
    resources = pod(objects)["containers"][0]["resources"]
    memory = str(capacity_bytes + capacity_bytes // 256 + (256 << 20))
    assert resources == {"requests": {"cpu": "100m", "memory": memory}, "limits": {"memory": memory}}


def test_the_command_line_is_the_one_that_the_server_takes(render: Render) -> None:
    more = ("snapshots.workloadCapacity=16Gi", "snapshots.namespaceCapacity=32Gi", "snapshots.ageSeconds=600")
    objects = render(*ON, *more)
    found = arguments(objects)
    assert (found.workload_bytes, found.namespace_bytes, found.age_s) == (16 << 30, 32 << 30, 600.0)
    (container,) = pod(objects)["containers"]
    assert container["command"] == ["python", "-m", "gracepoint.snapshots"]
    assert container["ports"] == [{"name": "snapshots", "containerPort": found.port, "protocol": "TCP"}]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["tcpSocket"] == {"port": "snapshots"}
    assert container["image"] == one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["image"]
    assert (arguments(render(*ON)).workload_bytes, arguments(render(*ON)).namespace_bytes) == (None, None)


def test_a_server_gives_what_it_has_for_most_of_its_grace_period(render: Render) -> None:
    objects = render(*ON, "snapshots.terminationGracePeriodSeconds=300")
    left_s = pod(objects)["terminationGracePeriodSeconds"] - arguments(objects).drain_s
    assert left_s == 10, "for open requests"
    assert pod(objects)["terminationGracePeriodSeconds"] == 300
    spec = one(objects, "DaemonSet")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    assert spec["minReadySeconds"] > 0


def test_a_server_stays_on_a_node_whatever_taint_it_gets(render: Render) -> None:
    assert pod(render(*ON))["tolerations"] == [{"operator": "Exists"}]
    assert pod(render(*ON))["nodeSelector"] == {"pool": "tpu"}


@pytest.mark.parametrize(("settings", "secret"), MODES)
def test_pods_wait_for_keys_and_certificate(render: Render, settings: list[str], secret: str) -> None:
    objects = render(*ON, *settings)
    (volume,) = pod(objects)["volumes"]
    keys, pair = (source["secret"] for source in volume["projected"]["sources"])
    assert (keys["name"], [item["key"] for item in keys["items"]]) == (NAME, ["keys"])
    assert (pair["name"], [item["key"] for item in pair["items"]]) == (secret, ["tls.crt", "tls.key"])
    assert "optional" not in keys.keys() | pair.keys()
    found = arguments(objects)
    assert {str(found.certificate), str(found.key), str(found.capability_keys)} == {
        f"/keys/{name}" for name in ("tls.crt", "tls.key", "keys")
    }
    assert not named(objects, "Secret").keys() & {"data", "stringData"}, "the operator's, which an upgrade leaves alone"
    assert operator_arguments(objects)["--snapshot-certificate"] == str(not settings).lower()
    if "tls.mode=certManager" in settings:
        certificate = named(objects, "Certificate")["spec"]
        assert (certificate["secretName"], certificate["dnsNames"]) == (secret, [f"{NAME}.gp-system.svc"])
        assert certificate["issuerRef"]["name"] == "gp-gracepoint-ca", "whom pods trust"


def test_the_operator_finds_servers_and_keeps_their_keys_and_gets_no_other_right(render: Render) -> None:
    objects = render(*ON, "snapshots.spread={rack,topology.kubernetes.io/zone}", "watchNamespaces={research}")
    assert named(objects, "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [NAME], "verbs": ["get", "patch"]},
    ]
    (subject,) = named(objects, "RoleBinding")["subjects"]
    assert subject["name"] == one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    told = operator_arguments(objects)
    assert (told["--snapshot-servers"], told["--snapshot-port"]) == (NAME, "9470")
    assert told["--snapshot-spread"] == "rack,topology.kubernetes.io/zone"
    labels = one(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert labels["gracepoint.dev/snapshot-server"] == told["--snapshot-servers"]


def test_nothing_of_the_operator_leads_to_servers_and_nothing_of_servers_to_the_operator(render: Render) -> None:
    objects = render(*ON, "admission.onlyFrom[0].ipBlock.cidr=10.0.0.0/28")
    servers, operator = (
        one(objects, kind)["spec"]["template"]["metadata"]["labels"] for kind in ("DaemonSet", "Deployment")
    )
    for each in objects:
        spec = each.get("spec") or {}
        selector = spec.get("podSelector") or spec.get("selector") or {}
        selector = selector.get("matchLabels", selector)
        if each["kind"] in ("Service", "DaemonSet", "Deployment", "NetworkPolicy", "PodDisruptionBudget"):
            of_servers = each["metadata"]["name"] == NAME
            assert (selector.items() <= servers.items(), selector.items() <= operator.items()) == (
                of_servers,
                not of_servers,
            ), each["kind"]


def test_another_version_of_the_chart_alone_makes_no_server_anew(render: Render) -> None:
    labels = one(render(*ON, "commonLabels.team=ml"), "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert not [key for key in labels if "version" in key or "chart" in key]
    assert labels["team"] == "ml"


@pytest.mark.parametrize("watched", [[], ["watchNamespaces={research,prod}"]])
def test_only_labelled_pods_and_the_operator_reach_a_server(render: Render, watched: list[str]) -> None:
    objects = render(*ON, *watched, "snapshots.allowFrom[0].ipBlock.cidr=10.0.0.0/16")
    spec = named(objects, "NetworkPolicy")["spec"]
    assert (sorted(spec["policyTypes"]), spec["egress"]) == (["Egress", "Ingress"], [])
    (rule,) = spec["ingress"]
    assert [port["port"] for port in rule["ports"]] == ["snapshots"]
    training, operator, test, more = rule["from"]
    assert training["podSelector"] == {"matchExpressions": [{"key": LABEL_POLICY, "operator": "Exists"}]}
    values = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["research", "prod"]}
    assert training["namespaceSelector"] == ({"matchExpressions": [values]} if watched else {})
    for peer, labels in (
        (operator, one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]),
        (test, one(objects, "Pod")["metadata"]["labels"]),
    ):
        assert peer.keys() == {"podSelector"}, "of this namespace"
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert more == {"ipBlock": {"cidr": "10.0.0.0/16"}}
    without = render(*ON, "networkPolicy.enabled=false")
    assert not of_kind(without, "NetworkPolicy")


def test_helm_test_asks_a_server(render: Render) -> None:
    objects = render(*ON)
    args = one(objects, "Pod")["spec"]["containers"][0]["args"]
    assert f"--snapshots-url=https://{NAME}.gp-system.svc:9470" in args
    service = named(objects, "Service")["spec"]
    assert service["clusterIP"] == "None"
    assert service["ports"][0]["port"] == 9470


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(["snapshots.capacity="], "snapshots.capacity: found nothing", id="no capacity"),
        pytest.param(["snapshots.capacity=a lot"], "/snapshots/capacity", id="no amount"),
        pytest.param(["snapshots.capacity=0Gi"], "/snapshots/capacity", id="nothing"),
        pytest.param(["snapshots.capacity=1.5Gi"], "/snapshots/capacity", id="a fraction"),
        pytest.param(["snapshots.nodeSelector=null"], "snapshots.nodeSelector: found nothing", id="all nodes"),
        pytest.param(
            ["snapshots.resources.limits.memory=1Gi"],
            "/snapshots/resources/limits",
            id="memory that is not the capacity's",
        ),
        pytest.param(["snapshots.existingSecret=x"], "snapshots.existingSecret: found", id="a certificate not used"),
        pytest.param(
            ["tls.mode=existingSecret", "tls.existingSecret=mine"], "snapshots.existingSecret: found nothing", id="none"
        ),
        pytest.param(["snapshots.updateStrategy.rollingUpdate.maxSurge=1"], "maxSurge", id="twice the memory"),
        pytest.param(["snapshots.terminationGracePeriodSeconds=5"], "/snapshots/termination", id="too short an end"),
        pytest.param(["snapshots.capacities=1Gi"], "'capacities' not allowed", id="a slip"),
    ],
)
def test_wrong_values_are_refused_naming_them(template: Helm, settings: list[str], words: str) -> None:
    done = template(*(part for setting in (*ON, *settings) for part in ("--set", setting)))
    assert done.returncode != 0
    assert words in done.stderr
