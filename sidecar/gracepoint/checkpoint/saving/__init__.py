"""Runs a save from the state to the commit, in the background or while the caller waits, and decides when one is due.

The checkpointers call it, and ``loading`` calls ``operation``. It calls ``transfer``, ``writing`` and ``steps``. Only
``save_executor`` knows which save is under way.
"""
