"""Trains a small model on a cluster, takes one of its nodes away, and proves that nothing was lost.

Run it with ``python -m demo``. Tests and benchmarks play with the same parts:

* ``install``: images, operator, namespaces.
* ``training``: ``apply_policy``, ``TrainingRun`` (start, look, wait, compare).
* ``nodes``: the taint that announces a node's end.
* ``records``, ``timeline``: pure reading and comparing of what a run left.
"""
