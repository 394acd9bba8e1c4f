"""Encodes the host state, which is per-process state outside of the train state, as JSON. Decoding is exact.

What can come back as it was is taken, and everything else is refused by its path. Plain JSON would turn tuples into
lists, which ``random.setstate`` and others refuse, and the keys of dicts into strings. It has neither bytes nor arrays.
So all that JSON does not have is written as an object with a special key that names its kind.

A value that could not be had in an emergency is written as ``lost``, with the reason: the train state is worth more.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gracepoint.checkpoint.format.array_spec import as_bytes, zarr_dtype
from gracepoint.errors import CheckpointCorrupt, CheckpointRefused, HostStateLost
from gracepoint.jax_isolation import isolated, setting, to_numpy

_TAG = "__gracepoint__"
#: Kinds of numpy values other than numbers that come back as they were: strings, bytes, dates and durations.
_MORE_KINDS = "USMm"
_EXPECTED = (
    "expected None, bool, int, float, complex, str, bytes, numpy arrays and numbers, JAX arrays and keys of one "
    "device, or lists, tuples, dicts, OrderedDicts, Counters, deques and sets of these (state of the model belongs "
    "into the train state)"
)
_ADVICE: Mapping[str, str] = {
    "Generator": "give its .bit_generator.state",
    "RandomState": "give what its .get_state() returns",
    "Random": "give what its .getstate() returns",
    "MaskedArray": "give .data and .mask, each by itself",
    "defaultdict": "give dict(...) of it",
    "Tensor": "give what its .numpy() returns",
}


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A value that is encoded already. ``encode`` takes it in place of the value.

    Attributes:
        text: The value as JSON.
    """

    text: str


def encode(host_state: Mapping[str, Any]) -> bytes:
    """Returns ``host_state`` as JSON.

    Args:
        host_state: Values by name: what ``encoded`` takes, or what it has returned.

    Raises:
        CheckpointRefused: A value cannot come back as it is. The message names its path.
    """
    items = [f"{json.dumps(name)}: {encoded(name, value).text}" for name, value in host_state.items()]
    return f"{{{', '.join(items)}}}".encode()


def encoded(name: str, value: Any) -> Encoded:
    """Returns one value of the host state, encoded.

    Args:
        name: Its name.
        value: None, bool, int, float, complex, str, bytes, bytearray, numpy arrays and numbers, JAX arrays and keys on
            one device; and lists, tuples, dicts, OrderedDicts, Counters, deques, sets and frozensets of these. Or a
            ``HostStateLost``, which says why there is no value.

    Raises:
        CheckpointRefused: A value is of another type. The message names its path.
    """
    if isinstance(value, Encoded):
        return value
    if isinstance(value, HostStateLost):
        return Encoded(json.dumps({_TAG: "lost", "reason": str(value)}))
    where = f"host_state[{name!r}]"
    try:
        return Encoded(json.dumps(_encode(value, where)))
    except CheckpointRefused:
        raise
    except RecursionError:
        raise CheckpointRefused(f"{where}: expected values that do not contain themselves") from None
    except ValueError as error:  # an integer of thousands of digits
        raise CheckpointRefused(f"{where}: cannot be written as JSON: {error}") from error


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
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return _items(value, path)
    if kind is dict and all(type(key) is str for key in value):
        items = {key: _encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        return {_TAG: "dict", "items": items} if _TAG in items else items
    if kind in _PAIRS.values():
        # In pairs, as the keys of JSON are strings.
        pairs = [[_encode(key, f"{path}: the key {key!r}"), _encode(value[key], f"{path}[{key!r}]")] for key in value]
        return {_TAG: _name_in(_PAIRS, kind), "items": pairs}
    if kind is collections.deque:
        return {_TAG: "deque", "items": _items(value, path), "maxlen": value.maxlen}
    if kind in _SEQUENCES.values():
        return {_TAG: _name_in(_SEQUENCES, kind), "items": _items(value, path)}
    if kind is complex:
        return {_TAG: "complex", "parts": [value.real, value.imag]}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "base64": base64.b64encode(value).decode()}
    if kind is np.ndarray or isinstance(value, np.generic):
        return _encode_numpy(value, path)
    if isinstance(value, jax.Array):
        return _encode_jax(value, path)
    advice = _ADVICE.get(kind.__name__, "")
    raise CheckpointRefused(
        f"{path}: cannot save a value of type {kind.__qualname__}; {f'{advice}; ' if advice else ''}{_EXPECTED}"
    )


