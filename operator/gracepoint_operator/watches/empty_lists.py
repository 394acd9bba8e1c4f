"""Lets kopf begin its watches without a list of all objects.

kopf lists a kind only to learn the resourceVersion after which its watch begins, and keeps some kilobytes for each
object that it was shown. The controller lists the objects itself (``cache.listing``): page by page, after the watch has
its version. So kopf's own lists ask for a name that no object has. They are empty, and have a version all the same.
"""

from __future__ import annotations

import aiohttp

from gracepoint_operator.watches.handlers import kind_at

#: No name of an object begins with a dash.
_NOTHING = "metadata.name=-"


async def empty_lists(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """A middleware of kopf's session."""
    url = request.url
    if request.method == "GET" and "watch" not in url.query and kind_at(url.path) is not None:
        request.url = url.update_query(fieldSelector=_NOTHING)
    return await handler(request)
