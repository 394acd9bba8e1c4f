"""What pods are given, and who wins where both sides say something."""

from __future__ import annotations

import copy
import re

import pytest

from gracepoint.settings import Settings
from gracepoint.wire import names
from gracepoint.wire.names import Env
from gracepoint_operator.webhooks import AdmissionSettings, refresh_pod
from gracepoint_operator.webhooks.injection import is_injected
from tests.unit.operator.fakes.samples import (
    SETTINGS,
    Json,
    by_jobset,
    environment,
    injected,
    job_of,
    jobset,
    pod_of,
    policy_spec,
    replicated_job,
)


def test_every_variable_of_the_wire_is_set() -> None:
    wanted = {value for name, value in vars(Env).items() if not name.startswith("_")}
    wanted -= {Env.HOST_MEMORY_LIMIT_BYTES, Env.GCE_NOTICE_S, Env.TRACE}  # the container's own business
    wanted -= {Env.COMPILATION_CACHE, Env.COMPILATION_CACHE_BYTES, Env.COMPILATION_CACHE_DAYS}  # JAX has its own
    policy = policy_spec(
        cloudMetadata=["Auto"],
        checkpoint={
            "directory": "/c",
            "everySeconds": 600,
            "interval": "Auto",
            "keepEverySteps": 10,
            "keepForSeconds": 60,
            "tolerateFailuresSeconds": 60,
            "writer": "Worker",
            "memory": {"everySteps": 5},
        },
        deadline={"headStartSeconds": 10},
        stalls={"afterSeconds": 60, "action": "Restart"},
        startup={"joinTimeoutSeconds": 900, "notJoinedExitCode": 99},
        training={"minProcesses": 2},
    )
    by_time = policy_spec(checkpoint={"directory": "/c", "memory": {"everySeconds": 30}})  # it has one of both
    found = set(environment(pod_of(injected(jobset(), policy))["containers"][0]))
    assert found | set(environment(pod_of(injected(jobset(), by_time))["containers"][0])) == wanted


@pytest.mark.parametrize(
    ("memory", "told"),
    [
        pytest.param(None, {}, id="none"),
        pytest.param({"everySteps": 5}, {Env.SNAPSHOT_EVERY_STEPS: "5", Env.SNAPSHOT_COPIES: "2"}, id="by steps"),
        pytest.param(
            {"everySeconds": 30, "copies": 1}, {Env.SNAPSHOT_EVERY_S: "30", Env.SNAPSHOT_COPIES: "1"}, id="by seconds"
        ),
    ],
)
def test_snapshots_are_what_the_policy_says(memory: Json | None, told: dict[str, str]) -> None:
    checkpoint = {"directory": "/c"} | ({} if memory is None else {"memory": memory})
    env = environment(pod_of(injected(jobset(), policy_spec(checkpoint=checkpoint)))["containers"][0])
    assert {name: value for name, value in env.items() if "SNAPSHOT" in name} == told
    if told:
        assert Settings.from_environment({**told, Env.PROCESS_COUNT: "1"}).snapshots


def test_container_that_has_an_interval_of_snapshots_keeps_it_in_its_unit() -> None:
    body = jobset()
    pod_of(body)["containers"][0]["env"] = [{"name": Env.SNAPSHOT_EVERY_STEPS, "value": "7"}]
    policy = policy_spec(checkpoint={"directory": "/c", "memory": {"everySeconds": 30}})
    env = environment(pod_of(injected(body, policy))["containers"][0])
    assert env[Env.SNAPSHOT_EVERY_STEPS] == "7"
    assert Env.SNAPSHOT_EVERY_S not in env


def test_the_library_reads_what_is_injected() -> None:
    """As the kubelet resolves it; the library refuses names and values that it does not understand."""
    resolved: dict[str, str] = {}
    for name, value in environment(pod_of(injected(jobset()))["containers"][0]).items():
        if value.startswith(("metadata.", "spec.")):
            resolved[name] = "1" if name in (Env.JOB_INDEX, Env.RESTART_ATTEMPT) else name.lower()
        else:
            resolved[name] = re.sub(r"\$\((\w+)\)", lambda match: resolved[match[1]], value)
    settings = Settings.from_environment({**resolved, names.ENV_JOB_COMPLETION_INDEX: "0"})
    assert settings.directory == "/checkpoints/gracepoint_namespace/gracepoint_jobset_name"
    assert (settings.process_count, settings.save_every_steps, settings.margin) == (2, 100, 1.25)
    assert settings.operator_url == SETTINGS.operator_url


