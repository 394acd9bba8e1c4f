"""Lists objects of the API server where a watch is not enough: at start, now and then, and after gaps.

The controller, the reconciler, ``health``, the watches and ``channel`` call it. It calls ``cluster_cache`` and
``kube``.
"""
