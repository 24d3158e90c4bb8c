"""Which factors a reshape keeps."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.rules.check import check_call
from autopar.rules.samples import Sample, real
from autopar.rules.view import regroup


@pytest.mark.parametrize(
    "source, target, line",
    [
        ((4, 6), (4, 6), "f0 f1 -> f0 f1"),
        ((4, 6), (24,), "f0 f1 -> (f0 f1)"),
        ((24,), (4, 6), "(f0 f1) -> f0 f1"),
        ((2, 768), (2, 12, 64), "f0 (f1 f2) -> f0 f1 f2"),
        ((6, 4), (3, 8), "(f0 f1) f2 -> f0 (f1 f2)"),
        ((2, 1, 6), (1, 2, 6, 1), "f0 1 f1 -> 1 f0 f1 1"),
        ((1, 1), (), "1 1 -> ."),
        ((2, 3), (3, 2), "w0! w1! -> w2! w3!"),
        ((6, 4), (4, 6), "(f0 w2!) (w3! f1) -> (f0 w4!) (w5! f1)"),
        ((5, 2, 3, 7), (5, 3, 2, 7), "f0 w2! w3! f1 -> f0 w4! w5! f1"),
        ((2, 3, 35), (3, 2, 5, 7), "w2! w3! (f0 f1) -> w4! w5! f0 f1"),
        ((0, 4), (2, 0), "w0! w1! -> w2! w3!"),
    ],
)
def test_common_factors(source: tuple[int, ...], target: tuple[int, ...], line: str) -> None:
    assert str(regroup(source, target)) == f"{line} ; 0"


factors = st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=6)


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same elements: the same factors grouped in two ways, one of them perhaps in another order."""
    flat = draw(factors)

    def group(sizes: list[int]) -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, len(sizes)), max_size=3)) | {0, len(sizes)})
        return tuple(math.prod(sizes[a:b]) for a, b in pairwise(cuts))

    return group(flat), group(draw(st.permutations(flat)) if draw(st.booleans()) else flat)


@given(regroupings())
def test_a_regrouping_binds_and_moves_factors_in_order(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source, target = shapes
    rule = regroup(source, target)
    sizes = rule.bind([source], [target])
    kept = [[x for dim in term for x in dim if x not in rule.whole] for term in (rule.operands[0], rule.results[0])]
    assert kept[0] == kept[1]
    # a factor stands for the same digit of the element's number on both sides
    for letter in kept[0]:
        minors = []
        for term in (rule.operands[0], rule.results[0]):
            flat = [x for dim in term for x in dim]
            minors.append(math.prod(sizes[x] for x in flat[flat.index(letter) + 1 :]))
        assert minors[0] == minors[1]


@given(regroupings())
def test_a_regrouping_is_right(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source, target = shapes
    sample = Sample(torch.ops.aten.reshape.default, (real(*source), list(target)))
    wrong = [finding for finding in check_call(sample, regroup(source, target)) if finding.kind == "wrong"]
    assert not wrong, "\n".join(map(str, wrong))
