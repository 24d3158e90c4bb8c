"""How much stages compute again, of made-up stages whose memory is a sum over levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from autopar.errors import InfeasibleError
from autopar.solve.places import MemoryLimit
from autopar.solve.recompute import share_of
from autopar.solve.saving import down_to_fewest, let_off, save

BYTES = {"none": 100.0, "pointwise": 60.0, "selective": 50.0, "full": 20.0}
SECONDS = {"none": 10.0, "pointwise": 11.0, "selective": 15.0, "full": 19.0}


def mixed(of: dict[str, float], level: str) -> float:
    name, share = share_of(level)
    return float(share) * of[name] + (1 - float(share)) * of["pointwise"]


@dataclass
class Made:
    """Stages of two ranks, in turn; ``weights`` is what a stage holds of the bytes of its level."""

    levels: tuple[str, ...]
    weights: Sequence[float] = (1.0, 1.0)
    seconds: dict[str, float] = field(default_factory=lambda: SECONDS)

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        taken = [weight * mixed(BYTES, level) for weight, level in zip(self.weights, self.levels, strict=True)]
        return sum(taken[::2]), sum(taken[1::2])

    def fits(self, limit: MemoryLimit) -> bool:
        return limit.holds(self.rank_bytes)

    def taken_s(self) -> float:
        return sum(mixed(self.seconds, level) for level in self.levels)


def saved(limits: tuple[float, float], how: Callable[..., Made] = save, levels: Sequence[str] = ("none", "none"), **of: object) -> Made:
    made = Made(tuple(levels), **of)  # type: ignore[arg-type]
    return how(made, lambda levels: Made(levels, made.weights, made.seconds), MemoryLimit(limits), Made.taken_s)


@pytest.mark.parametrize(
    "limits, levels",
    [
        ((100, 100), ("none", "none")),
        ((99, 100), ("pointwise", "none")),
        ((60, 60), ("pointwise", "pointwise")),
        ((59, 60), ("full:1/8", "pointwise")),
        ((50, 25), ("full:2/8", "full:7/8")),
        ((20, 20), ("full", "full")),
    ],
)
def test_no_more_than_must(limits: tuple[float, float], levels: tuple[str, ...]) -> None:
    """An eighth of the blocks computed again whole saves 5 bytes."""
    assert saved(limits).levels == levels


def test_where_nothing_fits_all_is_computed_again() -> None:
    found = saved((19, 100))
    assert found.levels == ("full", "none")
    assert not found.fits(MemoryLimit((19, 100)))


def test_products_alone_are_kept_where_that_is_faster() -> None:
    cheap = SECONDS | {"selective": 11.1}
    assert saved((50, 100), seconds=cheap).levels == ("selective", "none")
    assert saved((49, 100), seconds=cheap).levels == ("full:3/8", "none"), "it does not fit"


def test_all_stages_of_a_rank_compute_as_much_again() -> None:
    found = saved((160, 400), levels=("none",) * 4, weights=(1.0, 1.0, 2.0, 1.0))
    assert found.levels == ("full:2/8", "none", "full:2/8", "none"), "3 x 60 bytes, less 3 x 5 twice"


def test_one_eighth_more_where_what_was_thought_to_fit_does_not() -> None:
    assert saved((50, 100), levels=("full:1/8", "none")).levels == ("full:2/8", "none")
    assert saved((20, 100), levels=("full:7/8", "none")).levels == ("full", "none")


def test_what_was_decided_with_all_computed_again_is_let_off() -> None:
    assert saved((40, 20), let_off, ("full", "full")).levels == ("full:4/8", "full")
    assert saved((20, 20), let_off, ("none", "none")).levels == ("none", "none"), "nothing is computed again whole"


def test_nothing_changes_where_other_levels_move_memory_to_others() -> None:
    """Blocks that are shared anew: with fewer computed again on it, the first rank gives memory to the second."""

    class Moved(Made):
        @property
        def rank_bytes(self) -> tuple[float, ...]:
            return 20.0, 20.0 if self.levels == ("full", "full") else 30.0

    limit = MemoryLimit((20, 25))
    assert let_off(Moved(("full", "full")), Moved, limit, Moved.taken_s).levels == ("full", "full")


NAMES = ["pointwise", *(f"full:{part}/8" for part in range(1, 8)), "full"]


@pytest.mark.parametrize("fewest, asked", [(0, [8, 3, 1, 0]), (3, [8, 3, 1, 2]), (8, [8, 3, 5, 6, 7])])
def test_down_to_the_fewest_blocks_with_which_there_is_anything(fewest: int, asked: list[int]) -> None:
    tried = []

    def made(level: str) -> Made:
        tried.append(NAMES.index(level))
        if NAMES.index(level) < fewest:
            raise InfeasibleError("too much")
        return Made((level,))

    found = [NAMES.index(one.levels[0]) for one in down_to_fewest(made)]
    assert tried == asked
    assert found == [part for part in asked if part >= fewest]


def test_not_even_with_all_blocks() -> None:
    def made(level: str) -> Made:
        raise InfeasibleError(level)

    with pytest.raises(InfeasibleError, match="full"):
        down_to_fewest(made)
