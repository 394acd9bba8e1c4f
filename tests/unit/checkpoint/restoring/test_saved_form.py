"""A job that had accelerators does not go on on the CPU unless it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import gracepoint
from gracepoint.checkpoint import CheckpointManager
from gracepoint.checkpoint.format import orbax_metadata
from gracepoint.errors import CheckpointRefused, NotJoined, SettingsError
from gracepoint.jax_isolation import setting
from gracepoint.multihost.membership import lacking_accelerators
from tests.unit.checkpoint.fakes.engine import sharding

pytestmark = pytest.mark.integration


@pytest.fixture
def nothing_chosen() -> Iterator[None]:
    """JAX has found the CPU alone by itself, as it does where a GPU's driver is not ready."""
    chosen = setting("jax_platforms")
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", chosen)


def state(kind: str) -> dict[str, Any]:
    w = jnp.arange(16.0).reshape(4, 4)
    return {"w": jax.device_put(w, sharding("x", "y")) if kind == "a mesh" else w, "count": jnp.int32(1)}


def saved_on_gpus(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves step 1 with a file of shardings as it is on GPUs."""
    real = orbax_metadata.sharding

    def on_gpus(leaves: Any) -> bytes:
        recorded = {name: json.loads(text) for name, text in json.loads(real(leaves)).items()}
        return json.dumps({name: json.dumps({**each, "platform": "gpu"}) for name, each in recorded.items()}).encode()

    with monkeypatch.context() as patch, gracepoint.attach(root, save_every_steps=1) as session:
        patch.setattr(orbax_metadata, "sharding", on_gpus)
        session.step(1, state(kind))


@pytest.mark.parametrize("kind", ["a mesh", "a device"])
def test_the_platform_of_the_devices_is_recorded(kind: str, tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.step(1, state(kind))
    recorded = orbax_metadata.recorded_shardings(json.loads((tmp_path / "1/default/_sharding").read_bytes()), "")
    assert {orbax_metadata.platform_of(each) for each in recorded.values()} == {"cpu"}
    assert {each["platform"] for each in recorded.values()} == {"cpu"}


@pytest.mark.parametrize(("kind", "devices"), [("a mesh", 4), ("a device", 1)])
def test_accelerators_before_and_the_cpu_by_fallback_is_refused(
    kind: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_chosen: None
) -> None:
    saved_on_gpus(tmp_path, kind, monkeypatch)
    with gracepoint.attach(tmp_path) as session:
        with pytest.raises(
            CheckpointRefused, match=f"{devices} gpu -> {jax.device_count()} cpu.*set JAX_PLATFORMS=cpu"
        ):
            session.restore(like=state(kind))
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        assert session.restore(like=state(kind))[1] == 1


@pytest.mark.parametrize("chosen", ["cpu", "cpu,cuda"])
def test_the_cpu_by_choice_continues_and_the_change_is_logged(
    chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_chosen: None
) -> None:
    saved_on_gpus(tmp_path, "a mesh", monkeypatch)
    jax.config.update("jax_platforms", chosen)
    with gracepoint.attach(tmp_path) as session:
        restored, step = session.restore(like=state("a mesh"))
        assert session.restored is not None
        assert session.restored.changed == ("devices: 4 gpu -> 4 cpu",)
    assert step == 1
    np.testing.assert_array_equal(restored["w"], np.arange(16.0).reshape(4, 4))


def test_looking_at_a_checkpoint_on_the_cpu_is_not_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_chosen: None
) -> None:
    saved_on_gpus(tmp_path / "run", "a device", monkeypatch)
    with CheckpointManager(tmp_path / "run") as manager:
        np.testing.assert_array_equal(manager.restore().state["w"], np.arange(16.0).reshape(4, 4))
    with gracepoint.attach(tmp_path / "own") as session:
        assert session.restore(like=state("a device"), from_=tmp_path / "run")[1] == 0


@pytest.mark.parametrize(("name", "platform"), [("cuda:0", "gpu"), ("TPU_0(process=0,(0,0,0,0))", "tpu")])
def test_a_step_of_orbax_shows_the_platform_by_the_name_of_its_device(
    name: str, platform: str, tmp_path: Path, nothing_chosen: None
) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state("a device")))
    file = tmp_path / "3" / "default" / "_sharding"
    recorded = {key: json.loads(text) for key, text in json.loads(file.read_text()).items()}
    file.write_text(json.dumps({key: json.dumps({**each, "device_str": name}) for key, each in recorded.items()}))
    with gracepoint.attach(tmp_path) as session, pytest.raises(CheckpointRefused, match=f"1 {platform} -> 4 cpu"):
        session.restore(like=state("a device"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NVIDIA_VISIBLE_DEVICES", "GPU-5a1f,GPU-77"), ("NVIDIA_VISIBLE_DEVICES", "MIG-1"), ("TPU_WORKER_HOSTNAMES", "a")],
)
def test_a_first_start_is_refused_where_the_container_was_given_accelerators(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_chosen: None
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=f"{variable}={value} gives this container accelerators"):
        gracepoint.attach(tmp_path)
    jax.config.update("jax_platforms", "cpu")
    gracepoint.attach(tmp_path).close()


@pytest.mark.parametrize("value", ["all", "void", "none", ""])
def test_what_images_set_by_themselves_is_no_accelerator(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_chosen: None
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", value)
    gracepoint.attach(tmp_path).close()


@pytest.fixture
def _has_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's package for accelerators is installed."""
    (tmp_path / "packages" / "jax_plugins").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))


@pytest.mark.usefixtures("_has_a_plugin")
def test_a_start_without_the_devices_that_the_container_was_given_is_no_failure_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_chosen: None
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "GPU-5a1f")
    with pytest.raises(NotJoined, match=r"was given accelerators \(NVIDIA_VISIBLE_DEVICES=GPU-5a1f\)") as caught:
        gracepoint.attach(tmp_path / "steps", not_joined_exit_code=80)
    assert caught.value.code == 80
    jax.config.update("jax_platforms", "cpu")
    gracepoint.attach(tmp_path / "steps").close()


@pytest.mark.usefixtures("_has_a_plugin")
@pytest.mark.parametrize("file", ["nvidia0", "nvidia11", "kfd", "accel3", "vfio/7"])
def test_device_files_of_a_pod_are_devices_that_it_was_given(file: str, tmp_path: Path, nothing_chosen: None) -> None:
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for other in ("nvidiactl", "nvidia-uvm", "null", "vfio/vfio"):
        (tmp_path / "dev" / other).touch()
    assert lacking_accelerators({}, in_pod=True, devices=tmp_path / "dev") == ""
    (tmp_path / "dev" / file).touch()
    assert f"dev/{file}" in lacking_accelerators({}, in_pod=True, devices=tmp_path / "dev")
    assert lacking_accelerators({}, in_pod=False, devices=tmp_path / "dev") == ""
