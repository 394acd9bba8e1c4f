"""The multihost utilities in real JAX processes; the first argument says which part."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gracepoint import multihost
from gracepoint.errors import (
    AgreementError,
    BarrierCancelled,
    BarrierFailed,
    BarrierReused,
    BarrierTimeout,
    CannotKnow,
    CheckpointError,
    ClusterError,
)
from gracepoint.multihost.utilities import joined_cluster
from gracepoint.settings import Settings
from gracepoint.wire.names import Env
from tests.multiprocess.launcher import here
from tests.ports import held_ports


def _own_cluster() -> None:
    """A cluster of this process alone, as where each pod was given an address of its own."""
    import jax

    with held_ports(1) as (port,):
        jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0, initialization_timeout=60)


def split() -> None:
    """Each process is a cluster of its own, where the webhook has counted them all."""
    import gracepoint

    _own_cluster()
    count = here().process_count
    with pytest.raises(AgreementError, match=rf"GRACEPOINT_PROCESS_COUNT={count}: .* has 1\. Several clusters"):
        gracepoint.attach(sys.argv[2])


def miscounted() -> None:
    """One cluster of all processes, where the webhook has counted more; one of them was told."""
    import gracepoint

    here().initialize_jax()
    with pytest.raises(AgreementError, match=r"GRACEPOINT_PROCESS_COUNT=4: .* has 2\. Several clusters"):
        gracepoint.attach(sys.argv[2])


def split_without_a_count() -> None:
    """Each process is a cluster of its own, and nobody has counted them: the second one finds the first one's lease."""
    import gracepoint
    from gracepoint.checkpoint.steps import lease
    from gracepoint.checkpoint.storage.checks import appears
    from gracepoint.checkpoint.storage.locations import storage_path

    lease.PATIENCE_S = 1.0
    _own_cluster()
    attached, refused = Path(sys.argv[2], "attached"), Path(sys.argv[2], "refused")
    if here().process_index == 0:
        with gracepoint.attach(sys.argv[2]) as session:
            session.step(1, {"w": np.zeros(4)})
            attached.touch()
            assert appears(storage_path(refused), within_s=60, sleep=time.sleep)
    else:
        assert appears(storage_path(attached), within_s=60, sleep=time.sleep)
        with pytest.raises(CheckpointError, match="another cluster of this same start of the job uses it: .* uid-1-0-"):
            gracepoint.attach(sys.argv[2])
        refused.touch()


