"""The known objects, indexed by how they are looked up: pods by node and by workload, marks, devices, Evictions.

``cluster_cache`` changes the indexes, and the other modules of ``cache`` read them. ``recording`` also uses
``first_seen``. The indexes call ``model``, ``signals`` and ``preemption_store``.
"""