def _items(values: Any, path: str) -> list[Any]:
    return [_encode(item, f"{path}[{i}]") for i, item in enumerate(values)]


def _encode_numpy(value: Any, path: str) -> dict[str, Any]:
    array = np.asarray(value)
    stored = zarr_dtype(array.dtype)
    if array.dtype.kind in _MORE_KINDS and array.dtype.itemsize > 0:
        stored = array.dtype.str
    elif stored is not None and array.dtype.byteorder == ">":
        stored = array.dtype.str  # the byte order comes back, too
    if stored is None:
        raise CheckpointRefused(
            f"{path}: cannot save numpy values of dtype {array.dtype}; expected numbers, strings or dates of numpy"
        )
    return {
        _TAG: "ndarray" if isinstance(value, np.ndarray) else "number",
        "dtype": stored,
        "shape": array.shape,
        "base64": base64.b64encode(as_bytes(array)).decode(),
    }


def _encode_jax(value: jax.Array, path: str) -> dict[str, Any]:
    if isinstance(value, jax.core.Tracer) or value.is_deleted() or len(value.sharding.device_set) != 1:
        raise CheckpointRefused(
            f"{path}: expected a JAX array on one device of this process, found one that is traced, deleted or on "
            f"several devices; arrays of the model belong into the train state"
        )
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        with isolated():
            impl, data = str(jax.random.key_impl(value)), jax.random.key_data(value)
        return {_TAG: "key", "impl": impl, "data": _encode_numpy(to_numpy(data), path)}
    return {_TAG: "array", "data": _encode_numpy(to_numpy(value), path), "weak": bool(value.weak_type)}


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
        case "deque":
            return collections.deque(_decode(value["items"]), value["maxlen"])
        case str(kind) if kind in _SEQUENCES:
            return _SEQUENCES[kind](_decode(value["items"]))
        case str(kind) if kind in _PAIRS:
            return _PAIRS[kind]({_decode(key): _decode(item) for key, item in value["items"]})
        case "complex":
            return complex(*value["parts"])
        case "bytes":
            return base64.b64decode(value["base64"], validate=True)
        case "bytearray":
            return bytearray(base64.b64decode(value["base64"], validate=True))
        case "ndarray" | "number" as kind:
            flat = np.frombuffer(base64.b64decode(value["base64"], validate=True), np.dtype(value["dtype"]))
            array = flat.reshape(value["shape"])
            return array.copy() if kind == "ndarray" else array[()]  # a copy, as the buffer is read-only
        case "key":
            default = setting("jax_default_device")  # the caller's
            with isolated(), jax.default_device(default):
                return jax.random.wrap_key_data(_decode(value["data"]), impl=value["impl"])
        case "array":
            return _decode_jax(_decode(value["data"]), weak=value["weak"])
        case "lost":
            return HostStateLost(str(value["reason"]))
        case unknown:
            raise ValueError(f"unknown kind of value {unknown!r}")


def _decode_jax(data: np.ndarray[Any, Any], *, weak: bool) -> jax.Array:
    default, x64 = setting("jax_default_device"), setting("jax_enable_x64")  # the caller's: they choose both
    with isolated(), jax.default_device(default):
        if weak and data.ndim == 0:
            with jax.enable_x64(x64):
                number = jax.numpy.asarray(data.item())
            if number.dtype == data.dtype:
                return number
        array: jax.Array = jax.device_put(data)
        return array


def _name_in(kinds: Mapping[str, Any], kind: type) -> str:
    return next(name for name, candidate in kinds.items() if candidate is kind)


#: Containers by the names of their kinds: of items, and of keys with values. A dict here has keys that are no strings.
_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_PAIRS: Mapping[str, Callable[[Any], Any]] = {
    "mapping": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
