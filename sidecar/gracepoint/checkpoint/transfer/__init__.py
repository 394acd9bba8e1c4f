"""Copies values from device memory to host memory, and holds a snapshot of the state in host memory.

``writing`` and ``saving`` call it. It calls ``planning``, ``format`` and ``memory``.
"""
