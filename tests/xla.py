"""How XLA compiles for tests: programs so small that optimizing them takes longer than running them."""

from importlib.metadata import version

# Newer versions of JAX do not know the second flag, and XLA ends the process at a flag that it does not know.
_HAS_FUSION_EMITTERS = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
FLAGS = "--xla_backend_optimization_level=0" + " --xla_cpu_use_fusion_emitters=false" * _HAS_FUSION_EMITTERS
