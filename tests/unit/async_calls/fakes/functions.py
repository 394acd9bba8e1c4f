"""Functions that worker processes run. They stand here because a worker imports them by name."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

kept: list[Any] = []


def write(path: str, text: str) -> None:
    Path(path).write_text(text)


def append(path: str, text: str) -> None:
    with Path(path).open("a") as out:
        out.write(text)


def write_sum(arrays: dict[str, Any], path: str) -> None:
    """Writes the sum of each array, and whether the memory is read-only."""
    Path(path).write_text(" ".join(f"{k} {v.dtype} {v.sum()} {not v.flags.writeable}" for k, v in arrays.items()))


def write_mapped_bytes(arrays: Any, path: str) -> None:
    """Writes how many bytes of the calls' shared memory are mapped, before anybody has looked at them."""
    mapped_kib, of_a_call = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):  # the next mapping
            of_a_call = "memfd:gracepoint" in line
        elif of_a_call and name == "Rss:":
            mapped_kib += int(words[0])
    Path(path).write_text(str(mapped_kib << 10))


def keep(array: Any) -> None:
    kept.append(array)


def write_kept_sum(path: str) -> None:
    Path(path).write_text(str(sum(float(each.sum()) for each in kept)))


def fail(message: str) -> None:
    raise ValueError(message)


def leave() -> None:
    sys.exit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: str) -> None:
    """Waits until a file exists."""
    limit_s = time.monotonic() + 60
    while not Path(path).exists():
        if time.monotonic() > limit_s:
            raise TimeoutError(f"nobody made {path} within 60 s")
        time.sleep(0.005)


def wait_and_append(path: str, out: str, text: str) -> None:
    wait_for(path)
    append(out, text)


def write_facts(path: str) -> None:
    """Writes what a worker may not have inherited."""
    facts = {
        "jax": "jax" in sys.modules,
        "numpy": "numpy" in sys.modules,
        "platforms": os.environ.get("JAX_PLATFORMS"),
        "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "sigterm ignored": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        "own session": os.getsid(0) == os.getpid(),
        "nice": os.nice(0),
        "policy": os.sched_getscheduler(0),
        "session's nice": _session_nice(),
    }
    Path(path).write_text(repr(facts))


def _session_nice() -> int:
    autogroup = Path("/proc/self/autogroup")
    return int(autogroup.read_text().split()[-1]) if autogroup.exists() else 10


def log(text: str) -> None:
    logging.getLogger(__name__).info(text)
