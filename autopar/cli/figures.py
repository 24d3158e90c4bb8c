"""What commands print with ``--json``: the data that their text shows, in bytes and seconds, with units in the names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.mesh import Mesh


def json_text(value: object, indent: int | None = 1) -> str:
    """Dataclasses are objects of their fields, grids and paths text, and null is a number that is not known."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Mesh | Path):
        return str(value)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    assert is_dataclass(value) and not isinstance(value, type), value
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def figures(value: object, *names: str) -> dict[str, Any]:
    """Some of what an object has, by its names."""
    return {name: getattr(value, name) for name in names}


def error_data(error: Exception, text: str) -> dict[str, object]:
    """What went wrong: the kind of error, what is said of it, and what else it knows."""
    known = vars(error) if isinstance(error, AutoparError) else {}
    return {"kind": type(error).__name__, "text": text, **{name: value for name, value in known.items() if value not in (None, ())}}
