"""The GPU that some tests run on too, where there is one.

The CPU stays JAX's default there: only tests that ask for the GPU's devices use them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

#: Why a test is skipped; the one skip that CI takes, whose machines have none.
NO_GPU = "no GPU here: run on the CPU's devices only"


def jax_platforms() -> str:
    """Returns what ``JAX_PLATFORMS`` should be: JAX refuses to start where it names one that is not there."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    return "cpu,cuda" if plugin and Path("/dev/nvidiactl").exists() else "cpu"


def has_gpu() -> bool:
    return "cuda" in jax_platforms()
