"""The environment in which JAX is imported in the test process: four CPU devices, as meshes of 2 x 2 need them.

``CONTRACT_DEVICES`` is another number for a run of the contract tests (``make test-set-mesh``).
"""

from __future__ import annotations

import os

from tests import accelerators, xla


def set_environment() -> None:
    """Sets the variables. Call it before the first import of JAX."""
    os.environ["JAX_PLATFORMS"] = accelerators.jax_platforms()
    os.environ["JAX_NUM_CPU_DEVICES"] = os.environ.get("CONTRACT_DEVICES", "4")
    os.environ["XLA_FLAGS"] = xla.FLAGS
