"""JSON into models: checked, and deaf to what it does not know.

Reads the models' own type hints, so that a field is named once. Knows what the models use: plain
values, ``X | None``, ``tuple[X, ...]``, ``Mapping[str, X]``, string enums and dataclasses.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

from ._errors import ProtocolError

T = TypeVar("T")


def decode(kind: type[T], value: object, where: str) -> T:
    """Turn parsed JSON into an instance of ``kind``; ``where`` names it in errors."""
    return typing.cast(T, _decode(kind, value, where))


def _decode(kind: Any, value: object, where: str) -> object:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        (inner,) = (arm for arm in typing.get_args(kind) if arm is not type(None))
        return _decode(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        inner = typing.get_args(kind)[0]
        return tuple(_decode(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is collections.abc.Mapping:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        inner = typing.get_args(kind)[1]
        return {key: _decode(inner, item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        if not isinstance(value, str):
            raise _wrong(where, "a word", value)
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int to Python, but not to JSON.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(where, f"of type {kind.__name__}", value)
    return value


def _decode_object(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    given: dict[str, object] = {}
    for name, hint, required in _fields(kind):
        if name in value:
            given[name] = _decode(hint, value[name], f"{where}.{name}")
        elif required:
            raise ProtocolError(f"{where}.{name} is missing")
    return kind(**given)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return tuple(
        (field.name, hints[field.name], field.default is field.default_factory is missing)
        for field in dataclasses.fields(kind)
    )


def _wrong(where: str, wanted: str, value: object) -> ProtocolError:
    return ProtocolError(f"{where} should be {wanted}, but is {value!r:.80}")
