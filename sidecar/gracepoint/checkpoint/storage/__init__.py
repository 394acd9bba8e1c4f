"""Stores of bytes: files are written durably and read, with checksums.

This is the only package of the engine that does file I/O. Every package above may call it. It calls only ``memory``.
"""
