"""The checksum of everything that is written, sent and read: CRC-32, as in zlib, gzip and PNG.

Intel's ISA-L computes it at the speed of memory, and releases the GIL. The extra ``gracepoint[jax]`` installs it. On a
platform without ISA-L, zlib is used, which is a fifth as fast.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
