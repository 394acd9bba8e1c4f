"""Import and work on a laptop need nothing that Linux alone has: a process that lacks it trains, saves and restores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import xla

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
#: Takes away what macOS does not have, before the library is imported.
_LIKE_MACOS = """
import mmap, os, socket, sys, time
import jax, numpy, orbax.checkpoint, tensorstore  # these are built for the system
missing = {
    os: ("O_DIRECT SCHED_BATCH SCHED_IDLE copy_file_range eventfd fdatasync getrandom getxattr listxattr memfd_create"
         " pidfd_open pipe2 posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity sched_setscheduler"),
    mmap: "MAP_POPULATE MADV_HUGEPAGE MADV_DONTDUMP",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
    socket: "SOCK_SEQPACKET TCP_USER_TIMEOUT TCP_KEEPIDLE SO_PEERCRED",
}
for module, names in missing.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sysconf, stat, setpriority = os.sysconf, os.stat, os.setpriority

def known(name):
    if name == "SC_AVPHYS_PAGES":
        raise ValueError("unrecognized configuration name")
    return sysconf(name)

def of_linux(path):
    return isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith(("/proc/", "/sys/"))

def stat_like_macos(path, **options):
    if of_linux(path):
        raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
    return stat(path, **options)

def of_a_process(which, who, priority):
    assert who in (0, os.getpid()), f"the priority of process {who} is changed"
    setpriority(which, who, priority)

def hook(event, arguments):
    if event == "open" and of_linux(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", os.fsdecode(arguments[0]))

os.sysconf, os.stat, os.setpriority = known, stat_like_macos, of_a_process
sys.addaudithook(hook)
sys.platform = "darwin"
"""


def run(program: str, folder: Path) -> str:
    """Runs a program as on macOS. Returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRACEPOINT_")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": xla.FLAGS}
    done = subprocess.run(
        [sys.executable, "-c", _LIKE_MACOS + program, str(folder)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_loop_on_a_laptop_saves_and_continues(tmp_path: Path) -> None:
    said = run(
        """
import gracepoint, jax.numpy as jnp, numpy as np
from gracepoint.checkpoint import verify
root = sys.argv[1] + "/run"
init = lambda: {"w": jnp.zeros((600, 600)), "n": jnp.int32(0)}
for until in (4, 7):
    data = {"position": 0}
    with gracepoint.attach(root, save_every_steps=2, compilation_cache="on", stall_after_s=60) as session:
        session.host_state("data", data.copy, data.update)
        train = session.compile(lambda s: {"w": s["w"] + 1, "n": s["n"] + 1}, init())
        state, step = session.restore(init=init)
        print("began at", step, float(state["w"][0, 0]), data["position"])
        while step < until:
            state, step = train(state), step + 1
            data["position"] = step
            session.step(step, state)
print(verify(root + "/6").ok)
""",
        tmp_path,
    )
    assert said.splitlines() == ["began at 0 0.0 0", "began at 4 4.0 4", "True"]


def test_a_lease_that_a_killed_process_left_is_taken_over_at_once(tmp_path: Path) -> None:
    said = run(
        """
import subprocess, gracepoint, time
from gracepoint import machine
me = machine.process_identity(os.getpid())
gone = subprocess.Popen(["true"])
gone.wait()
print(me == machine.process_identity(os.getpid()), machine.process_identity(gone.pid).endswith(":gone"))
child = os.fork()
if child == 0:
    gracepoint.attach(sys.argv[1] + "/run")
    os._exit(9)
os.waitpid(child, 0)
began_s = time.monotonic()
gracepoint.attach(sys.argv[1] + "/run").close()
print(time.monotonic() - began_s < 15)
""",
        tmp_path,
    )
    assert said.splitlines() == ["True True", "True"]


def test_checkpoints_of_trees_are_saved_as_everywhere(tmp_path: Path) -> None:
    said = run(
        """
import jax.numpy as jnp, numpy as np
from gracepoint.checkpoint import AsyncCheckpointer, CheckpointManager, restore, save
tree = {"w": jnp.arange(400_000.0), "b": np.ones(3)}
save(sys.argv[1] + "/one", tree)
print(float(restore(sys.argv[1] + "/one")["w"][-1]))
with CheckpointManager(sys.argv[1] + "/steps") as manager:
    manager.save(3, tree)
    manager.wait_until_finished()
    print(manager.all_steps(), float(manager.restore().state["w"][-1]))
""",
        tmp_path,
    )
    assert said.splitlines() == ["399999.0", "[3] 399999.0"]


@pytest.mark.parametrize(
    "call",
    [
        'gracepoint.attach(sys.argv[1], writer="worker", save_every_steps=1)',
        'gracepoint.async_calls.keeper.main(sys.argv[1] + "/keeper.sock")',
    ],
)
def test_what_needs_linux_is_refused_by_name(call: str, tmp_path: Path) -> None:
    said = run(
        f"""
import gracepoint, gracepoint.async_calls.keeper, jax.numpy as jnp
try:
    session = {call}
    session.step(1, {{"w": jnp.zeros(4)}})
except gracepoint.SettingsError as error:
    print(error)
""",
        tmp_path,
    )
    assert "this needs Linux, found darwin. Leave it out for work on a laptop" in said


def test_on_windows_the_import_names_what_to_use() -> None:
    program = "import sys; sys.platform = 'win32'; import gracepoint"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ImportError: gracepoint runs on Linux, and on macOS" in done.stderr
    assert "On Windows, use it in WSL" in done.stderr
