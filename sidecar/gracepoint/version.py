"""The library's version, where every module may read it. `make generate` writes it: pyproject.toml has it."""

__version__ = "0.3.0"
