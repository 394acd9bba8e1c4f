"""What the chart installs, held to what the project promises about it."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import pytest
import yaml

from gracepoint.wire.names import JOBSET_LABEL_UID, LABEL_DEFAULT, LABEL_POLICY
from gracepoint_cli import doctor
from gracepoint_operator.cache.relister import SELECTORS
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.recording.replica_lease import LABEL
from gracepoint_operator.resources.crds import definitions
from gracepoint_operator.webhooks.admission import LOOK_WITHIN_S
from gracepoint_operator.webhooks.routes import (
    PATH_EVICTIONS,
    PATH_JOBS,
    PATH_JOBSETS,
    PATH_PODS,
    PATH_POLICIES,
    PATH_REQUESTS,
    PATH_TRAINJOBS,
    path_of,
)
from tests.chart.conftest import WITH_TOKEN, Helm, Render
from tests.chart.helm import CHART
from tests.chart.objects import Json, of_kind, one

MODES = [
    pytest.param([], id="selfSigned"),
    pytest.param(["tls.mode=certManager"], id="certManager"),
    pytest.param(["tls.mode=existingSecret", "tls.existingSecret=mine"], id="existingSecret"),
]


def secret(objects: Iterable[Json], name: str) -> dict[str, str]:
    """What is in the Secret ``gp-gracepoint-<name>``; nothing where it is not made."""
    found = [o["data"] for o in of_kind(objects, "Secret") if o["metadata"]["name"] == f"gp-gracepoint-{name}"]
    return {key: base64.b64decode(value).decode() for data in found for key, value in data.items()}


def pod_spec(objects: list[Json]) -> Json:
    spec: Json = one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def webhooks(objects: list[Json]) -> dict[str, Json]:
    return {w["name"]: w for w in one(objects, "MutatingWebhookConfiguration")["webhooks"]}


def cluster_role(objects: Iterable[Json], name: str) -> Json:
    (found,) = [role for role in of_kind(objects, "ClusterRole") if role["metadata"]["name"] == name]
    return found


def test_helm_finds_nothing_to_say_about_it(helm: Helm) -> None:
    done = helm("lint", "--strict", str(CHART), *WITH_TOKEN)
    assert done.returncode == 0, done.stdout


def test_the_role_is_exactly_this(render: Render) -> None:
    """No secrets. Of what is not ours it writes reviews, Events, answers to Evictions and what it asks of Kueue."""
    watch = {"list", "watch"}
    read = {"get"} | watch
    granted: dict[str, set[str]] = {}
    named = []
    roles = [cluster_role(render(), name) for name in ("gp-gracepoint", "gp-gracepoint-namespaces")]
    for rule in (rule for role in roles for rule in role["rules"]):
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
        if "resourceNames" in rule:
            named.append((rule["resources"], rule["resourceNames"], rule["verbs"]))
    assert granted == {
        "/namespaces": read,
        "/nodes": read,
        "/pods": read,
        "policy/poddisruptionbudgets": {"list"},
        "events.k8s.io/events": {"create", "list"},
        "karpenter.sh/nodeclaims": watch,
        "kueue.x-k8s.io/workloads": read,
        "kueue.x-k8s.io/workloads/status": {"patch"},
        "batch/jobs": read,
        "jobset.x-k8s.io/jobsets": read,
        "gracepoint.dev/clustercheckpointpolicies": read,
        "gracepoint.dev/checkpointpolicies": read | {"create", "patch"},
        "gracepoint.dev/checkpointpolicies/status": {"patch"},
        "gracepoint.dev/preemptions": read | {"create", "patch", "delete"},
        "gracepoint.dev/preemptions/status": {"patch"},
        "gracepoint.dev/preemptionrequests": read | {"patch", "delete"},
        "gracepoint.dev/preemptionrequests/status": {"patch"},
        "authentication.k8s.io/tokenreviews": {"create"},
        "apiextensions.k8s.io/customresourcedefinitions": read,
        "admissionregistration.k8s.io/mutatingwebhookconfigurations": {"list"},
    }
    assert named == [(["customresourcedefinitions"], ["jobsets.jobset.x-k8s.io"], ["get"])]
    account = {"kind": "ServiceAccount", "name": pod_spec(render())["serviceAccountName"], "namespace": "gp-system"}
    bindings = [*of_kind(render(), "ClusterRoleBinding"), *of_kind(render(), "RoleBinding")]
    assert {role["metadata"]["name"] for role in roles} < {binding["roleRef"]["name"] for binding in bindings}
    assert all(binding["subjects"] == [account] for binding in bindings)


@pytest.mark.parametrize("settings", MODES)
def test_watched_namespaces_are_the_only_ones_that_it_has_rights_in(render: Render, settings: list[str]) -> None:
    """And the only ones whose jobs the webhooks get."""
    more = (
        "protection.enabled=true",
        "podDeletion.enabled=true",
        "deviceTaints.enabled=true",
        "admission.excludedNamespaces={batch}",
    )
    objects = render(*settings, "watchNamespaces={research,prod}", *more)
    everywhere = {b["roleRef"]["name"] for b in of_kind(objects, "ClusterRoleBinding")}
    of_all = [rule for name in everywhere for rule in cluster_role(objects, name)["rules"]]
    assert {resource for rule in of_all for resource in rule["resources"]} - {
        "mutatingwebhookconfigurations",
        "validatingwebhookconfigurations",
    } == {
        "nodes",
        "nodeclaims",
        "namespaces",
        "clustercheckpointpolicies",
        "tokenreviews",
        "customresourcedefinitions",
        "resourceslices",
        "devicetaintrules",
    }, "what has no namespace"
    bound: dict[str, set[str]] = {}
    for binding in of_kind(objects, "RoleBinding"):
        bound.setdefault(binding["metadata"]["namespace"], set()).add(binding["roleRef"]["name"])
    wanted = {"gp-gracepoint-namespaces", "gp-gracepoint-protection", "gp-gracepoint-pod-deletion"}
    assert bound.pop("gp-system") == {"gp-gracepoint-trust", "gp-gracepoint-sightings", "gp-gracepoint-leases"}
    assert bound == {"research": wanted, "prod": wanted}
    selector = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["research", "prod"]}
    for webhook in (w for found in configurations(objects) for w in found["webhooks"]):
        assert webhook["namespaceSelector"] == {"matchExpressions": [selector]}
    args = pod_spec(objects)["containers"][0]["args"]
    assert args[args.index("--watch-namespaces") + 1] == "research,prod"


@pytest.mark.parametrize("kind", SELECTORS, ids=lambda kind: kind.title)
def test_each_watched_kind_is_listed_by_the_role_of_where_it_is(render: Render, kind: Kind) -> None:
    """With watchNamespaces, the other role would refuse it, or grant it everywhere."""
    objects = render("deviceTaints.enabled=true")
    lists = [
        name
        for name in ("gp-gracepoint", "gp-gracepoint-namespaces")
        for rule in cluster_role(objects, name)["rules"]
        if kind.group in rule["apiGroups"]
        and kind.plural in rule["resources"]
        and {"list", "watch"} <= {*rule["verbs"]}
    ]
    assert lists == ["gp-gracepoint-namespaces" if kind.namespaced else "gp-gracepoint"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["watchNamespaces={kube-system}"], 'watchNamespaces: found "kube-system"'),
        (["watchNamespaces={a,batch}", "admission.excludedNamespaces={batch}"], 'watchNamespaces: found "batch"'),
        (["watchNamespaces={team-*}"], "watchNamespaces"),
        (["watchNamespaces={a,a}"], "watchNamespaces"),
        (["watchNamespaces=a"], "watchNamespaces"),
    ],
)
def test_namespaces_that_cannot_be_watched_are_refused(template: Helm, settings: list[str], why: str) -> None:
    done = template(*(part for setting in settings for part in ("--set", setting)))
    assert done.returncode != 0
    assert why in done.stderr


@pytest.mark.parametrize("settings", MODES)
def test_it_writes_its_own_secret_config_maps_and_webhooks_and_no_others(render: Render, settings: list[str]) -> None:
    """Each by its name. What it fills in has no data in the chart, as an upgrade takes away what a chart put there."""
    objects = render(*settings)
    rules = [rule for role in of_kind(objects, "Role") for rule in role["rules"]]
    # A replica's Lease has the name of its pod, so an admission policy is the limit.
    (leases,) = (rule for rule in rules if rule["resources"] == ["leases"])
    assert leases["verbs"] == ["list", "create", "patch", "delete"]
    rules.remove(leases)
    (guard,) = (
        found["spec"]
        for found in of_kind(objects, "ValidatingAdmissionPolicy")
        if found["metadata"]["name"] == "gp-gracepoint-leases"
    )
    assert guard["matchConstraints"]["resourceRules"][0]["operations"] == ["CREATE", "UPDATE", "DELETE"]
    (validation,) = guard["validations"]
    assert f'"{LABEL}" in' in validation["expression"]
    if settings != ["tls.mode=certManager"]:
        rules += cluster_role(objects, "gp-gracepoint-webhooks")["rules"]
    found = {(resource, name) for rule in rules for resource in rule["resources"] for name in rule["resourceNames"]}
    assert all(rule["verbs"] == ["get", "patch"] for rule in rules)
    own = {("secrets", "gp-gracepoint-certificates")} if settings == [] else set()
    if settings != ["tls.mode=certManager"]:
        own |= {
            ("mutatingwebhookconfigurations", one(objects, "MutatingWebhookConfiguration")["metadata"]["name"]),
            ("validatingwebhookconfigurations", one(objects, "ValidatingWebhookConfiguration")["metadata"]["name"]),
        }
    assert found == own | {("configmaps", "gp-gracepoint-sightings"), ("configmaps", "gp-gracepoint-trust")}
    for kind, name in (("ConfigMap", "sightings"), ("ConfigMap", "trust"), ("Secret", "certificates")):
        for filled in of_kind(objects, kind):
            if filled["metadata"]["name"] == f"gp-gracepoint-{name}":
                assert not filled.keys() & {"data", "stringData", "binaryData"}


def test_people_get_their_rights_with_the_clusters_own_roles(render: Render) -> None:
    """Whoever may edit a namespace writes policies there, requests saves, and takes that back."""
    view, edit = (cluster_role(render(), f"gp-gracepoint-{name}") for name in ("view", "edit"))
    labels = [
        {key for key in role["metadata"]["labels"] if key.startswith("rbac.authorization.k8s.io/")}
        for role in (view, edit)
    ]
    assert labels == [{f"rbac.authorization.k8s.io/aggregate-to-{name}"} for name in ("view", "edit")]
    read = {"get", "list", "watch"}
    (viewed,) = view["rules"]
    assert (set(viewed["resources"]), set(viewed["verbs"])) == (
        {"checkpointpolicies", "clustercheckpointpolicies", "preemptions", "preemptionrequests"},
        read,
    )
    edited, records = edit["rules"]
    assert (records["resources"], set(records["verbs"])) == (["preemptions"], read)
    assert set(edited["resources"]) == {"checkpointpolicies", "preemptionrequests"}, "records are the operator's"
    assert set(edited["verbs"]) == read | {"create", "update", "patch", "delete", "deletecollection"}
    (of_cluster,) = cluster_role(render(), "gp-gracepoint-admin")["rules"]
    assert of_cluster["resources"] == ["clustercheckpointpolicies"]
    assert set(of_cluster["verbs"]) == set(edited["verbs"])
    labels = cluster_role(render(), "gp-gracepoint-admin")["metadata"]["labels"]
    assert not [key for key in labels if "aggregate-to" in key], "nobody has it by a role of the cluster"


def test_the_pods_are_restricted(render: Render) -> None:
    """The restricted Pod Security Standard, and a read-only root beyond it."""
    pod = pod_spec(render())
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        assert key not in pod
    assert {kind for v in pod["volumes"] for kind in v.keys() - {"name"}} == {"secret", "configMap", "projected"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_drain_is_not_refused_on_a_node_that_runs_a_replica(render: Render) -> None:
    """`kubectl drain --ignore-daemonsets` refuses pods with local storage, which is any emptyDir."""
    volumes = pod_spec(render())["volumes"]
    assert [volume["name"] for volume in volumes if "emptyDir" in volume] == []


def test_the_command_line_is_the_one_that_the_operator_takes(render: Render) -> None:
    container = pod_spec(render("logFormat=json"))["containers"][0]
    args = container["args"]
    assert dict(zip(args[::2], args[1::2], strict=True)) == {
        "--tls-directory": "/tls",
        "--own-certificate": "gp-gracepoint-certificates",
        "--trust": "gp-gracepoint-trust",
        "--trust-overlap-seconds": "86400",
        "--mutating-webhooks": "00-gp-gracepoint",
        "--validating-webhooks": "gp-gracepoint",
        "--webhook-token": "/webhooks/token",
        "--signals": "/etc/gracepoint/signals.json",
        "--sightings": "gp-gracepoint-sightings",
        "--likely-gangs-per-minute": "10",
        "--replicas": "2",
        "--preemption-ttl-seconds": "2592000",
        "--preemption-history-limit": "50",
        "--requests-per-namespace": "200",
        "--request-ttl-seconds": "3600",
        "--longest-eviction-hold-seconds": "600",
        "--protect-pods": "false",
        "--delete-pods": "false",
        "--device-taints": "false",
        "--account-metrics": "true",
        "--pending-connections": "1024",
        "--pending-connections-per-address": "256",
        "--service-url": "https://gp-gracepoint.gp-system.svc:443",
        "--https-port": "8443",
        "--webhook-port": "9443",
        "--health-port": "8080",
        "--replica": "$(POD_NAME)",
        "--namespace": "$(POD_NAMESPACE)",
        "--log-format": "json",
        "--log-level": "info",
    }
    assert {e["name"] for e in container["env"]} == {"POD_NAME", "POD_NAMESPACE"}
    assert {m["mountPath"] for m in container["volumeMounts"]} == {"/tls", "/webhooks", "/etc/gracepoint"}
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert ports == {"https": 8443, "webhooks": 9443, "health": 8080}
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}


def test_operator_annotates_pods_only_with_the_right_to_it(render: Render) -> None:
    args = pod_spec(render("protection.enabled=true"))["containers"][0]["args"]
    assert args[args.index("--protect-pods") + 1] == "true"


@pytest.mark.parametrize("enabled", ["false", "true"])
def test_operator_deletes_pods_only_with_the_right_to_it(render: Render, enabled: str) -> None:
    args = pod_spec(render(f"podDeletion.enabled={enabled}"))["containers"][0]["args"]
    assert args[args.index("--delete-pods") + 1] == enabled


@pytest.mark.parametrize("enabled", [False, True])
def test_devices_are_watched_only_with_the_right_to_it(render: Render, enabled: bool) -> None:
    objects = render(f"deviceTaints.enabled={str(enabled).lower()}")
    args = pod_spec(objects)["containers"][0]["args"]
    assert args[args.index("--device-taints") + 1] == str(enabled).lower()
    rules = [rule for item in objects if item["kind"] == "ClusterRole" for rule in item["rules"]]
    granted = [rule for rule in rules if "resource.k8s.io" in rule["apiGroups"]]
    wanted = [{"resourceslices", "devicetaintrules"}, {"resourceclaims"}]
    assert [set(rule["resources"]) for rule in granted] == wanted * enabled
    assert all(rule["verbs"] == ["list", "watch"] for rule in granted)


def test_the_service_leads_to_the_pods(render: Render) -> None:
    objects = render()
    service, deployment = one(objects, "Service"), one(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["port"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert ports == {443: "https", 9443: "webhooks"}


def test_two_replicas_stand_apart_and_are_not_drained_together(render: Render) -> None:
    objects = render()
    assert one(objects, "Deployment")["spec"]["replicas"] == 2
    assert pod_spec(objects)["affinity"]["podAntiAffinity"].keys() == {
        "preferredDuringSchedulingIgnoredDuringExecution"
    }
    assert one(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert not of_kind(render("replicas=1"), "PodDisruptionBudget")


def test_the_operator_does_not_cling_to_a_lost_node(render: Render) -> None:
    for toleration in pod_spec(render())["tolerations"]:
        assert toleration["effect"] == "NoSchedule" or toleration["tolerationSeconds"] == 30


@pytest.mark.parametrize("settings", MODES)
def test_webhooks_see_what_carries_the_label_and_what_may_get_it(render: Render, settings: list[str]) -> None:
    labelled = {"key": LABEL_POLICY, "operator": "Exists"}
    of_a_jobset = {"key": JOBSET_LABEL_UID, "operator": "DoesNotExist"}
    wanted: list[Json]
    unlabelled = {"key": LABEL_POLICY, "operator": "DoesNotExist"}
    not_off: Json = {"key": LABEL_DEFAULT, "operator": "NotIn", "values": ["off"]}
    without = {"jobsets-without-policy.gracepoint.dev", "jobs-without-policy.gracepoint.dev"}
    for name, webhook in webhooks(render(*settings)).items():
        wanted = [labelled, of_a_jobset] if name == "jobs.gracepoint.dev" else [labelled]
        wanted = [unlabelled, not_off] if name in without else wanted
        assert webhook["objectSelector"] == {"matchExpressions": wanted}
        (expression,) = webhook["namespaceSelector"]["matchExpressions"]
        assert expression["key"] == "kubernetes.io/metadata.name"
        assert (expression["operator"], expression["values"]) == ("NotIn", ["kube-system"])
        operation = "UPDATE" if name == "jobset-updates.gracepoint.dev" else "CREATE"
        assert webhook["rules"][0]["operations"] == [operation]
        assert webhook["sideEffects"] == "None"


def test_jobset_is_refused_and_pod_created_without_an_operator(render: Render) -> None:
    found = webhooks(render())
    jobsets, pods = found["jobsets.gracepoint.dev"], found["pods.gracepoint.dev"]
    assert (jobsets["failurePolicy"], pods["failurePolicy"]) == ("Fail", "Ignore")
    for kind in ("jobsets", "jobs"):
        without = found[f"{kind}-without-policy.gracepoint.dev"]
        assert (without["failurePolicy"], without["timeoutSeconds"]) == ("Ignore", 3), "nobody asked for anything"
    assert jobsets["timeoutSeconds"] <= 10
    assert pods["timeoutSeconds"] <= 3


@pytest.mark.parametrize("settings", MODES)
def test_evictions_wait_at_most_a_second_for_an_operator_that_is_down(render: Render, settings: list[str]) -> None:
    objects = render(*settings)
    webhook, requests, _ = one(objects, "ValidatingWebhookConfiguration")["webhooks"]
    assert requests["failurePolicy"] == "Fail", "no flood of requests while the operator is down"
    assert (webhook["failurePolicy"], webhook["timeoutSeconds"]) == ("Ignore", 2)
    assert webhook["timeoutSeconds"] > LOOK_WITHIN_S, "the answer must come before the API server has given up"
    assert webhook["sideEffects"] == "NoneOnDryRun"
    (rule,) = webhook["rules"]
    assert (rule["resources"], rule["operations"]) == (["pods/eviction"], ["CREATE"])
    assert "objectSelector" not in webhook, "an Eviction carries no labels of its pod"


@pytest.mark.parametrize("settings", MODES)
def test_the_api_server_finds_the_webhooks_where_nobody_else_does(render: Render, settings: list[str]) -> None:
    objects = render(*settings, "admission.token=sixteen-or-more-letters")
    known = secret(objects, "webhooks")["token"]
    assert known == "sixteen-or-more-letters"
    kinds = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    found = [webhook["clientConfig"]["service"] for kind in kinds for webhook in one(objects, kind)["webhooks"]]
    assert [service["path"] for service in found] == [
        path_of(webhook, known)
        for webhook in (
            *(PATH_JOBSETS, PATH_JOBS, PATH_JOBSETS, PATH_TRAINJOBS, PATH_PODS, PATH_JOBSETS, PATH_JOBS),
            *(PATH_EVICTIONS, PATH_REQUESTS, PATH_POLICIES),
        )
    ]
    assert {service["port"] for service in found} == {9443}
    assert {"secretName": "gp-gracepoint-webhooks", "defaultMode": 0o440} in [
        volume.get("secret") for volume in pod_spec(objects)["volumes"]
    ]


def test_another_token_replaces_the_pods_that_know_the_old_one(render: Render) -> None:
    def annotations(token: str) -> Json:
        template: Json = one(render(f"admission.token={token}"), "Deployment")["spec"]["template"]
        annotations: Json = template["metadata"]["annotations"]
        return annotations

    assert annotations("sixteen-or-more-letters") == annotations("sixteen-or-more-letters")
    assert annotations("sixteen-or-more-letters") != annotations("sixteen-or-more-others")


def test_webhook_port_is_closed_to_pods_when_control_plane_addresses_are_given(render: Render) -> None:
    assert not of_kind(render(), "NetworkPolicy")
    objects = render("admission.onlyFrom[0].ipBlock.cidr=10.0.0.0/28")
    spec = one(objects, "NetworkPolicy")["spec"]
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    for_all, for_some = spec["ingress"]
    assert {port["port"] for port in for_all["ports"]} == {"https", "health"}
    assert "from" not in for_all
    assert {port["port"] for port in for_some["ports"]} == {"webhooks"}
    assert for_some["from"] == [{"ipBlock": {"cidr": "10.0.0.0/28"}}]


def test_evictions_in_system_namespaces_are_not_asked_about(render: Render) -> None:
    found = one(render("admission.excludedNamespaces={batch}"), "ValidatingWebhookConfiguration")["webhooks"]
    webhook = next(item for item in found if item["name"] == "evictions.gracepoint.dev")
    (expression,) = webhook["namespaceSelector"]["matchExpressions"]
    assert expression["operator"] == "NotIn"
    assert expression["values"] == ["kube-system", "kube-public", "kube-node-lease", "gp-system", "batch"]


@pytest.mark.parametrize("name", ["gp", "zeta"])
def test_webhooks_are_called_before_jobsets_own_whatever_the_release_is_called(helm: Helm, name: str) -> None:
    """Afterwards an unset restartPolicy is OnFailure. They are called in the order of their names."""
    done = helm("template", name, str(CHART), "--kube-version", "1.34.0", *WITH_TOKEN)
    configuration = one(filter(None, yaml.safe_load_all(done.stdout)), "MutatingWebhookConfiguration")
    assert configuration["metadata"]["name"] < "jobset-mutating-webhook-configuration"
    for webhook in configuration["webhooks"]:
        assert webhook["reinvocationPolicy"] == "IfNeeded"


def test_other_namespaces_can_be_left_out(render: Render) -> None:
    for webhook in webhooks(render("admission.excludedNamespaces={batch}")).values():
        assert webhook["namespaceSelector"]["matchExpressions"][0]["values"] == ["kube-system", "batch"]


def test_the_limits_of_numbers_hold_wherever_the_operator_watches(render: Render) -> None:
    def selector(*settings: str) -> Json | None:
        found = one(render(*settings), "ValidatingWebhookConfiguration")["webhooks"]
        webhook = next(item for item in found if item["name"] == "preemptionrequests.gracepoint.dev")
        selected: Json | None = webhook.get("namespaceSelector")
        return selected

    assert selector("admission.excludedNamespaces={batch}") is None
    watched = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a"]}
    assert selector("watchNamespaces={a}") == {"matchExpressions": [watched]}


def test_only_the_operator_and_who_may_restore_records_creates_them(render: Render) -> None:
    """With watchNamespaces, each of several releases answers for its own."""
    found = of_kind(render("watchNamespaces={a}"), "ValidatingAdmissionPolicy")
    (guard,) = (body["spec"] for body in found if body["metadata"]["name"] == "gp-gracepoint-records")
    (rule,) = guard["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["preemptions"], ["CREATE"])
    assert guard["matchConstraints"]["namespaceSelector"]["matchExpressions"][0]["values"] == ["a"]
    (check,) = guard["validations"]
    assert '"system:serviceaccount:gp-system:gp-gracepoint"' in check["expression"]
    assert 'check("restore").allowed()' in check["expression"]


def test_whoever_deletes_a_policy_is_warned_also_of_the_clusters(render: Render) -> None:
    found = one(render(), "ValidatingWebhookConfiguration")["webhooks"]
    (webhook,) = (item for item in found if item["name"] == "policies.gracepoint.dev")
    assert [(rule["resources"], rule["scope"]) for rule in webhook["rules"]] == [
        (["checkpointpolicies"], "Namespaced"),
        (["clustercheckpointpolicies"], "Cluster"),
    ]


def sources(objects: list[Json]) -> list[Json]:
    """What the volume of the certificate is made of."""
    (volume,) = (v for v in pod_spec(objects)["volumes"] if v["name"] == "tls")
    assert volume["projected"]["defaultMode"] == 0o440
    return [source["secret"] for source in volume["projected"]["sources"]]


@pytest.mark.parametrize("settings", MODES)
def test_the_chart_says_nothing_of_the_authority_that_the_operator_keeps(render: Render, settings: list[str]) -> None:
    """An upgrade would put it back in the middle of a rotation, and two writers would fight about it."""
    objects = render(*settings)
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        for webhook in one(objects, kind)["webhooks"]:
            assert "caBundle" not in webhook["clientConfig"]


def test_the_operators_own_certificate_is_mounted_without_the_key_of_its_authority(render: Render) -> None:
    (own,) = sources(render())
    assert (own["name"], own["optional"]) == ("gp-gracepoint-certificates", True)
    assert {item["key"] for item in own["items"]} == {"tls.crt", "tls.key", "ca.crt"}


def test_with_cert_manager_the_next_authority_is_known_before_it_signs(render: Render) -> None:
    objects = render("tls.mode=certManager")
    leaf, following = sources(objects)
    certificates = {c["spec"]["secretName"]: c["spec"] for c in of_kind(objects, "Certificate")}
    assert "gp-gracepoint.gp-system.svc" in certificates[leaf["name"]]["dnsNames"]
    issuers = {i["metadata"]["name"]: i["spec"] for i in of_kind(objects, "Issuer")}
    ca = issuers[certificates[leaf["name"]]["issuerRef"]["name"]]["ca"]["secretName"]
    assert certificates[ca]["isCA"] is True
    assert (following["name"], following["optional"]) == (ca, True)
    assert following["items"] == [{"key": "tls.crt", "path": "next-ca.crt"}], "and not its key"
    hours = [int(certificates[name]["renewBefore"].removesuffix("h")) for name in (ca, leaf["name"])]
    assert hours[0] > int(certificates[leaf["name"]]["duration"].removesuffix("h")), "it is known before it is used"
    assert certificates[ca]["duration"] == "87600h", "cert-manager issues anew at once what has another duration"


def test_with_an_issuer_the_authority_of_the_snapshot_servers_is_trusted_before_the_operators_is_renewed(
    render: Render,
) -> None:
    issuer = ("tls.mode=certManager", "tls.issuerRef.name=mine")
    snapshots = ("snapshots.enabled=true", "snapshots.capacity=64Gi", "snapshots.nodeSelector.pool=tpu")
    _, following = sources(render(*issuer, *snapshots))
    assert (following["name"], following["optional"]) == ("gp-gracepoint-snapshots-tls", True)
    assert following["items"] == [{"key": "ca.crt", "path": "next-ca.crt"}]
    assert len(sources(render(*issuer))) == 1


AUTHORITY = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def writes_webhooks(objects: list[Json]) -> bool:
    """Whether the operator writes ``caBundle``: it is told to, has the right, and a policy allows it nothing else."""
    args = pod_spec(objects)["containers"][0]["args"]
    guards = [o["metadata"]["name"] for o in of_kind(objects, "ValidatingAdmissionPolicy")]
    roles = [o["metadata"]["name"] for o in of_kind(objects, "ClusterRole")]
    found = {
        "--mutating-webhooks" in args,
        "--validating-webhooks" in args,
        "gp-gracepoint-webhooks" in guards,
        "gp-gracepoint-webhooks" in roles,
    }
    (writes,) = found
    return writes


def configurations(objects: list[Json]) -> list[Json]:
    return [one(objects, f"{kind}WebhookConfiguration") for kind in ("Mutating", "Validating")]


def test_cert_managers_injector_gives_the_api_server_the_authority_so_that_the_operator_needs_no_right(
    render: Render,
) -> None:
    objects = render("tls.mode=certManager")
    assert not writes_webhooks(objects)
    for found in configurations(objects):
        assert found["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == "gp-system/gp-gracepoint"
    certificates = {c["metadata"]["name"] for c in of_kind(objects, "Certificate")}
    assert "gp-gracepoint" in certificates
    assert writes_webhooks(render())
    assert writes_webhooks(render("tls.mode=existingSecret", "tls.existingSecret=mine"))


@pytest.mark.parametrize("mode", ["existingSecret", "certManager"])
def test_given_authorities_are_the_charts_so_that_the_operator_needs_no_right(render: Render, mode: str) -> None:
    objects = render(f"tls.mode={mode}", "tls.existingSecret=mine", f"tls.caCertificate={AUTHORITY}")
    assert not writes_webhooks(objects)
    told = {w["clientConfig"]["caBundle"] for found in configurations(objects) for w in found["webhooks"]}
    assert {base64.b64decode(text).decode() for text in told} == {AUTHORITY}


def test_given_authorities_are_refused_where_the_operator_makes_its_own(template: Helm) -> None:
    done = template("--set", f"tls.caCertificate={AUTHORITY}")
    assert "tls.caCertificate: found a certificate, but tls.mode is selfSigned" in done.stderr
    assert "caCertificate" in template("--set", "tls.mode=certManager", "--set", "tls.caCertificate=mine").stderr


def test_issuer_that_is_taken_out_of_the_values_is_none(render: Render) -> None:
    assert of_kind(render("tls.mode=certManager", "tls.issuerRef=null", "watchNamespaces=null"), "Issuer")


@pytest.mark.parametrize("kind", ["Issuer", "ClusterIssuer"])
def test_certificate_is_signed_by_an_issuer_of_the_users_own(render: Render, kind: str) -> None:
    objects = render("tls.mode=certManager", "tls.issuerRef.name=corp", f"tls.issuerRef.kind={kind}")
    certificate = one(objects, "Certificate")
    assert certificate["spec"]["issuerRef"] == {"name": "corp", "kind": kind, "group": "cert-manager.io"}
    assert certificate["metadata"]["name"] == "gp-gracepoint", "whose authority is injected"
    assert not of_kind(objects, "Issuer")
    (mounted,) = sources(objects)
    assert mounted["name"] == certificate["spec"]["secretName"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["tls.issuerRef.name=corp"], "tls.issuerRef: found Issuer"),
        (["tls.mode=certManager", "tls.issuerRef.names=corp"], "names"),
        (["tls.mode=certManager", "tls.issuerRef.kind=ClusterIssuer"], "ClusterIssuer without a name"),
        (["tls.mode=certManager", "tls.issuerRef=corp"], "issuerRef"),
    ],
)
def test_an_issuer_that_would_not_be_used_is_refused(template: Helm, settings: list[str], why: str) -> None:
    done = template(*(part for setting in settings for part in ("--set", setting)))
    assert done.returncode != 0
    assert why in done.stderr


def test_an_existing_secret_is_mounted(render: Render) -> None:
    objects = render("tls.mode=existingSecret", "tls.existingSecret=mine")
    (mounted,) = sources(objects)
    assert mounted["name"] == "mine"
    assert "optional" not in mounted


def test_crds_are_installed_as_they_are_and_stay(render: Render) -> None:
    """As templates of the release, which Helm upgrades, unlike what stands in a chart's crds/ folder."""
    rendered = {crd["metadata"]["name"]: crd for crd in of_kind(render(), "CustomResourceDefinition")}
    assert rendered == {crd["metadata"]["name"]: crd for crd in definitions().values()}
    for crd in rendered.values():
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not (CHART / "crds").exists()
    assert not of_kind(render("crds.install=false"), "CustomResourceDefinition")


