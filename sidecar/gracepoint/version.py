"""The library's version, where every module may read it."""

__version__ = "0.2.0"
