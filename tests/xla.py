"""How XLA compiles for tests: programs so small that optimizing them takes longer than running them."""

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
