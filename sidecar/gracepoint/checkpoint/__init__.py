"""The checkpoint engine: parallel sharded saves in Orbax's layout, atomic commit, salvage, restore.

From the outside in: ``checkpointer`` (what the session holds), ``save`` and ``restore`` (one of each, over
the gang), ``snapshot``, ``writer`` and ``reader`` (the bytes), ``commit``, ``catalog`` and ``retention``
(folders), ``plan``, ``tree``, ``target``, ``records``, ``host_state`` and ``layout`` (data).
docs/checkpoint-format.md says what is promised.
"""

from gracepoint.checkpoint.checkpointer import Checkpointer, Saved, SaveStats
from gracepoint.checkpoint.restore import Restored

__all__ = ["Checkpointer", "Restored", "SaveStats", "Saved"]