@pytest.mark.parametrize("settings", MODES)
def test_namespaced_objects_are_in_the_releases_namespace(render: Render, settings: list[str]) -> None:
    cluster_wide = {
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "FlowSchema",
        "MutatingWebhookConfiguration",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "ValidatingWebhookConfiguration",
    }
    for o in render(*settings):
        expected = None if o["kind"] in cluster_wide else "gp-system"
        assert o["metadata"].get("namespace") == expected, o["kind"]
        assert o["apiVersion"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param("replica=3", "'replica' not allowed", id="unknown key"),
        pytest.param("tls.modus=x", "'modus' not allowed", id="unknown key below"),
        pytest.param("image.tags=x", "'tags' not allowed", id="unknown key of the image"),
        pytest.param("tls.mode=self", "/tls/mode", id="unknown mode"),
        pytest.param("logFormat=xml", "/logFormat", id="unknown log format"),
        pytest.param("replicas=0", "/replicas", id="no replicas"),
        pytest.param("preemptions.ttlSecondsAfterFinished=60", "/preemptions/ttl", id="records that go at once"),
        pytest.param("admission.token=guessable", "/admission/token", id="too short a token"),
        pytest.param("admission.podTimeoutSeconds=60", "/admission/podTimeoutSeconds", id="too long a timeout"),
        pytest.param("tls.mode=existingSecret", "/tls/existingSecret", id="a secret that is not named"),
    ],
)
def test_wrong_values_are_refused_naming_them(template: Helm, setting: str, words: str) -> None:
    done = template("--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


def test_prometheus_operator_is_pointed_at_the_pods_metrics_if_asked_for(render: Render) -> None:
    assert of_kind(render(), "PodMonitor") == []
    objects = render("podMonitor.enabled=true", "podMonitor.interval=15s", "podMonitor.labels.release=prometheus")
    monitor = one(objects, "PodMonitor")
    deployment = one(objects, "Deployment")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert monitor["spec"]["selector"] == deployment["spec"]["selector"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert endpoint.items() >= {"path": "/metrics", "interval": "15s", "honorLabels": True}.items()
    ports = {port["name"] for port in pod_spec(objects)["containers"][0]["ports"]}
    assert endpoint["port"] in ports


def test_prometheus_shows_a_token_that_may_read_the_metrics_and_nothing_else(render: Render) -> None:
    objects = render("podMonitor.enabled=true")
    (endpoint,) = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("metrics", "https")
    assert endpoint["tlsConfig"] == {
        "serverName": "gp-gracepoint.gp-system.svc",
        "ca": {"configMap": {"name": "gp-gracepoint-trust", "key": "ca-bundle.crt"}},
    }
    credentials = endpoint["authorization"]["credentials"]
    (token,) = [each for each in of_kind(objects, "Secret") if each["metadata"]["name"] == credentials["name"]]
    assert (token["type"], credentials["key"]) == ("kubernetes.io/service-account-token", "token")
    account = token["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    bound = [
        binding["roleRef"]["name"]
        for kind in ("RoleBinding", "ClusterRoleBinding")
        for binding in of_kind(objects, kind)
        if account in [subject["name"] for subject in binding["subjects"]]
    ]
    assert [cluster_role(objects, name)["rules"] for name in bound] == [
        [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    ]
    ports = {p["name"]: p["containerPort"] for p in pod_spec(objects)["containers"][0]["ports"]}
    arguments = pod_spec(objects)["containers"][0]["args"]
    assert arguments[arguments.index("--metrics-port") + 1] == str(ports["metrics"])
    reviews = [r["resources"] for r in cluster_role(objects, "gp-gracepoint")["rules"] if "create" in r["verbs"]]
    assert ["subjectaccessreviews"] in reviews


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ([], False),
        (["metrics.requireToken=true"], True),
        (["podMonitor.enabled=true", "metrics.requireToken=false"], False),
        (["podMonitor.enabled=true"], True),
    ],
)
def test_metrics_need_a_token_where_it_is_wanted_or_prometheus_has_one(
    render: Render, settings: list[str], needed: bool
) -> None:
    objects = render(*settings, "admission.onlyFrom[0].ipBlock.cidr=10.0.0.0/28")
    assert ("--metrics-port" in pod_spec(objects)["containers"][0]["args"]) == needed
    roles = [role["metadata"]["name"] for role in of_kind(objects, "ClusterRole")]
    assert ("gp-gracepoint-metrics" in roles) == needed
    for monitor in of_kind(objects, "PodMonitor"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert (endpoint["port"], "authorization" in endpoint) == (("metrics" if needed else "health"), needed)
    open_ports = {port["port"] for port in one(objects, "NetworkPolicy")["spec"]["ingress"][0]["ports"]}
    assert open_ports == {"https", "health"} | ({"metrics"} if needed else set())


def test_the_api_server_serves_the_operators_requests_apart_from_others(render: Render) -> None:
    objects = render("serviceAccount.name=its-own")
    spec = one(objects, "FlowSchema")["spec"]
    (rule,) = spec["rules"]
    assert [subject["serviceAccount"] for subject in rule["subjects"]] == [
        {"name": "its-own", "namespace": "gp-system"}
    ]
    assert spec["priorityLevelConfiguration"] == {"name": "workload-high"}
    assert not of_kind(render("flowSchema.enabled=false"), "FlowSchema")


def test_logs_are_json_if_asked_for(render: Render) -> None:
    arguments = pod_spec(render("logFormat=json"))["containers"][0]["args"]
    assert arguments[arguments.index("--log-format") + 1] == "json"


def test_everything_that_can_be_set_reaches_the_pods(render: Render) -> None:
    objects = render(
        "image.repository=r.example/op",
        "image.tag=v9",
        "priorityClassName=high",
        "nodeSelector.pool=system",
        "imagePullSecrets[0].name=pull",
        "podLabels.team=x",
        "podAnnotations.note=y",
    )
    pod = pod_spec(objects)
    assert pod["containers"][0]["image"] == "r.example/op:v9"
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("high", {"pool": "system"})
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    metadata = one(objects, "Deployment")["spec"]["template"]["metadata"]
    assert metadata["labels"]["team"] == "x"
    assert metadata["annotations"]["note"] == "y"


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        pytest.param("podLabels.app\\.kubernetes\\.io/name=x", "app.kubernetes.io/name", id="label"),
        pytest.param("podAnnotations.checksum/token=x", "checksum/token", id="annotation"),
        pytest.param("commonLabels.app\\.kubernetes\\.io/part-of=x", "app.kubernetes.io/part-of", id="common label"),
    ],
)
def test_a_key_that_the_chart_sets_on_pods_is_there_once(template: Helm, setting: str, key: str) -> None:
    lines = [template("--set", each).stdout.splitlines() for each in ("logFormat=plain", setting)]
    numbers = [sum(line.strip().startswith(f"{key}:") for line in each) for each in lines]
    assert numbers[0] == numbers[1] > 0
    assert f"{key}: x" not in "\n".join(lines[1])


