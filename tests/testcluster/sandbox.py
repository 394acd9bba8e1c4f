"""A machine made of namespaces: its own processes, mounts, network, host name and IPC.

One ``pause`` process is init of the machine. It holds the namespaces and carries the machine's name as its
argument, by which it is found again by any later process: nothing is recorded that could go stale. Killing
it makes the kernel kill every process of the machine and drop its mounts and network devices, all at once
and without a chance for any of them to say goodbye. Sandboxes nest: what is made inside another one ends
with it.

Processes: init (double-forked, so that it outlives the Python process that made it) and whatever ``spawn``
starts. Threads: none.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.testcluster.api import ClusterError
from tests.testcluster.shell import run, wait_until

#: How long a process may take until it is stopped.
_STOPPED_S = 20.0
_SPACES = ("pid", "mount", "net", "uts", "ipc")


@dataclass(frozen=True)
class Sandbox:
    """A machine made of namespaces; ``name`` is unique on this host."""

    name: str

    @classmethod
    def create(cls, pause: Path, name: str, *, inside: Sandbox | None = None) -> Sandbox:
        """Start a machine.

        Args:
            pause: The init program.
            name: Its name; must be unique on this host.
            inside: The machine that it ends with.
        """
        sandbox = cls(name)
        argv: list[str] = ["setsid", "--fork"]
        argv += ["unshare", *(f"--{space}" for space in _SPACES), "--fork", "--kill-child=SIGKILL"]
        argv += ["--mount-proc", "--propagation=private", str(pause), name]
        detached(inside.enter(argv) if inside else argv, Path("/dev/null"))
        wait_until(f"the namespaces of {name}", lambda: sandbox.pid is not None, timeout_s=10, every_s=0.02)
        return sandbox

    @property
    def pid(self) -> int | None:
        """Process id of init as this host sees it, or None when the machine is gone."""
        for pid, argv in processes():
            if len(argv) == 2 and argv[1] == self.name and Path(argv[0]).name == "pause":
                return pid
        return None

    def enter(self, argv: Sequence[str | Path], *, spaces: Sequence[str] = _SPACES) -> list[str]:
        """The command that runs ``argv`` in this machine, or only in some of its namespaces.

        Raises:
            ClusterError: The machine is gone.
        """
        pid = self.pid
        if pid is None:
            raise ClusterError(f"{self.name} is not running")
        return ["nsenter", f"--target={pid}", *(f"--{space}" for space in spaces), "--", *map(str, argv)]

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        timeout_s: float = 60,
        stdin: str | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this machine to its end; raises as ``shell.run`` does."""
        return run(self.enter(argv), timeout_s=timeout_s, stdin=stdin, check=check)

    def script(self, text: str, *, timeout_s: float = 30) -> None:
        """Run a shell script in this machine, which stops at the first command that fails."""
        self.run(["sh", "-euc", text], timeout_s=timeout_s)

    def spawn(self, argv: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None) -> None:
        """Start a program in this machine that lives until it ends by itself or with the machine.

        Args:
            argv: The program.
            log: The file that gets all its output.
            env: Variables to set besides the present ones.
        """
        setting = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
        detached(["setsid", "--fork", *self.enter([*setting, *argv])], log)

    def kill(self, *, timeout_s: float = 20) -> None:
        """End the machine and everything in it; returns when the kernel has reaped the last process.

        Raises:
            ClusterError: Something in it cannot be killed.
        """
        pid = self.pid
        if pid is None:
            return
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if self.pid == pid:  # asked again: the handle can only mean the process that has our name now
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                raise ClusterError(f"{self.name} (process {pid}) is still there {timeout_s:g} s after SIGKILL")
        finally:
            os.close(handle)


def processes() -> list[tuple[int, list[str]]]:
    """All processes of this host with their command lines."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path("/proc", entry, "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            except OSError:
                continue
            found.append((int(entry), [os.fsdecode(word) for word in words]))
    return found


def with_argument(argument: str, *, waiting: bool = True) -> list[int]:
    """The process of a machine with that argument, as this host sees it, after the nsenter that waits for it.

    Args:
        argument: One of its arguments, as a whole.
        waiting: Whether the nsenter is wanted, too.
    """
    found = [(argv[0] != "nsenter", pid) for pid, argv in processes() if argument in argv]
    return [pid for runs, pid in sorted(found) if waiting or runs]


def stop_process(argument: str) -> None:
    """Stop the process of a machine with that argument. ``continue_process`` must follow.

    The nsenter that waits for it stops itself as soon as it sees that, as a shell's job would; and while it is stopped
    it reaps nobody, so that the machine could not end.
    """
    waiting, pid = with_argument(argument)
    os.kill(pid, signal.SIGSTOP)
    state = Path(f"/proc/{waiting}/stat")
    wait_until(
        f"the process with {argument} to be stopped",
        lambda: state.read_text().rpartition(")")[2].split()[0] == "T",
        timeout_s=_STOPPED_S,
        every_s=0.02,
    )


def continue_process(argument: str) -> None:
    """Let a process go on that ``stop_process`` has stopped."""
    for pid in with_argument(argument):
        os.kill(pid, signal.SIGCONT)


def detached(argv: Sequence[str], log: Path, *, cwd: Path = Path("/"), env: Mapping[str, str] | None = None) -> None:
    """Run ``setsid --fork ...``, which returns at once: what it starts is nobody's child and outlives this process.

    Args:
        argv: The command.
        log: The file that gets all its output.
        cwd: Where it runs.
        env: Variables to set besides the present ones.
    """
    variables = {**os.environ, **env} if env else None
    with log.open("ab") as out:
        result = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=variables,
            timeout=20,
            check=False,
        )
    if result.returncode != 0:
        raise ClusterError(f"cannot start {shlex.join(argv)}: exit status {result.returncode}")
