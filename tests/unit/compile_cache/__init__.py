"""Unit tests of ``gracepoint.compile_cache``."""
