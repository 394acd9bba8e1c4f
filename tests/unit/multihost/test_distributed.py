"""Joining a cluster: what is asked of ``jax.distributed``, and what is refused before it is asked.

JAX itself is real in tests/multiprocess/test_multihost.py; here only its ``initialize`` is recorded.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import xla_bridge

from gracepoint.errors import ClusterError, SettingsError
from gracepoint.jax_isolation import setting
from gracepoint.multihost import distributed, global_state, initialize, join, shutdown
from gracepoint.multihost.distributed import jax_state
from gracepoint.multihost.rendezvous import Guest, Host, Line
from gracepoint.settings import Settings
from gracepoint.wire.names import Env
from tests.ports import held_ports

Call = Callable[..., Mapping[str, Any]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """``initialize`` as in a fresh process; returns what it asks of JAX."""
    asked: dict[str, Any] = {}

    def record(address: str | None, count: int | None, process_id: int | None, **options: Any) -> None:
        asked.update(options, address=address, count=count, process_id=process_id)

    monkeypatch.setattr(jax.distributed, "initialize", record)
    monkeypatch.setattr(jax_state(), "coordinator_address", None)
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "JAX_COORDINATOR_BIND_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    # All are there at once: how they meet is tested with rendezvous, and here what follows.
    monkeypatch.setattr(Host, "gather", lambda self: [])
    monkeypatch.setattr(Guest, "gather", lambda self: nobody())
    monkeypatch.setattr(distributed, "wait_for_coordinator", lambda address, timeout_s: None)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)

    def initialize_here(*arguments: Any, **options: Any) -> Mapping[str, Any]:
        asked.clear()
        options.setdefault("pod_labels_file", str(tmp_path / "labels"))
        options.setdefault("environ", {})
        initialize(*arguments, **options)
        return dict(asked)

    return initialize_here


def nobody() -> Line:
    ours, theirs = socket.socketpair()
    line = Line(ours, 0.0)
    line.joined = True
    with theirs:
        return line


def test_every_setting_reaches_jax(call: Call) -> None:
    options = {
        "local_device_ids": [0, 1],
        "heartbeat_timeout_seconds": 11,
        "shutdown_timeout_seconds": 12,
        "coordinator_bind_address": "0.0.0.0:1",
        "partition_index": 1,
        "cluster_detection_method": "deactivate",
        "initialization_timeout": 13,
    }
    # JAX's own timeout ends the process, so it comes after ours.
    reached = {**options, "initialization_timeout": 73}
    assert call("h:1", 4, 0, **options) == {**reached, "address": "h:1", "count": 4, "process_id": 0}


@pytest.mark.parametrize("devices", [1, (0, 1)], ids=["one", "several"])
def test_devices_are_given_by_one_number_or_several(call: Call, devices: Any) -> None:
    assert call("h:1", 2, 0, devices)["local_device_ids"] == devices


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "[::1]:1"])
def test_loopback_coordinator_in_a_pod_is_logged_as_a_warning(
    call: Call, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    for arguments, environ in (((address, 1, 0), in_a_pod), ((address, 2, 0), {}), (("h:1", 2, 0), in_a_pod)):
        call(*arguments, environ=environ)
    assert "loopback" not in caplog.text
    call(address, 2, 0, environ=in_a_pod)
    assert f"address={address} is a loopback address" in caplog.text


def test_by_default_the_settings_are_jaxs_own(call: Call) -> None:
    asked = call("localhost:1", 2, 0)
    assert asked == {
        "address": "localhost:1",
        "count": 2,
        "process_id": 0,
        "initialization_timeout": 360,
        "heartbeat_timeout_seconds": 100,
        "shutdown_timeout_seconds": 300,
        "local_device_ids": None,
        "cluster_detection_method": None,
        "coordinator_bind_address": None,
        "partition_index": None,
    }


def test_the_address_may_come_from_jaxs_own_variable(call: Call) -> None:
    environ = {"JAX_COORDINATOR_ADDRESS": "localhost:2"}
    assert call(None, 2, 0, environ=environ)["address"] == "localhost:2"
    assert call("localhost:1", 2, 0, environ=environ)["address"] == "localhost:1"


def test_jobset_pod_is_detected_and_jax_does_not_ask_the_api_server(call: Call) -> None:
    environ = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        Env.JOBSET_NAME: "gpt",
        Env.PROCESS_COUNT: "4",
        Env.PODS_PER_JOB: "4",
        "JOB_COMPLETION_INDEX": "0",
        Env.COORDINATOR_JOB: "w",
    }
    asked = call(environ=environ)
    assert (asked["address"], asked["count"], asked["process_id"]) == ("127.0.0.1:8476", 4, 0)
    assert global_state.coordinator_address == "gpt-w-0-0.gpt:8476"
    assert asked["cluster_detection_method"] == "deactivate"
    assert call(environ=environ, cluster_detection_method="jobset") == asked


@pytest.mark.parametrize(
    ("process", "options", "environ", "asked"),
    [
        pytest.param(0, {}, {}, "127.0.0.1:1", id="process 0"),
        pytest.param(1, {}, {}, "h:1", id="another process"),
        pytest.param(0, {"coordinator_bind_address": "10.0.0.1:1"}, {}, "h:1", id="bound to an address"),
        pytest.param(0, {}, {"JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:1"}, "h:1", id="bound by JAX's variable"),
        pytest.param(0, {}, {"https_proxy": "http://proxy:3128"}, "127.0.0.1:1", id="behind a proxy"),
    ],
)
def test_process_0_connects_to_its_own_service_by_loopback(
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    process: int,
    options: dict[str, Any],
    environ: dict[str, str],
    asked: str,
) -> None:
    monkeypatch.setenv("no_grpc_proxy", "")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert call("h:1", 2, process, **options)["address"] == asked


def test_other_clusters_and_tpu_are_left_to_jaxs_detection(call: Call) -> None:
    asked = call()
    assert (asked["address"], asked["count"], asked["process_id"]) == (None, None, None)
    assert asked["cluster_detection_method"] is None
    assert call(cluster_detection_method="mpi4py")["cluster_detection_method"] == "mpi4py"
    tpu = {"TPU_WORKER_HOSTNAMES": "a,b", "JOB_COMPLETION_INDEX": "1"}
    assert call(environ=tpu)["process_id"] is None


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        pytest.param((None, 2, 0), {}, SettingsError, "coordinator_address: expected a value", id="no address"),
        pytest.param(("h:1", None, 0), {}, SettingsError, "num_processes: expected a value", id="no number"),
        pytest.param(("h:1", 2, None), {}, SettingsError, "process_id: expected a value", id="no id"),
        pytest.param(("h:1", 2, 2), {}, SettingsError, "found 2 of 2", id="id beyond"),
        pytest.param(("h:1", 2, -1), {}, SettingsError, "found -1 of 2", id="negative id"),
        pytest.param(("h:1", 2, "1"), {}, TypeError, "process_id: expected an integer, found '1'", id="text"),
        pytest.param(("h:1", 2.0, 1), {}, TypeError, "num_processes: expected an integer", id="fraction"),
        pytest.param(("nowhere", 2, 1), {}, SettingsError, "expected host:port, found 'nowhere'", id="no port"),
        pytest.param((), {"cluster_detection_method": "jobset"}, SettingsError, "found neither", id="no JobSet"),
    ],
)
def test_missing_and_wrong_arguments_are_refused_by_name(
    call: Call, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(*arguments, **{"cluster_detection_method": "deactivate", **options})


def test_missing_arguments_are_refused_as_the_reference_does(call: Call) -> None:
    with pytest.raises(ValueError, match="coordinator_address"):  # jax.distributed raises ValueError
        call(cluster_detection_method="deactivate")


def test_it_is_refused_once_the_backend_is_in_use(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    with pytest.raises(ClusterError, match="backend is in use already"):
        call("h:1", 2, 0)


def test_recoverability_is_jaxs_own_setting(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not setting("jax_enable_recoverability")
    try:
        call("h:1", 2, 0, recoverable=True)
        assert setting("jax_enable_recoverability")
        call("h:1", 2, 0)
        assert setting("jax_enable_recoverability")  # not told: left as it is
    finally:
        jax.config.update("jax_enable_recoverability", False)

    def unknown(name: str, value: object) -> None:
        raise AttributeError(f"Unrecognized config option: {name}")

    monkeypatch.setattr(jax.config, "update", unknown)
    with pytest.raises(ClusterError, match="has no jax_enable_recoverability"):
        call("h:1", 2, 0, recoverable=True)


def test_process_0_connects_by_name_where_certificates_are_checked(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(jax.config), "jax_mtls_cert_file", "/tls.crt", raising=False)
    assert call("h:1", 2, 0)["address"] == "h:1"


def test_a_service_that_does_not_start_is_an_error_that_names_it() -> None:
    with (
        held_ports(1) as (port,),
        pytest.raises(ClusterError, match=rf"service of process 0 at 127.0.0.1:{port}, .*ref"),
    ):
        distributed.wait_for_coordinator(f"127.0.0.1:{port}", timeout_s=0.3)


def test_a_service_that_comes_later_is_waited_for() -> None:
    with held_ports(1) as (port,):
        waiting = threading.Thread(
            target=lambda: distributed.wait_for_coordinator(f"127.0.0.1:{port}", timeout_s=60), daemon=True
        )
        waiting.start()
        with socket.create_server(("127.0.0.1", port)):
            waiting.join(60)
            assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("environ", "exempt"),
    [
        pytest.param({}, None, id="no proxy"),
        pytest.param({"HTTPS_PROXY": "p:1"}, None, id="one that gRPC does not read"),
        pytest.param({"no_proxy": "a"}, None, id="only exemptions"),
        pytest.param({"http_proxy": "p:1"}, "gpt-w-0-0.gpt,127.0.0.1", id="a proxy"),
        pytest.param(
            {"https_proxy": "p:1", "no_proxy": "a,.svc"}, "a,.svc,gpt-w-0-0.gpt,127.0.0.1", id="others exempt"
        ),
        pytest.param(
            {"grpc_proxy": "p:1", "no_grpc_proxy": "b", "no_proxy": "a"}, "b,gpt-w-0-0.gpt,127.0.0.1", id="gRPC's"
        ),
        pytest.param(
            {"http_proxy": "p:1", "no_grpc_proxy": "127.0.0.1,gpt-w-0-0.gpt"}, "127.0.0.1,gpt-w-0-0.gpt", id="both"
        ),
        pytest.param(
            {"http_proxy": "p:1", "TPU_WORKER_HOSTNAMES": "t-0,t-1"}, "gpt-w-0-0.gpt,127.0.0.1,t-0,t-1", id="TPU"
        ),
    ],
)
def test_the_coordinator_is_exempt_from_proxies(environ: dict[str, str], exempt: str | None) -> None:
    found = dict(environ)
    distributed.exempt_from_proxies("gpt-w-0-0.gpt:8476", found)
    assert found.get("no_grpc_proxy") == exempt
    assert {name: value for name, value in found.items() if name != "no_grpc_proxy"} == {
        name: value for name, value in environ.items() if name != "no_grpc_proxy"
    }
    again = dict(found)
    distributed.exempt_from_proxies("gpt-w-0-0.gpt:8476", again)
    assert again == found


def test_who_a_process_is_comes_from_its_pod(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[Any] = []

    def gather(self: Host) -> list[Line]:
        came.append(vars(self))
        return []

    monkeypatch.setattr(Host, "gather", gather)
    labels = tmp_path / "labels"
    labels.write_text('jobset.sigs.k8s.io/jobset-uid="uid-1"\njobset.sigs.k8s.io/restart-attempt="3"\n')
    environ = {Env.POD_NAME: "pod-0", Env.NOT_JOINED_EXIT_CODE: "80"}
    call("h:1", 2, 0, environ=environ, pod_labels_file=str(labels))
    call("h:1", 2, 0, pod_labels_file=str(tmp_path / "none"))
    told = [(each["_me"].job, each["_me"].attempt, each["_me"].pod, each["_exit_code"]) for each in came]
    assert told[0] == ("uid-1", 3, "pod-0", 80)
    assert told[1] == (None, 0, os.uname().nodename, 79)


def test_attach_leaves_tpu_to_jax_once_all_are_there(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []

    def gather(self: Guest) -> Line:
        met.append("all")
        return nobody()

    monkeypatch.setattr(Guest, "gather", gather)
    tpu = {"TPU_WORKER_HOSTNAMES": "a,b"}
    settings = Settings(process_count=2, pods_per_job=2, completion_index=1)
    assert join(settings, tpu)
    assert not met  # the pod was not injected: only JAX knows the place
    injected = dataclasses.replace(settings, jobset_name="gpt", coordinator_job="w", coordinator_port=1, subdomain="g")
    assert join(injected, tpu)
    assert met == ["all"]


def test_state_outside_a_cluster_is_that_of_one_process() -> None:
    assert not global_state.initialized
    assert (global_state.process_id, global_state.num_processes) == (0, 1)
    assert global_state.coordinator_address is None
    assert (global_state.client, global_state.service, global_state.preemption_sync_manager) == (None, None, None)
    with pytest.raises(ClusterError, match="needs a cluster"):
        global_state.initialize_preemption_sync_manager()
    shutdown()
    shutdown()


def test_the_places_of_arguments_are_those_of_the_reference(call: Call) -> None:
    found = call("h:1", 2, 0, [0], 30)
    assert (found["local_device_ids"], found["initialization_timeout"]) == ([0], 90)
