"""The chunk grid of each array, and the process that writes each chunk.

These are pure functions of shapes and shardings, with the same result in every process. The packages that save and
restore call them. They call only ``format``.
"""
