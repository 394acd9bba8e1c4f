"""The checksum of all that is written and read: CRC-32, as zlib, gzip and PNG have it.

Intel's ISA-L computes it at the speed of memory and lets other threads run; zlib, a fifth as fast, is what is left on a
platform without it. ``gracepoint[jax]`` brings the former.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
