"""Benchmarks, each a module: ``python -m benchmarks.NAME``. They measure; tests are elsewhere."""
