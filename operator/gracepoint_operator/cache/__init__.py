"""What this replica knows about the cluster. All of its state can be rebuilt from the watches.

The controller's event loop owns it. The packages that decide, send notices and write records read it. It calls
``model``, ``signals`` and ``kube``.
"""
