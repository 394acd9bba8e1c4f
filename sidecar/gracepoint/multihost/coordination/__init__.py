"""The key-value store of the JAX cluster, and what needs it alone: barriers, decisions of one for all, stalls.

The rest of ``multihost`` calls it, and ``preemption`` and ``session`` call ``stalls``. It calls ``multihost.naming``
and JAX's client of the store.
"""
