"""Reads the bodies of webhook calls with limits on size, time, and the number of large bodies at once.

Runs on the server's event loop. A call that waits for its turn does not delay other calls. Its turn ends with its
answer, because the object is in memory until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web

#: Longer than the API server waits for the slowest webhook.
_WITHIN_S = 10.0
#: JobSets and pods are usually smaller. While a larger body is handled, it may take twenty times its size in memory.
_LARGE_BYTES = 256 * 1024
_LARGE_AT_ONCE = 2


class RequestBodies:
    """Reads bodies.

    Args:
        count_refused: Called with the reason for each body that is not taken.
    """

    def __init__(self, count_refused: Callable[[str], None]) -> None:
        self._count_refused = count_refused
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    @contextlib.asynccontextmanager
    async def read(self, http: web.Request, at_most_bytes: int) -> AsyncIterator[bytes]:
        """Reads the body. The turn of a large body lasts until the context ends.

        Raises:
            web.HTTPRequestEntityTooLarge: It has more than ``at_most_bytes``.
            web.HTTPRequestTimeout: The body, or its turn, did not come within ``_WITHIN_S``.
        """
        length = http.content_length
        if length is not None and length > at_most_bytes:
            self._count_refused("too_large")
            raise web.HTTPRequestEntityTooLarge(at_most_bytes, length)
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(_WITHIN_S):
                    if length is None or length > _LARGE_BYTES:
                        await turn.enter_async_context(self._large)
                    body = await http.clone(client_max_size=at_most_bytes).read()
            except web.HTTPRequestEntityTooLarge:
                self._count_refused("too_large")
                raise
            except TimeoutError as error:
                self._count_refused("too_slow")
                message = f"the body: not here, or not looked at, within {_WITHIN_S:.0f} s; send it again"
                raise web.HTTPRequestTimeout(text=message) from error
            yield body
