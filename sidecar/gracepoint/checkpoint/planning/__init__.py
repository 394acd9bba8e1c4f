"""The chunk grid of each array, and the process that writes each chunk.

These are pure functions of shapes and shardings, with the same result in every process. Only ``chunks.local_shards``
looks at arrays: at the shards that this process holds. The packages that save and restore call this one. It calls
``format``, and checksums of ``storage``.
"""