def test_a_pod_learns_who_it_is_from_its_own_fields() -> None:
    env = environment(pod_of(injected(jobset()))["containers"][0])
    assert env[Env.POD_UID] == "metadata.uid"
    assert env[Env.NODE_NAME] == "spec.nodeName"
    assert env[Env.JOBSET_UID] == "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
    assert env[Env.RESTART_ATTEMPT] == "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def test_places_in_the_gang_follow_the_order_of_the_jobset() -> None:
    body = jobset(replicated_job("a", replicas=2, pods=3), replicated_job("b", replicas=4, pods=1))
    made = injected(body)
    first, second = (environment(pod_of(made, i)["containers"][0]) for i in (0, 1))
    assert (first[Env.PROCESS_COUNT], second[Env.PROCESS_COUNT]) == ("10", "10")
    assert (first[Env.PROCESS_OFFSET], second[Env.PROCESS_OFFSET]) == ("0", "6")
    assert (first[Env.PODS_PER_JOB], second[Env.PODS_PER_JOB]) == ("3", "1")
    assert first[Env.COORDINATOR_JOB] == second[Env.COORDINATOR_JOB] == "a"


def test_directory_needs_no_jobset_name_so_generate_name_works() -> None:
    body = jobset()
    del body["metadata"]["name"]
    body["metadata"]["generateName"] = "llm-"
    container = pod_of(injected(body))["containers"][0]
    env = environment(container)
    assert env[Env.DIRECTORY] == "/checkpoints/$(GRACEPOINT_NAMESPACE)/$(GRACEPOINT_JOBSET_NAME)"
    assert env[Env.SUBDOMAIN] == "$(GRACEPOINT_JOBSET_NAME)"
    order = [variable["name"] for variable in container["env"]]
    for used in (Env.NAMESPACE, Env.JOBSET_NAME):
        assert order.index(used) < min(order.index(Env.DIRECTORY), order.index(Env.SUBDOMAIN))


def test_a_subdomain_of_the_users_is_reported() -> None:
    env = environment(pod_of(injected(jobset(network={"subdomain": "net"})))["containers"][0])
    assert env[Env.SUBDOMAIN] == "net"


def test_settings_come_from_the_policy_and_the_grace_period_from_the_pod() -> None:
    body = jobset()
    pod_of(body)["terminationGracePeriodSeconds"] = 300
    policy = policy_spec(
        checkpoint={
            "directory": "file:///c",
            "everySteps": 0,
            "everySeconds": 600,
            "keepLast": 5,
            "keepEverySteps": 1000,
            "keepForSeconds": 3600,
        },
        deadline={"margin": 2, "headStartSeconds": 0},
        afterSave={"savedExitCode": 50, "unsavedExitCode": 51},
        training={"coordinatorPort": 1234},
    )
    env = environment(pod_of(injected(body, policy))["containers"][0])
    assert (env[Env.SAVE_EVERY_STEPS], env[Env.KEEP_LAST], env[Env.MARGIN]) == ("0", "5", "2.0")
    assert (env[Env.SAVE_EVERY_S], env[Env.KEEP_EVERY_STEPS], env[Env.KEEP_FOR_S]) == ("600", "1000", "3600")
    assert env[Env.HEAD_START_S] == "0.0"
    assert (env[Env.SAVED_EXIT_CODE], env[Env.UNSAVED_EXIT_CODE]) == ("50", "51")
    assert (env[Env.GRACE_PERIOD_S], env[Env.COORDINATOR_PORT]) == ("300", "1234")


def test_stalls_are_set_only_where_the_policy_differs() -> None:
    body = jobset()
    policy = policy_spec(stalls={"afterSeconds": 120, "action": "Restart"})
    told = environment(pod_of(injected(body, policy))["containers"][0])
    assert (told[Env.STALL_AFTER_S], told[Env.STALL_ACTION]) == ("120.0", "restart")
    untold = environment(pod_of(injected(body))["containers"][0])
    assert not {Env.STALL_AFTER_S, Env.STALL_ACTION} & untold.keys()


def test_for_how_long_saves_may_fail_is_set_only_where_the_policy_differs() -> None:
    policy = policy_spec(checkpoint={"directory": "/checkpoints/{jobset}", "tolerateFailuresSeconds": 0})
    told = environment(pod_of(injected(jobset(), policy))["containers"][0])
    assert told[Env.TOLERATE_FAILURES_S] == "0"
    assert Env.TOLERATE_FAILURES_S not in environment(pod_of(injected(jobset()))["containers"][0])


