"""Worker processes: their start, calls on the way to them, and their end after the death of the trainer.

The callers and ``keeper`` call it. So do the checkpoint engine, for saves that a worker writes, and
``preemption.stall_detection``, for a worker that looks at the training process. It needs the standard library alone.
"""
