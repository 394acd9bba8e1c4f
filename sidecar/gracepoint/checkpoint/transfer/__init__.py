"""Copies values from device memory to host memory, and holds a snapshot of the state in host memory.

``saving`` and ``handlers`` call it. It calls ``planning``, ``format``, ``storage`` and ``memory``.
"""
