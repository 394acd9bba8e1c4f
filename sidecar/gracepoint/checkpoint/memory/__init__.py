"""Host memory: aligned allocations, parallel copies, and bounds on how much is in use.

The lowest room: it knows arrays and bytes, and nothing of checkpoints. Every room of the engine may call it; it calls
only numpy and the operating system.
"""