def test_scheduling_and_network_can_be_set(render: Render) -> None:
    assert pod_spec(render())["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}
    assert "dnsPolicy" not in pod_spec(render())
    pod = pod_spec(
        render(
            "hostNetwork=true",
            "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight=1",
            "extraEnv[0].name=HTTPS_PROXY",
            "extraEnv[0].value=http://proxy:3128",
        )
    )
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod["affinity"].keys() == {"nodeAffinity"}
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in pod["containers"][0]["env"]
    assert pod_spec(render("dnsPolicy=Default"))["dnsPolicy"] == "Default"


@pytest.mark.parametrize("settings", MODES)
def test_what_a_tool_without_a_cluster_renders_is_always_the_same(template: Helm, settings: list[str]) -> None:
    """Argo CD and Flux render again and again; whatever differed would be rolled out each time."""
    arguments = [part for setting in settings for part in ("--set", setting)]
    first, second = template(*arguments), template(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_it_can_be_rendered_and_linted_without_values(template: Helm, helm: Helm) -> None:
    """The token is then another one in each rendering, which its Secret says."""
    done = template("--set", "admission.token=")
    assert done.returncode == 0, done.stderr
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    secret = next(each for each in objects if each["metadata"]["name"] == "gp-gracepoint-webhooks")
    assert secret["metadata"]["annotations"] == {
        "gracepoint.dev/token": "made in this rendering; set admission.token to keep it"
    }
    assert len(base64.b64decode(secret["data"]["token"])) >= 16
    assert helm("lint", str(CHART), "--kube-version", "1.34.0").returncode == 0


def test_the_usual_values_of_charts_reach_its_objects(render: Render) -> None:
    objects = render(
        "enabled=true",
        "global.anything=1",
        "global.imageRegistry=registry.example.com",
        "global.imagePullSecrets[0].name=theirs",
        "commonLabels.team=ml",
        "commonAnnotations.owner=platform",
        "serviceAccount.name=its-own",
        "serviceAccount.annotations.role=reader",
        "service.annotations.mesh=none",
        "service.ipFamilyPolicy=PreferDualStack",
        "podSecurityContext.runAsUser=1000",
        "securityContext.readOnlyRootFilesystem=false",
        "revisionHistoryLimit=3",
        "extraArgs[0]=--log-level=debug",
        "extraVolumes[0].name=more",
        "extraVolumeMounts[0].name=more",
        "extraVolumeMounts[0].mountPath=/more",
        "topologySpreadConstraints[0].maxSkew=2",
        "protection.enabled=true",
        "podDeletion.enabled=true",
        "podDisruptionBudget.enabled=false",
        "prometheusRule.enabled=true",
        "dashboard.enabled=true",
        "podMonitor.enabled=true",
    )
    ours = [each for each in objects if each["kind"] not in ("CustomResourceDefinition", "Pod")]
    assert {(each["metadata"]["labels"]["team"], each["metadata"]["annotations"]["owner"]) for each in ours} == {
        ("ml", "platform")
    }
    of_metrics, account = sorted(of_kind(objects, "ServiceAccount"), key=lambda each: str(each["metadata"]["name"]))
    service = one(objects, "Service")
    assert (account["metadata"]["name"], account["metadata"]["annotations"]["role"]) == ("its-own", "reader")
    assert service["metadata"]["annotations"]["mesh"] == "none"
    assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
    subjects = [subject for each in ours for subject in each.get("subjects", ())]
    accounts = {subject["name"] for subject in subjects if subject["kind"] == "ServiceAccount"}
    assert accounts == {"its-own", of_metrics["metadata"]["name"]}
    assert ":gp-gracepoint" not in yaml.safe_dump(of_kind(objects, "ValidatingAdmissionPolicy"))
    deployment = one(objects, "Deployment")
    pod = pod_spec(objects)
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == "its-own"
    assert container["image"].startswith("registry.example.com/gracepoint-operator")
    pods = [pod, *(each["spec"] for each in of_kind(objects, "Pod"))]
    assert [each["imagePullSecrets"] for each in pods] == [[{"name": "theirs"}]] * 2, "that of helm test, too"
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (1000, True)
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert deployment["spec"]["revisionHistoryLimit"] == 3
    assert container["args"][-1] == "--log-level=debug"
    assert pod["volumes"][-1] == {"name": "more"}
    assert container["volumeMounts"][-1] == {"name": "more", "mountPath": "/more"}
    assert pod["topologySpreadConstraints"] == [{"maxSkew": 2}]
    assert not of_kind(objects, "PodDisruptionBudget")


def test_an_account_that_exists_is_used_and_none_is_made(render: Render, template: Helm) -> None:
    objects = render("serviceAccount.create=false", "serviceAccount.name=theirs")
    assert not of_kind(objects, "ServiceAccount")
    assert pod_spec(objects)["serviceAccountName"] == "theirs"
    assert "serviceAccount.name: found nothing" in template("--set", "serviceAccount.create=false").stderr


def test_replicas_avoid_the_machines_that_go_away(render: Render) -> None:
    pod = pod_spec(render())
    assert {each["key"] for each in pod["tolerations"]} == {
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    }
    (preferred,) = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    keys = {each["key"] for each in preferred["preference"]["matchExpressions"]}
    assert keys == doctor.GOING_AWAY.keys(), "those that doctor warns of"
    assert {"cloud.google.com/gke-spot", "eks.amazonaws.com/capacityType", "karpenter.sh/capacity-type"} <= keys


def test_platforms_that_assign_ids_can_do_so(render: Render) -> None:
    fixed = {"runAsUser", "runAsGroup", "fsGroup"}
    assert fixed <= pod_spec(render())["securityContext"].keys()
    context = pod_spec(render("fixedIds=false"))["securityContext"]
    assert not fixed & context.keys()
    assert context["runAsNonRoot"] is True


def test_the_image_can_be_named_by_its_digest(render: Render) -> None:
    digest = "sha256:" + "0a" * 32
    container = pod_spec(render(f"image.digest={digest}", "image.tag=v9"))["containers"][0]
    assert container["image"] == f"gracepoint-operator@{digest}"


@pytest.mark.parametrize("settings", MODES)
def test_helm_test_asks_the_operator_as_pods_and_the_api_server_do(render: Render, settings: list[str]) -> None:
    objects = render(*settings)
    pod = one(objects, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    deployment = pod_spec(objects)["containers"][0]
    assert container["image"] == deployment["image"]
    assert container["securityContext"] == deployment["securityContext"]
    host = "https://gp-gracepoint.gp-system.svc"
    assert container["args"] == [
        f"--service-url={host}:443",
        f"--webhook-url={host}:9443",
        "--authorities=/trust/ca-bundle.crt",
    ]
    (volume,) = pod["spec"]["volumes"]
    assert volume["configMap"]["name"] == deployment["args"][deployment["args"].index("--trust") + 1]
    labels = one(objects, "Service")["spec"]["selector"]
    assert not labels.items() <= pod["metadata"]["labels"].items(), "the Service must not lead to it"
    closed = one(render(*settings, "admission.onlyFrom[0].ipBlock.cidr=10.0.0.0/28"), "Pod")
    assert not [arg for arg in closed["spec"]["containers"][0]["args"] if arg.startswith("--webhook-url")]
