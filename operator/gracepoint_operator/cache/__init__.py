"""What this replica knows of the cluster: the one place of state, rebuilt from the watches.

Owned by the controller's event loop. The rooms that decide, tell and record read it; it calls ``model``, ``signals``
and ``kube``.
"""
