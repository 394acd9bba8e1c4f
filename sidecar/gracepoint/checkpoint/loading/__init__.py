"""Restores a state: chooses the step, decides how each leaf is restored, and places its values on devices.

The session, the checkpointers, ``handlers`` and ``metadata`` call it. It calls ``reading``, ``steps`` and ``format``.
"""
