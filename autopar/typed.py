"""JSON of a plan -> its dataclasses, by the types that their fields are annotated with.

    read(LinkPlan, {"axis": "tp", "levels": ["inside a node"], "ranks": [4]}, {})  ->  LinkPlan("tp", ("inside a node",), (4,))

Fields may be text, numbers, booleans, other dataclasses, tuples and mappings of these, and what may be None. Nothing is converted, so that
``"4"`` is no number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from autopar.errors import PlanError

Readers = Mapping[Any, Callable[[str], Any]]
"""What reads the kinds that are written as text."""
_FITTING: dict[Any, set[Any]] = {str: {str}, int: {int}, float: {int, float}, bool: {bool}, NoneType: {NoneType}}
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
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


def _read(kind: Any, data: Any, readers: Readers) -> Any:
    fitting = _FITTING.get(kind)
    if fitting is not None:
        return _of_kind(data, fitting, _WORDS[kind])
    if kind in readers:
        return readers[kind](_of_kind(data, {str}, "text"))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if data is None else _read(next(each for each in inner if each is not NoneType), data, readers)
    if origin is tuple:
        return _read_tuple(inner[0], _of_kind(data, {list}, "a list"), readers)
    kinds = None if origin is Mapping else _kinds_of(kind)
    _of_kind(data, {dict}, "an object with names")
    if kinds is not None and kinds.keys() != data.keys():
        unknown, missing = sorted(data.keys() - kinds.keys()), sorted(kinds.keys() - data.keys())
        raise PlanError(f"a {kind.__name__} of the plan has unknown fields {unknown} or lacks {missing}")
    found = {}
    for name, value in data.items():
        try:
            found[name] = _read(inner[1] if kinds is None else kinds[name], value, readers)
        except _MisfitError as error:
            error.path.append(f" {name}")
            raise
    return found if kinds is None else kind(**found)


def _read_tuple(kind: Any, data: list[Any], readers: Readers) -> tuple[Any, ...]:
    found = list[Any]()
    try:
        for item in data:
            found.append(_read(kind, item, readers))
    except _MisfitError as error:
        error.path.append(f"[{len(found)}]")
        raise
    return tuple(found)


def _of_kind(data: Any, fitting: set[Any], wanted: str) -> Any:
    if type(data) not in fitting:
        raise _MisfitError(data, wanted)
    return data


@cache
def _kinds_of(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def read(kind: Any, data: object, readers: Readers) -> Any:
    """Make a dataclass of what JSON holds.

    Raises:
        PlanError: a field is missing, unknown, or of another kind than its type says.
    """
    try:
        return _read(kind, data, readers)
    except _MisfitError as error:
        raise PlanError(f"not a plan:{error}; make it again with autopar.plan") from None
