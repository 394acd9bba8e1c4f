"""The errors of requests to the API server, and how its answers are decoded.

KubeError
├── NotFound        404: the object, or its whole kind, does not exist
├── Conflict        409 on a write: somebody else wrote in between
│   └── AlreadyExists   409 on a create
├── Refused         any other 4xx: trying again does not help
└── Unavailable     5xx, 429, timeouts, broken connections: trying again may help
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, cast

import pydantic_core
import urllib3.exceptions
from kubernetes.client.exceptions import ApiException
from pydantic_core import core_schema

JsonObject = dict[str, Any]


class KubeError(Exception):
    """A request to the API server failed."""


class NotFound(KubeError):
    """The object, or its whole kind, does not exist."""


class Conflict(KubeError):
    """Another client wrote the object in between."""


class AlreadyExists(Conflict):
    """An object of that name already exists."""


class Refused(KubeError):
    """The API server refuses the request; the same request will be refused again."""


class Unavailable(KubeError):
    """The API server could not be reached or was busy; the same request may succeed later."""


def answered(
    what: str, call: functools.partial[Any], decode: Callable[[bytes], Any], read: Callable[[JsonObject, int], Any]
) -> Any:
    """Makes the call, reads the answer and translates errors. Runs in a thread of the pool."""
    try:
        data = call().data
        return read(cast(JsonObject, decode(data)), len(data))
    except ApiException as error:
        raise of_status(what, error) from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError, RecursionError) as error:
        raise Unavailable(f"{what}: {type(error).__name__}: {error}") from error


def decoded(data: bytes) -> Any:
    """Decodes JSON.

    pydantic's parser takes three quarters of the time of Python's. It refuses what Python's accepts, such as half of a
    surrogate pair, which one object of a list may have.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return pydantic_core.from_json(data, cache_strings="keys")
    except ValueError:
        return json.loads(data)


def _texts(*names: str) -> core_schema.CoreSchema:
    fields = {name: core_schema.typed_dict_field(core_schema.str_schema(), required=False) for name in names}
    return core_schema.typed_dict_schema(fields)


def _objects(**fields: core_schema.CoreSchema) -> core_schema.CoreSchema:
    return core_schema.typed_dict_schema({name: core_schema.typed_dict_field(kind) for name, kind in fields.items()})


_VERSIONS = pydantic_core.SchemaValidator(
    _objects(
        metadata=_texts("resourceVersion", "continue"),
        items=core_schema.list_schema(_objects(metadata=_texts("uid", "resourceVersion"))),
    )
)


def decoded_versions(data: bytes) -> Any:
    """Decodes a list. Of each object only UID and version are kept. It takes a fifth of the time of ``decoded``.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return _VERSIONS.validate_json(data)
    except ValueError:
        return decoded(data)


def of_status(what: str, error: ApiException) -> KubeError:
    """Translates an answer of the API server that is an error. ``what``: the request."""
    status = int(error.status or 0)
    message = f"{what}: HTTP {status} {error.reason}: {_message(error.body)}"
    if status == 404:
        return NotFound(message)
    if status == 409:
        return Conflict(message)
    if 400 <= status < 500 and status != 429:
        return Refused(message)
    return Unavailable(message)


def _message(body: str | bytes | None) -> str:
    """Returns the API server's own message if the body is a Status object, or else the body itself."""
    try:
        return str(json.loads(body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return repr((body or b"")[:200])
