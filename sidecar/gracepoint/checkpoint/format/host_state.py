"""Encodes the host state, which is per-process state outside of the train state, as JSON. Decoding is exact.

Plain JSON would turn tuples into lists, which ``random.setstate`` and others refuse. It has neither bytes nor arrays.
So tuples, bytes and arrays are written as objects with a special key that names their kind.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from gracepoint.checkpoint.format.array_spec import as_bytes, zarr_dtype
from gracepoint.errors import CheckpointCorrupt, CheckpointError

_TAG = "__gracepoint__"


def encode(host_state: Mapping[str, Any]) -> bytes:
    """Returns ``host_state`` as JSON.

    Args:
        host_state: Values by name: None, bool, int, float, str, bytes, numpy arrays and numbers, and lists,
            tuples and dicts (keys are str) of these.

    Raises:
        CheckpointError: A value is of another type. The message names its path.
    """
    return json.dumps({key: _encode(value, f"host_state[{key!r}]") for key, value in host_state.items()}).encode()


def decode(data: bytes | bytearray) -> dict[str, Any]:
    """Returns the host state that was passed to ``encode``.

    Raises:
        CheckpointCorrupt: ``data`` is not a result of ``encode``.
    """
    try:
        return {key: _decode(value) for key, value in json.loads(data).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"host state cannot be read: {error!r}") from error


def _encode(value: Any, path: str) -> Any:
    # Exact types: a subclass (an IntEnum, say) would come back as something else.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise CheckpointError(f"{path}: the key {key!r} is a {type(key).__name__}; expected str")
        items = {key: _encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        return {_TAG: "dict", "items": items} if _TAG in items else items
    if type(value) is bytes:
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return _encode_array(value, path)
    raise CheckpointError(
        f"{path}: cannot save a value of type {type(value).__qualname__}; expected None, bool, int, float, str, bytes, "
        "numpy arrays or lists, tuples and dicts of these (state of the model belongs into the train state)"
    )


def _encode_array(value: np.generic | np.ndarray[Any, Any], path: str) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    dtype = zarr_dtype(array.dtype)
    if dtype is None:
        raise CheckpointError(f"{path}: cannot save numpy values of dtype {array.dtype}; expected numbers")
    return {
        _TAG: "ndarray" if isinstance(value, np.ndarray) else "number",
        "dtype": dtype,
        "shape": array.shape,
        "base64": base64.b64encode(as_bytes(array)).decode(),
    }


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: _decode(item) for key, item in value.items()}
        case "dict":
            return {key: _decode(item) for key, item in value["items"].items()}
        case "tuple":
            return tuple(_decode(item) for item in value["items"])
        case "bytes":
            return base64.b64decode(value["base64"], validate=True)
        case "ndarray" | "number" as kind:
            flat = np.frombuffer(base64.b64decode(value["base64"], validate=True), np.dtype(value["dtype"]))
            array = flat.reshape(value["shape"])
            return array.copy() if kind == "ndarray" else array[()]  # a copy, as the buffer is read-only
        case unknown:
            raise ValueError(f"unknown kind of value {unknown!r}")