def barriers() -> None:
    """Whatever processes may do at a barrier, with any number of them."""
    import jax

    here().initialize_jax()
    me, count = multihost.process_index(), multihost.process_count()
    assert (me, count) == (here().process_index, here().process_count)
    assert multihost.is_primary_host(me)
    assert multihost.is_primary_host(None)
    assert multihost.is_primary_host(count - 1) == (me == count - 1)

    durations: list[tuple[str, float]] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: durations.append((event, duration_secs))
    )
    multihost.sync_global_processes("first")
    multihost.sync_global_processes("second", timeout=60, record_event_name="/mine")
    recorded = [name for name, seconds in durations if name in (multihost.utilities.SYNC_DURATION_EVENT, "/mine")]
    if count == 1:
        assert recorded == []  # skipped
        multihost.sync_global_processes("first")
        return
    assert recorded == [multihost.utilities.SYNC_DURATION_EVENT, "/mine"]
    with pytest.raises(BarrierReused, match="'first' was used before"):
        multihost.sync_global_processes("first")

    # The coordination service's own barrier in place of ours, as in Orbax.
    client = multihost.global_state.client
    assert client is not None

    def reference(*, key: str, timeout_ms: int) -> None:
        client.wait_at_barrier(key, timeout_ms)

    multihost.sync_global_processes("reference", barrier_sync_fn=reference)

    # Background threads, each under its own keys, at the same time as this one; in every process in another order.
    def in_background(name: int) -> None:
        wait = multihost.get_barrier_sync_fn()
        for number in range(3):
            wait(key=f"thread/{name}/{number}", timeout_ms=60_000)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        names = [(me + i) % 4 for i in range(4)]
        threads = [pool.submit(in_background, name) for name in names]
        in_background(4)
        for thread in threads:
            thread.result(60)

    # Some processes meet without the others: the even ones, those at both ends, and one that is alone.
    even, ends = {i for i in range(count) if i % 2 == 0}, {0, count - 1}
    for some in (even, ends, {me}):
        if me in some:
            multihost.sync_global_processes(f"some/{sorted(some)}", processes=some)
        else:
            with pytest.raises(ValueError, match="to be among those taking part"):
                multihost.get_barrier_sync_fn(processes=some)(key="unused", timeout_ms=1)
    gang = joined_cluster().gang
    if me in ends:
        assert gang.gather("ends", f"v{me}", timeout_s=60, processes=ends) == ["v0", f"v{count - 1}"]
        last = count - 1
        word = "from the last" if me == last else None
        assert gang.broadcast("ends/word", word, timeout_s=60, source=last, processes=ends) == "from the last"

    # A failure, a timeout and a cancelled wait reach everybody, with what is to be known.
    began = time.monotonic()
    if me == count - 1:
        gang.fail("failing", ValueError("disk full"))
    else:
        with pytest.raises(BarrierFailed, match=f"process {count - 1} reported ValueError: disk full"):
            gang.barrier("failing", timeout_s=60)
        print(f"told of a failure after ms {(time.monotonic() - began) * 1e3:.1f}")
        multihost.sync_global_processes("all but the last", processes=range(count - 1))  # so that they come at one time
        with pytest.raises(BarrierTimeout) as caught:
            gang.barrier("lacking", timeout_s=1)
        assert caught.value.missing == (count - 1,)
        with pytest.raises(BarrierTimeout) as caught:
            multihost.sync_global_processes("lacking too", timeout=0.3)
        assert count - 1 in caught.value.missing  # and those that came later than that, on a busy machine

    def wait_cancelled() -> None:
        with pytest.raises(BarrierCancelled, match="process 0 gave it up: an emergency supersedes it"):
            gang.barrier("cancelled", timeout_s=60)

    if me < count - 1:  # the last never comes: the wait would not end by itself
        waiting = threading.Thread(target=wait_cancelled)
        waiting.start()
        if me == 0:
            assert gang.cancel("cancelled", "an emergency supersedes it")
        waiting.join(60)
        assert not waiting.is_alive()
    multihost.sync_global_processes("end")


def broadcast() -> None:
    """A pytree from any process to all, or to some, bit for bit."""
    import jax

    here().initialize_jax()
    me, count = multihost.process_index(), multihost.process_count()

    def tree(of: int) -> dict[str, Any]:
        return {
            "f32": np.array([of, -0.0, np.inf], np.float32),
            "bf16": jax.numpy.full((3,), of, jax.numpy.bfloat16),
            "bool": np.array([True, False, of % 2 == 0]),
            "i64": np.array(2**40 + of),  # JAX's own would cut it to 32 bits
            "f64": np.array([1 / 3 + of]),
            "empty": np.zeros((0, 4), np.int8),
            "number": of,
            "key": jax.random.key(of),
        }

    def check(found: dict[str, Any], of: int) -> None:
        for name, expected in tree(of).items():
            if name == "key":
                assert jax.random.key_data(found[name]).tolist() == jax.random.key_data(expected).tolist()
            else:
                expected = np.asarray(expected)
                assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape), name
                assert found[name].tobytes() == expected.tobytes(), name

    for source in range(count):
        check(multihost.broadcast_one_to_all(tree(me), is_source=me == source), of=source)
    check(multihost.broadcast_one_to_all(tree(me)), of=0)
    some = {1, count - 1}
    if me in some:
        check(multihost.broadcast_one_to_all(tree(me), processes=some), of=1)

    # More than the store is for: through the devices, in pieces; and it is what JAX's own gives.
    multihost.utilities.PIECE_BYTES = 100_004
    rng = np.random.default_rng(me)
    big = {"odd": rng.integers(0, 255, 100_001, np.uint8), "w": rng.standard_normal((300, 211)).astype(np.float32)}
    found = multihost.broadcast_one_to_all(big, is_source=me == count - 1)
    last = np.random.default_rng(count - 1)
    assert found["odd"].tobytes() == last.integers(0, 255, 100_001, np.uint8).tobytes()
    assert found["w"].tobytes() == last.standard_normal((300, 211)).astype(np.float32).tobytes()
    from jax.experimental import multihost_utils

    reference = multihost_utils.broadcast_one_to_all(big["w"], is_source=me == count - 1)
    np.testing.assert_array_equal(found["w"], reference)
    if me in some:
        found = multihost.broadcast_one_to_all(big, is_source=me == 1, processes=some)
        assert found["odd"].tobytes() == np.random.default_rng(1).integers(0, 255, 100_001, np.uint8).tobytes()

    # What would hang or add up is refused, in all processes.
    with pytest.raises(AgreementError, match="exactly one process, found none"):
        multihost.broadcast_one_to_all(1, is_source=False)
    with pytest.raises(AgreementError, match="exactly one process, found processes 0, 1, 2"):
        multihost.broadcast_one_to_all(1, is_source=True)
    differing = {"w": np.zeros(2 if me == 2 else 3)}
    here_too = (
        r"; in this one, expected \['w'\]: float64\[3\], found \['w'\]: float64\[2\]" if me == 2 else "process 2$"
    )
    with pytest.raises(AgreementError, match=here_too):
        multihost.broadcast_one_to_all(differing)
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spread = jax.jit(
        lambda: jax.numpy.zeros(jax.device_count()),
        out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")),
    )()
    with pytest.raises(TypeError, match="that this process holds wholly"):
        multihost.broadcast_one_to_all([spread])
    multihost.sync_global_processes("done")  # whoever came last to a meeting has removed its keys by now
    left = multihost.JaxStore(multihost.global_state.client, "gracepoint/everybody").list("local")
    assert left == {}
    multihost.sync_global_processes("end")
    if me != count - 1:  # the last one never comes to this one
        with pytest.raises(BarrierTimeout) as caught:
            multihost.broadcast_one_to_all(tree(me), timeout=1)
        assert count - 1 in caught.value.missing


