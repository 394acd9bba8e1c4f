"""Restores a state: chooses the step, decides how each leaf is restored, and places its values on devices.

The checkpointers and ``handlers`` call it. It calls ``reading``, ``steps`` and ``format``.
"""
