"""Where bytes are kept: files written and read durably, with checksums.

The only room of the engine that does file I/O. Every room above may call it; it calls ``memory`` alone.
"""
