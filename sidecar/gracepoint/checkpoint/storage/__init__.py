"""Stores of bytes: files are written durably and read, with checksums.

A ``StoragePath`` is a location and all that can be done there. ``posix``, ``in_memory`` and ``objects`` implement it,
and ``locations`` chooses by what a user gives.

This is the only package of the checkpoint engine that does file I/O. Every package above may call it. Of the engine, it
calls only ``memory``.
"""
