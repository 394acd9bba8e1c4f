"""How one leaf is restored: what was asked for, which stored leaf it comes from, and where its values are placed.

The other modules of ``loading``, ``handlers`` and ``checkpointers`` call it. It calls ``replicas``, ``reading`` and
``planning``.
"""
