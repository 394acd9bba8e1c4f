"""A buffer that notes whether its memory is used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.storage.buffers import Buffer


class WatchedBuffer(Buffer):
    """``used``: True once anybody asked for the memory."""

    used = False

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        self.used = True
        return super().bytes
