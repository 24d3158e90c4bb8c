"""Programs of one kind of call: one for each way in which the attributes were that its forward reads (`autopar.capture.reads`)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from autopar.callers import user_level
from autopar.capture.reads import MISSING, alike
from autopar.runtime.mirror import Held

T = TypeVar("T")
MANY = 8
"""So many of one kind of call are a mistake more likely than not."""


class RecaptureWarning(UserWarning):
    """An attribute that the forward reads changes again and again, and each value is captured and planned for."""


class Variant(NamedTuple, Generic[T]):
    """What was built of one kind of call while attributes were so."""

    held: tuple[Held, ...]
    built: T


def fitting(variants: Sequence[Variant[T]]) -> T | None:
    """What was built for the attributes as they are now, the last first."""
    return next((variant.built for variant in reversed(variants) if _holds(variant.held)), None)


def _holds(held: Sequence[Held]) -> bool:
    for place, attribute, value in held:
        now = place.get(attribute, MISSING)
        if now is not value and not alike(now, value):
            return False
    return True


def warn_of_many(variants: Sequence[Variant[T]]) -> None:
    """Warn of the attribute that has had the most values, once there are many."""
    if len(variants) != MANY:
        return
    values: dict[tuple[int, str], list[object]] = {}
    for place, attribute, value in (held for variant in variants for held in variant.held):
        own = values.setdefault((id(place), attribute), [])
        if not any(alike(value, other) for other in own):
            own.append(value)
    (_, attribute), found = max(values.items(), key=lambda item: len(item[1]))
    warnings.warn(
        f"{attribute!r} of a module has had {len(found)} values, such as {found[-1]!r}, which the forward reads, and each was captured and "
        "planned for; give what changes all the time as a tensor among the arguments, or in a buffer",
        RecaptureWarning,
        stacklevel=user_level(),
    )
