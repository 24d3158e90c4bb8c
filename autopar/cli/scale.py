"""``autopar scale``: the numbers that it is given, read from text."""

from __future__ import annotations

from autopar.errors import MeshError, PlanError

SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def read_count(text: str) -> float:
    """``300B``, ``1.5T``, ``2M`` and ``512k`` are powers of 1000."""
    lowered = text.strip().lower()
    unit = lowered[-1:] if lowered[-1:].isalpha() else ""
    try:
        return float(lowered.removesuffix(unit)) * SCALES[unit]
    except (ValueError, KeyError):
        raise PlanError(f"a number of tokens reads like '300B', '1.5T', '2M' or '4096', got {text!r}") from None


def read_sizes(text: str) -> list[int]:
    """``1,2,4,8``"""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise MeshError(f"sizes are numbers of nodes and read like '1,2,4,8', got {text!r}")
    return [int(part) for part in parts]
