"""One save from the state to the commit, in the background or at once, and when the next one is due.

The checkpointers call it. It calls ``transfer``, ``writing`` and ``steps``. ``save_executor`` is the one place that
knows which save is under way.
"""
