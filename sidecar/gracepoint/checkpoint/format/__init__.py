"""What lies where in a checkpoint, and how it is encoded: names, metadata files, manifests, arrays' types and chunks.

Every room above may call it. It calls ``storage`` to read and write small files, and starts no threads.
"""
