"""The layout and encoding of a checkpoint: names, metadata files, manifests, and the types and chunks of arrays.

Every package above may call it. It calls ``storage`` to read and write small files. It starts no threads.
"""