def test_how_a_start_waits_and_ends_is_reported_only_where_the_policy_differs() -> None:
    policy = policy_spec(startup={"joinTimeoutSeconds": 900, "notJoinedExitCode": 99})
    told = environment(pod_of(injected(jobset(), policy))["containers"][0])
    assert (told[Env.JOIN_TIMEOUT_S], told[Env.NOT_JOINED_EXIT_CODE]) == ("900", "99")
    untold = environment(pod_of(injected(jobset()))["containers"][0])
    assert not {Env.JOIN_TIMEOUT_S, Env.NOT_JOINED_EXIT_CODE} & untold.keys()


def test_the_contract_has_the_exit_code_that_the_process_uses() -> None:
    body = jobset()
    pod_of(body)["containers"][0]["env"] = [{"name": Env.NOT_JOINED_EXIT_CODE, "value": "33"}]
    assert environment(pod_of(injected(body))["containers"][0])[Env.NOT_JOINED_EXIT_CODE] == "79"


def jax_variables(cache: Json, directory: str = "/checkpoints/{jobset}", **theirs: str) -> dict[str, str]:
    """Returns the variables of JAX and of the compilation cache that the container then has."""
    body = jobset()
    container = pod_of(body)["containers"][0]
    container["env"] = [{"name": name, "value": value} for name, value in theirs.items()]
    policy = policy_spec(compilationCache=cache, checkpoint={"directory": directory})
    env = environment(pod_of(injected(body, policy))["containers"][0])
    return {name: value for name, value in env.items() if name.startswith("JAX_") or "COMPILATION" in name}


