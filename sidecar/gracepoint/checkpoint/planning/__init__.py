"""Who writes what: the chunk grid of each array, and the process that writes each chunk.

Pure functions of shapes and shardings, computed alike in every process. The rooms that save and restore call them;
they call ``format`` alone.
"""
