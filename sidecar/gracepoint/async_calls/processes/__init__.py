"""Worker processes: their start, calls on the way to them, and their end after the death of the trainer.

The callers and ``keeper`` call it, and so does the checkpoint engine, for saves that a worker writes. It needs the
standard library alone.
"""
