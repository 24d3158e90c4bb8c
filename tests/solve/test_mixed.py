"""Tests of parts of stages some of whose blocks are computed again whole."""

from __future__ import annotations

from fractions import Fraction

import pytest

from autopar.solve.mixed import mixed
from autopar.solve.parts import PartBytes, Parts

END = {"of": 5.0}


def parts(block: float, transient: float) -> Parts:
    amount = {"of": block}
    return Parts(8, amount, END, END, 1.0, lambda: PartBytes(amount, END, END, transient, 0.0, 0.0, 0.0, transient, 1.0))


def test_a_block_is_the_mean_and_a_stage_has_whole_ones() -> None:
    both = mixed(parts(10.0, 3.0), parts(18.0, 7.0), Fraction(1, 4), 1)
    held = both.held()
    assert both.block == held.block == {"of": pytest.approx(12.0)}
    for part in (both, held):
        assert part.of(0, [8]) == {"of": 6 * 10.0 + 2 * 18.0 + 2 * 5.0}
    assert (held.transient, held.inputs, held.weights) == (7.0, 7.0, 1.0)
