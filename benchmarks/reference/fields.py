"""Values out of a part of a record, checked as they are taken: what makes no sense says where it stands and what should be there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

MOST = 10**9
"""No run has more of anything that is counted."""
SHOWN = 60
"""Letters of a value in a message."""

T = TypeVar("T")


class RecordError(ValueError):
    """A record cannot be read, or not be predicted."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a record.

    Args:
        name: of the part; empty for the record itself.
        values: what stands there, from JSON.
    """

    name: str
    values: Mapping[str, Any]

    def part(self, name: str) -> Part:
        """A part of this one, without values if it is null or missing."""
        found = self.values.get(name)
        if found is not None and not isinstance(found, dict):
            raise self._wrong(name, "an object")
        return Part(self._path(name), found or {})

    def missing(self, *names: str) -> list[str]:
        """Which of these fields are null or missing."""
        return [self._path(name) for name in names if self.values.get(name) is None]

    def optional(self, take: Callable[[str], T], name: str) -> T | None:
        """A field by one of the methods below; None if it is null or missing."""
        return None if self.missing(name) else take(name)

    def text(self, name: str) -> str:
        found = self.values.get(name)
        if not isinstance(found, str):
            raise self._wrong(name, "text")
        return found

    def whole(self, name: str, least: int = 1, most: int = MOST) -> int:
        """A whole number, which may be written as 8.0."""
        found = self.values.get(name)
        if not _is_number(found) or not least <= found <= most or found != int(found):
            raise self._wrong(name, f"a whole number from {least} to {most:,}")
        return int(found)

    def number(self, name: str) -> float:
        """A number above zero."""
        if (found := self.measured(name)) is None:
            raise self._wrong(name, "a number above 0")
        return found

    def measured(self, name: str) -> float | None:
        """A number above zero; None if it is one that nobody measured: zero, negative or infinite."""
        found = self.values.get(name)
        if not _is_number(found):
            raise self._wrong(name, "a number")
        return float(found) if 0 < found < float(MOST) ** 3 else None

    def truth(self, name: str) -> bool:
        found = self.values.get(name)
        if not isinstance(found, bool):
            raise self._wrong(name, "true or false")
        return found

    def shown(self, name: str) -> str:
        """The field and its value, as they stand in the file."""
        value = json.dumps(self.values.get(name))
        return f"{self._path(name)} is {value if len(value) <= SHOWN else value[:SHOWN] + '...'}"

    def _path(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def _wrong(self, name: str, should: str) -> RecordError:
        return RecordError(f"{self.shown(name)}; it should be {should}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
