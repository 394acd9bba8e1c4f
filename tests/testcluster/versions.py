"""Versions of what is not a Go module; those stand in ``parts/*/go.mod``."""

DEBIAN_SUITE = "bookworm"
"""The Debian release of the base image; its Python is the one that images run."""

PYTHON_VERSION = "3.11"
"""The Python of that release."""

GLIBC_MINOR = 36
"""glibc 2.x of that release: wheels built for an older one run on it."""
