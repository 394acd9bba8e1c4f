"""Stores of bytes: files are written durably and read, with checksums.

This is the only package of the checkpoint engine that does file I/O. Every package above may call it. Of the engine, it
calls only ``memory``.
"""