@pytest.mark.parametrize(
    ("cache", "directory", "where"),
    [
        pytest.param({"enabled": True}, "/c/{jobset}/", "/c/$(GRACEPOINT_JOBSET_NAME)/.compiled-programs", id="beside"),
        pytest.param({"enabled": True}, "file:///c", "/c/.compiled-programs", id="beside, as a URI"),
        pytest.param(
            {"enabled": True, "directory": "/p/{namespace}"}, "gs://bucket/c", "/p/$(GRACEPOINT_NAMESPACE)", id="own"
        ),
        pytest.param({"enabled": True, "directory": "file:///p"}, "/c", "/p", id="own, as a URI"),
    ],
)
def test_jax_gets_the_directory_for_compiled_programs(cache: Json, directory: str, where: str) -> None:
    assert jax_variables(cache, directory) == {
        "JAX_COMPILATION_CACHE_DIR": where,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def test_in_a_bucket_the_caches_of_xla_are_off_as_they_need_a_file_system() -> None:
    assert jax_variables({"enabled": True, "directory": "s3://bucket/{namespace}"}) == {
        "JAX_COMPILATION_CACHE_DIR": "s3://bucket/$(GRACEPOINT_NAMESPACE)",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }


def test_programs_go_to_a_bucket_only_if_the_policy_names_it_for_them() -> None:
    assert jax_variables({"enabled": True}, "gs://bucket/{jobset}") == {}


@pytest.mark.parametrize("cache", [{}, {"enabled": False}, {"directory": "/p", "maxBytes": 1 << 20, "unusedDays": 7}])
def test_jax_gets_no_settings_unless_compiled_programs_are_kept(cache: Json) -> None:
    assert jax_variables(cache) == {}


@pytest.mark.parametrize(
    ("theirs", "variables"),
    [
        pytest.param({"JAX_COMPILATION_CACHE_DIR": "/own"}, {"JAX_COMPILATION_CACHE_DIR": "/own"}, id="JAX's"),
        pytest.param({Env.COMPILATION_CACHE: "off"}, {Env.COMPILATION_CACHE: "off"}, id="Gracepoint's"),
        pytest.param({Env.DIRECTORY: "/elsewhere"}, {Env.COMPILATION_CACHE: "on"}, id="another place of checkpoints"),
        pytest.param(
            {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5"},
            {
                "JAX_COMPILATION_CACHE_DIR": "/checkpoints/$(GRACEPOINT_JOBSET_NAME)/.compiled-programs",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "5",
            },
            id="a threshold",
        ),
    ],
)
def test_what_the_container_says_of_compiled_programs_counts(theirs: dict[str, str], variables: dict[str, str]) -> None:
    assert jax_variables({"enabled": True}, **theirs) == variables


def test_cloud_metadata_is_offered_only_where_the_policy_asks() -> None:
    body = jobset()
    told = environment(pod_of(injected(body, policy_spec(cloudMetadata=["GCE", "Azure"])))["containers"][0])
    assert told[Env.METADATA] == "gce,azure"
    assert Env.METADATA not in environment(pod_of(injected(body))["containers"][0])


@pytest.mark.parametrize(
    ("directory", "store", "told"),
    [
        pytest.param(
            "s3://bucket/{jobset}",
            {"endpoint": "http://minio:9000", "region": "eu-central-1"},
            {"AWS_ENDPOINT_URL_S3": "http://minio:9000", "AWS_REGION": "eu-central-1"},
            id="s3",
        ),
        pytest.param(
            "gs://bucket/{jobset}",
            {"endpoint": "http://gcs:4443"},
            {"TENSORSTORE_GCS_HTTP_URL": "http://gcs:4443"},
            id="gs",
        ),
        pytest.param(
            "s3://bucket/{jobset}",
            {"serverSideEncryption": {"algorithm": "aws:kms", "keyId": "k", "bucketKey": True}},
            {
                "AWS_SERVER_SIDE_ENCRYPTION": "aws:kms",
                "AWS_SSE_KMS_KEY_ID": "k",
                "AWS_SSE_BUCKET_KEY_ENABLED": "true",
            },
            id="s3, encrypted",
        ),
        pytest.param(
            "gs://bucket/{jobset}",
            {"serverSideEncryption": {"keyId": "projects/p/k"}},
            {"GOOGLE_STORAGE_KMS_KEY_NAME": "projects/p/k"},
            id="gs, encrypted",
        ),
        pytest.param("s3://bucket/{jobset}", {}, {}, id="the provider's own"),
    ],
)
def test_the_object_store_of_the_policy_is_set(directory: str, store: Json, told: dict[str, str]) -> None:
    policy = policy_spec(checkpoint={"directory": directory, "objectStore": store})
    env = environment(pod_of(injected(jobset(), policy))["containers"][0])
    assert env[Env.DIRECTORY] == directory.replace("{jobset}", "$(GRACEPOINT_JOBSET_NAME)")
    clients = ("AWS_", "TENSORSTORE_", "GOOGLE_")
    assert {name: value for name, value in env.items() if name.startswith(clients)} == told


def test_the_object_store_of_the_container_wins_over_the_policys() -> None:
    body = jobset()
    theirs = [{"name": "AWS_ENDPOINT_URL_S3", "value": "http://ours"}]
    pod_of(body)["containers"][0]["env"] = theirs
    policy = policy_spec(checkpoint={"directory": "s3://bucket", "objectStore": {"endpoint": "http://theirs"}})
    env = environment(pod_of(injected(body, policy))["containers"][0])
    assert env["AWS_ENDPOINT_URL_S3"] == "http://ours"


def test_settings_that_the_container_has_win_over_the_policys() -> None:
    body = jobset()
    own = [{"name": Env.SAVE_EVERY_STEPS, "value": "7"}, {"name": "LR", "value": "1e-3"}]
    pod_of(body)["containers"][0]["env"] = own
    env = pod_of(injected(body))["containers"][0]["env"]
    assert [v for v in env if v["name"] == Env.SAVE_EVERY_STEPS] == [own[0]]
    assert env[-1] == own[1]


@pytest.mark.parametrize("name", [Env.POD_UID, Env.OPERATOR_URL, Env.SAVED_EXIT_CODE, Env.PROCESS_COUNT])
def test_identity_address_and_contract_are_always_ours(name: str) -> None:
    body = jobset()
    pod_of(body)["containers"][0]["env"] = [{"name": name, "value": "forged"}]
    env = pod_of(injected(body))["containers"][0]["env"]
    (variable,) = [v for v in env if v["name"] == name]
    assert variable.get("value") != "forged"


def test_token_has_the_audience_and_is_mounted_for_the_library() -> None:
    pod = pod_of(injected(jobset()))
    _, volume = pod["volumes"]
    _, mount = pod["containers"][0]["volumeMounts"]
    token = volume["projected"]["sources"][0]["serviceAccountToken"]
    assert token == {"audience": "gracepoint.dev", "expirationSeconds": 3600, "path": "token"}
    assert mount == {"name": volume["name"], "mountPath": names.TOKEN_DIRECTORY, "readOnly": True}
    assert f"{mount['mountPath']}/{token['path']}" == names.TOKEN_FILE


def test_the_users_volumes_labels_and_other_containers_stay() -> None:
    body = jobset()
    pod = pod_of(body)
    pod["volumes"] = [{"name": "data", "emptyDir": {}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    pod["containers"].append({"name": "sidecar", "image": "s"})
    job_of(body)["template"]["metadata"] = {"labels": {"team": "x"}}
    made = injected(body)
    assert pod_of(made)["volumes"][0] == {"name": "data", "emptyDir": {}}
    assert pod_of(made)["containers"][0]["volumeMounts"][0] == {"name": "data", "mountPath": "/data"}
    assert pod_of(made)["containers"][1] == {"name": "sidecar", "image": "s"}
    assert job_of(made)["template"]["metadata"]["labels"] == {"team": "x", names.LABEL_POLICY: "default"}


def test_the_container_that_the_policy_names_is_the_one_that_is_injected() -> None:
    body = jobset()
    pod_of(body)["containers"].insert(0, {"name": "proxy", "image": "p"})
    policy = policy_spec(training={"container": "train"})
    made = injected(body, policy)
    assert "env" not in pod_of(made)["containers"][0]
    assert Env.POD_UID in environment(pod_of(made)["containers"][1])
    rule = job_of(made)["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["containerName"] == "train"


def test_what_does_not_train_gets_labels_alone_by_which_the_operator_sees_its_pods() -> None:
    body = jobset(replicated_job("workers"), replicated_job("board"))
    made = injected(body, policy_spec(training={"replicatedJobs": ["workers"]}))
    metadata = job_of(made, 1)["template"].pop("metadata")
    assert metadata == {"labels": {names.LABEL_POLICY: "default", names.LABEL_ROLE: "helper"}}
    assert made["spec"]["replicatedJobs"][1] == body["spec"]["replicatedJobs"][1]


def test_injecting_again_changes_nothing_also_after_jobsets_webhook() -> None:
    body = jobset()
    pod_of(body)["containers"][0]["env"] = [
        {"name": Env.DIRECTORY, "value": "/own"},
        {"name": Env.POD_UID, "value": "forged"},
    ]
    once = by_jobset(injected(body))
    assert injected(once) == once


def test_a_pod_of_an_older_template_gets_the_operators_present_address() -> None:
    pod = {"spec": copy.deepcopy(pod_of(injected(jobset())))}
    fresh = refresh_pod(pod, AdmissionSettings(operator_url="https://new:443", ca_certificate="PEM-2"))
    env = environment(fresh["spec"]["containers"][0])
    assert (env[Env.OPERATOR_URL], env[Env.CA_CERTIFICATE]) == ("https://new:443", "PEM-2")
    before = environment(pod["spec"]["containers"][0])
    assert {k: v for k, v in env.items() if before[k] != v}.keys() == {Env.OPERATOR_URL, Env.CA_CERTIFICATE}
    assert refresh_pod(pod, SETTINGS) == pod


def test_a_container_that_has_one_of_the_variables_already_gets_the_others() -> None:
    body = jobset()
    ours = pod_of(injected(jobset()))["containers"][0]["env"]
    same = next(variable for variable in ours if variable["name"] == Env.POLICY)
    pod_of(body)["containers"][0]["env"] = [same]
    env = pod_of(injected(body))["containers"][0]["env"]
    assert sorted(variable["name"] for variable in env) == sorted(variable["name"] for variable in ours)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param([{"name": Env.OPERATOR_URL, "value": "https://there"}], True, id="the operator's URL alone"),
        pytest.param([{"name": "MINE", "value": "x"}, {"name": Env.OPERATOR_URL}], True, id="beside others"),
        pytest.param([{"name": "MINE", "value": "x"}], False, id="others alone"),
        pytest.param([], False, id="none"),
    ],
)
def test_a_pod_is_injected_if_a_container_has_the_operators_url(env: list[Json], expected: bool) -> None:
    assert is_injected({"spec": {"containers": [{"name": "other"}, {"name": "trainer", "env": env}]}}) is expected


@pytest.mark.parametrize("directory", ["gs://bucket/{jobset}", "/checkpoints/{jobset}"])
def test_a_webhook_that_is_called_again_changes_nothing(directory: str) -> None:
    under = policy_spec(checkpoint={"directory": directory}, compilationCache={"enabled": True})
    once = injected(jobset(), under)
    assert injected(once, under) == once
