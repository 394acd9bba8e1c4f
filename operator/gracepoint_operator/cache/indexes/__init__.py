"""The known objects, by what is asked of them: pods by node and by workload, marks, devices, Evictions.

``cluster_cache`` changes it, and the modules beside it read it. ``first_seen`` is also used by ``recording``. It calls
``model``, ``signals`` and ``preemption_store``.
"""