def _visible_devices() -> set[str]:
    """Returns the devices that JAX lets this process use on GPUs, for each kind of GPU that it knows."""
    from jax._src import xla_bridge

    return {str(flag.value) for flag in (xla_bridge.CUDA_VISIBLE_DEVICES, xla_bridge._ROCM_VISIBLE_DEVICES)}


def state() -> None:
    """Joining as a JobSet's pods do, late ones too; what may not be done twice; leaving."""
    place, address = here(), here().coordinator
    me = place.process_index
    if me == 0:
        time.sleep(0.3)  # the others knock at a door that is not there yet
    with pytest.raises(ValueError, match="coordinator_address"):
        multihost.initialize(num_processes=2, process_id=me, cluster_detection_method="deactivate")
    environ = {
        "JAX_COORDINATOR_ADDRESS": address,
        Env.JOBSET_NAME: "gpt",
        Env.JOB_INDEX: str(me),
        Env.PODS_PER_JOB: "1",
        "JOB_COMPLETION_INDEX": "0",
    }
    with pytest.raises(CannotKnow):
        multihost.reached_preemption(0)
    multihost.initialize(
        num_processes=2,
        local_device_ids=0,
        environ=environ,
        initialization_timeout=60,
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=60,
        coordinator_bind_address="[::]:" + address.rpartition(":")[2],
        recoverable=sys.argv[2] == "recoverable",
    )
    state = multihost.global_state
    assert state.initialized
    assert (state.process_id, state.num_processes, state.coordinator_address) == (me, 2, address)
    assert (state.service is not None) == (me == 0)
    assert state.preemption_sync_manager is not None
    with pytest.raises(ClusterError, match="is initialised already"):
        state.initialize_preemption_sync_manager()
    with pytest.raises(RuntimeError, match="joined before"):  # JAX raises RuntimeError too
        multihost.initialize(address, 2, me)
    assert multihost.join(Settings(process_count=2)) is False  # attach() adopts it
    assert multihost.process_index() == me
    assert _visible_devices() == {"0"}
    assert multihost.reached_preemption(1) is False  # JAX's own answers, where there is no session
    if me == 0:
        multihost.raise_jax_notice(state.client)
    for step in range(2, 10_000):
        if multihost.reached_preemption(step):
            break
        time.sleep(0.001)
    assert len(set(joined_cluster().gang.gather("preempted at", str(step), timeout_s=60))) == 1

    # Who leaves too early learns whom it has left behind, and nobody is killed.
    if me == 0:
        with pytest.raises(BarrierTimeout, match="process 0 gave up after 0.2 s, without process 1 of 2"):
            multihost.shutdown(timeout_s=0.2)
        assert state.initialized
        joined_cluster().gang.barrier("gave up", timeout_s=60)
    else:
        joined_cluster().gang.barrier("gave up", timeout_s=60)
        with pytest.raises(BarrierTimeout, match="process 0 gave up"):
            multihost.shutdown()
    multihost.shutdown()
    assert not state.initialized
    assert state.service is None
    assert state.preemption_sync_manager is None
    multihost.shutdown()


