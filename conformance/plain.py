"""Dataclasses from JSON: what `dataclasses.asdict` took apart, put together by their annotations."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_plain(kind: type[T], data: Any, name: str = "") -> T:
    """An instance of `kind`. Raises ValueError with the name of a value that does not fit."""
    return _built(kind, data, name or kind.__name__)


def _built(kind: Any, data: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return None if data is None else _built(inner, data, name)
    if is_dataclass(kind):
        return _dataclass(kind, data, name)
    if origin is tuple:
        _check(isinstance(data, (list, tuple)), name, "a list", data)
        return tuple(_built(arguments[0], x, f"{name}[{i}]") for i, x in enumerate(data))
    if origin is dict:
        _check(isinstance(data, dict), name, "an object", data)
        return {key: _built(arguments[1], x, f"{name}.{key}") for key, x in data.items()}
    numbers = kind is float and isinstance(data, int) and not isinstance(data, bool)
    _check(kind is Any or numbers or type(data) is kind, name, f"of type {getattr(kind, '__name__', kind)}", data)
    return float(data) if numbers else data


def _dataclass(kind: Any, data: Any, name: str) -> Any:
    _check(isinstance(data, dict), name, "an object", data)
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    for key in data:
        _check(key in known, f"{name}.{key}", f"one of {', '.join(known)}", key)
    for key, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        _check(key in data or not required, f"{name}.{key}", "given", None)
    return kind(**{key: _built(hints[key], x, f"{name}.{key}") for key, x in data.items()})


def _check(fits: bool, name: str, wanted: str, got: Any) -> None:
    if not fits:
        raise ValueError(f"{name} must be {wanted}; got {got!r}")
