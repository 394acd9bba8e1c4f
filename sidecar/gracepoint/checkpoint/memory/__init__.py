"""Host memory: aligned allocations, parallel copies, and bounds on how much is in use.

This is the lowest package of the checkpoint engine. It handles arrays and bytes, and knows nothing of checkpoints.
Every package of the engine may call it. It calls none of them, but modules of the library that several packages use,
and the shared memory of ``async_calls``.
"""