def left_to_jax() -> None:
    """What is not in the arguments and not in a JobSet's pod is looked up by JAX, each process's devices, too."""
    place = here()
    me, count = place.process_index, place.process_count
    if sys.argv[2] == "Slurm":
        os.environ |= {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(count),
            "SLURM_PROCID": str(me),
            "SLURM_LOCALID": str(me),
            "JAX_COORDINATOR_PORT": place.coordinator.rpartition(":")[2],
        }
        multihost.initialize(initialization_timeout=60)
    else:
        os.environ |= {
            "JAX_COORDINATOR_ADDRESS": place.coordinator,
            "JAX_COORDINATOR_BIND_ADDRESS": place.coordinator,
            "JAX_LOCAL_DEVICE_IDS": str(me),
        }
        multihost.initialize(num_processes=count, process_id=me, initialization_timeout=60)
    assert (multihost.global_state.process_id, multihost.global_state.num_processes) == (me, count)
    assert _visible_devices() == {str(me)}
    multihost.shutdown()


def one_id_twice() -> None:
    """Processes 1 and 2 both say that they are process 1."""
    place = here()
    process_id = min(place.process_index, 1)
    multihost.initialize(
        place.coordinator, 3, process_id, initialization_timeout=3, cluster_detection_method="deactivate"
    )
    print("joined")


def unpublished() -> None:
    """The name of process 0 cannot be looked up in its own pod yet, only in the other."""
    me = here().process_index
    host = "not-yet-published.invalid" if me == 0 else "localhost"
    address = f"{host}:{here().coordinator.rpartition(':')[2]}"
    multihost.initialize(address, here().process_count, me, initialization_timeout=60)
    assert multihost.global_state.coordinator_address == address
    multihost.sync_global_processes("joined", timeout=60)


def at_exit() -> None:
    """A process that ends without shutdown() leaves as well."""
    place = here()
    multihost.initialize(
        place.coordinator, place.process_count, place.process_index, cluster_detection_method="deactivate"
    )


def permuted() -> None:
    """Pod, coordination service and JAX number the processes differently; a preemption is survived all the same."""
    import jax
    from jax._src import distributed

    import gracepoint

    place = here()
    count, service_id = place.process_count, place.process_index
    pod_index, process_index = (service_id + 1) % count, (service_id + 2) % count
    place.initialize_jax()
    # JAX numbers processes by their devices where the platform does (TPU); the CPU's number is the one given here.
    distributed.global_state.process_id = process_index
    jax.devices()
    distributed.global_state.process_id = service_id
    assert jax.process_index() == process_index

    settings = dataclasses.replace(
        Settings(), process_count=count, pods_per_job=count, completion_index=pod_index, pod_name=f"gpt-w-0-{pod_index}"
    )
    meeting = multihost.meet(settings)
    expected = multihost.ProcessNames(process_index, service_id, f"gpt-w-0-{pod_index}")
    assert meeting.me == meeting.members[process_index] == expected
    assert [m.process_index for m in meeting.members] == list(range(count))
    assert multihost.process_index() == process_index != multihost.global_state.process_id == service_id

    # Everything speaks of jax.process_index().
    gang = meeting.gang
    assert gang.gather("g", f"v{process_index}", timeout_s=60) == [f"v{i}" for i in range(count)]
    some, source = {0, 2}, 2
    if process_index in some:
        word = "word" if process_index == source else None
        assert gang.broadcast("b", word, timeout_s=60, source=source, processes=some) == "word"
    found = multihost.broadcast_one_to_all(np.array(process_index), is_source=process_index == 1)
    assert found == 1
    if process_index != 1:
        absent = meeting.members[1].pod_name
        with pytest.raises(BarrierTimeout, match=rf"without process 1 \({absent}\) of {count}"):
            gang.barrier("lacking", timeout_s=3)
    multihost.sync_global_processes("met")

    session = gracepoint.attach(Path(sys.argv[2]))
    if process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    for step in range(1, 10_000):
        session.step(step, {"w": np.full(4, step)})
        time.sleep(0.01)
    raise AssertionError("the SIGTERM was never heard of")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    gc.unfreeze()
    globals()[sys.argv[1]]()
    print("done")
