"""Restores a state: which step, what is wanted of each leaf, and where its values are placed.

The checkpointers and ``handlers`` call it. It calls ``reading``, ``steps`` and ``format``.
"""
