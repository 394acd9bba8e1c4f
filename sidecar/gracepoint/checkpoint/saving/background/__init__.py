"""Saves in the background: which one is under way, how far it is, and how it is stopped.

The checkpointers call ``save_executor``, the one place that knows which save is under way. It calls ``operation``,
``process_part`` and ``transfer``.
"""
