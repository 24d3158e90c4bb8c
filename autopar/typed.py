"""JSON of a plan -> its dataclasses, by the types that their fields are annotated with.

    read(LinkPlan, {"axis": "tp", "levels": ["inside a node"], "ranks": [4]}, {})  ->  LinkPlan("tp", ("inside a node",), (4,))

Fields may be text, numbers, booleans, other dataclasses, tuples and mappings of these, and what may be None. Nothing is converted, so that
``"4"`` is no number. Numbers are finite, and not negative but where the caller says so: what counts bytes, seconds or pieces is neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from autopar.errors import PlanError

Readers = Mapping[Any, Callable[[str], Any]]
"""What reads the kinds that are written as text."""
_FITTING: dict[Any, set[Any]] = {str: {str}, int: {int}, float: {int, float}, bool: {bool}, NoneType: {NoneType}}
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
MOST = 1e30
"""No number is larger: nothing that a plan counts comes near it, and sums and products of such numbers are finite."""
_SHOWN = 60
"""Characters of a wrong value in the text of an error."""


class _MisfitError(Exception):
    """A value of another kind than is wanted; ``path`` grows on the way out, the innermost part first."""

    def __init__(self, value: object, wanted: str) -> None:
        super().__init__()
        self.value, self.wanted, self.path = value, wanted, list[str]()

    def __str__(self) -> str:
        shown = repr(self.value)
        return f"{''.join(reversed(self.path))} is {self.wanted}, got {shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]}...'}"


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values of any kind.

    Args:
        readers: of the kinds that are written as text.
        signed: names of fields in which, however deep, numbers may be negative.
        least: that a number may be here.
    """

    readers: Readers
    signed: Collection[str]
    least: float = 0.0

    def value(self, kind: Any, data: Any) -> Any:
        fitting = _FITTING.get(kind)
        if fitting is not None:
            _of_kind(data, fitting, _WORDS[kind])
            if (kind is float or kind is int) and not self.least <= data <= MOST:  # neither is NaN
                raise _MisfitError(data, f"{_WORDS[kind]} from {self.least:g} to {MOST:g}")
            return data
        if kind in self.readers:
            return self.readers[kind](_of_kind(data, {str}, "text"))
        origin, inner = get_origin(kind), get_args(kind)
        if origin is UnionType:
            return None if data is None else self.value(next(each for each in inner if each is not NoneType), data)
        if origin is tuple:
            return self._tuple(inner[0], _of_kind(data, {list}, "a list"))
        _of_kind(data, {dict}, "an object with names")
        return self._mapping(inner[1], data) if origin is Mapping else kind(**self._fields(kind, data))

    def _tuple(self, kind: Any, data: list[Any]) -> tuple[Any, ...]:
        found = list[Any]()
        try:
            for item in data:
                found.append(self.value(kind, item))
        except _MisfitError as error:
            error.path.append(f"[{len(found)}]")
            raise
        return tuple(found)

    def _mapping(self, kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._named(name, kind, value) for name, value in data.items()}

    def _fields(self, kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
        kinds = _kinds_of(kind)
        if kinds.keys() != data.keys():
            unknown, missing = sorted(data.keys() - kinds.keys()), sorted(kinds.keys() - data.keys())
            raise PlanError(f"a {kind.__name__} of the plan has unknown fields {unknown} or lacks {missing}")
        return {name: self._named(name, kinds[name], value) for name, value in data.items()}

    def _named(self, name: str, kind: Any, data: Any) -> Any:
        reader = replace(self, least=-MOST) if name in self.signed else self
        try:
            return reader.value(kind, data)
        except _MisfitError as error:
            error.path.append(f" {name}")
            raise


def _of_kind(data: Any, fitting: set[Any], wanted: str) -> Any:
    if type(data) not in fitting:
        raise _MisfitError(data, wanted)
    return data


@cache
def _kinds_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def read(kind: Any, data: object, readers: Readers, signed: Collection[str] = ()) -> Any:
    """Make a dataclass of what JSON holds.

    Args:
        kind: the dataclass.
        data: what `json.loads` gives.
        readers: of the kinds that are written as text.
        signed: names of fields in which numbers may be negative, those of what the fields hold as well.

    Raises:
        PlanError: a field is missing, unknown, or of another kind than its type says; or a number is negative, or not finite.
    """
    try:
        return _Reader(readers, signed).value(kind, data)
    except _MisfitError as error:
        raise PlanError(f"not a plan:{error}; make it again with autopar.plan") from None
