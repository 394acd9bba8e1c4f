"""How a request to a snapshot server, or its answer, stands on the wire: a prefix, and a header that is a JSON object.

``gracepoint.snapshots.exchange`` says what the requests are. Pure.
"""

from __future__ import annotations

import json
import struct

from gracepoint.errors import WireError

MAGIC = b"GPS1"
#: The magic number and the length of the header, in bytes.
PREFIX = struct.Struct(">4sI")
#: The longest header, in bytes. A hello with the longest capability fits.
LONGEST_HEADER_BYTES = 8192


def frame(**header: object) -> bytes:
    """Returns a frame with this header."""
    data = json.dumps(header, separators=(",", ":")).encode()
    if len(data) > LONGEST_HEADER_BYTES:
        raise WireError(f"expected a header of up to {LONGEST_HEADER_BYTES} bytes, found {len(data)}")
    return PREFIX.pack(MAGIC, len(data)) + data
