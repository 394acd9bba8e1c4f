"""Host memory: aligned allocations, parallel copies, and bounds on how much is in use.

This is the lowest package of the engine. It handles arrays and bytes, and knows nothing of checkpoints. Every package
of the engine may call it. It calls only numpy and the operating system.
"""
