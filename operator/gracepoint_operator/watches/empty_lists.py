"""Lets kopf begin its watches without a list of all objects.

kopf lists a kind only to learn the resourceVersion after which its watch begins, and keeps some kilobytes for each
object that it was shown. The controller lists the objects itself (``cache.listing``): page by page, after the watch has
its version. So kopf's own lists ask for a name that no object has. They are empty, and have a version all the same.

If only some namespaces are watched, kopf itself learns from the list of namespaces which of them exist. So that list is
left as it is.
"""

from __future__ import annotations

from collections.abc import Collection

import aiohttp

from gracepoint_operator.kube import kinds
from gracepoint_operator.watches.handlers import kind_at

#: No name of an object begins with a dash.
_NOTHING = "metadata.name=-"


class EmptyLists:
    """A middleware of kopf's session.

    Args:
        watched: The kinds that are watched with the session.
        namespaces: The namespaces that are watched. Empty: all.
    """

    def __init__(self, watched: Collection[kinds.Kind], namespaces: Collection[str]) -> None:
        self._emptied = [kind for kind in watched if not (namespaces and kind is kinds.NAMESPACES)]

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        url = request.url
        if request.method == "GET" and "watch" not in url.query and kind_at(url.path, self._emptied) is not None:
            request.url = url.update_query(fieldSelector=_NOTHING)
        return await handler(request)
