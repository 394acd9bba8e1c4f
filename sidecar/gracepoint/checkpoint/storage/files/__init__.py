"""Checkpoints in file systems: files and folders, mounts, and the page cache.

``storage_path`` chooses it for ``file://`` and for plain paths. It implements ``storage.backend``, and writes with
``storage.direct_io``.
"""
