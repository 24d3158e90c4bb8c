"""Runs that repeat."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.mesh import Mesh
from autopar.solve.blocks import repeated_runs
from autopar.solve.build import build_problem
from autopar.solve.pins import pin, pin_tags
from autopar.solve.problem import Problem
from tests.solve.problems import session

pytestmark = pytest.mark.slow

words = st.text("abcd", min_size=1, max_size=6)


def covered(runs: list[tuple[int, int, int]]) -> list[int]:
    return [position for start, _, length in runs for position in range(start, start + length)]


@given(st.text("ab", max_size=40))
def test_runs_repeat_and_are_disjoint(tokens: str) -> None:
    runs = repeated_runs(tokens)
    positions = covered(runs)
    assert len(positions) == len(set(positions))
    for start, period, length in runs:
        assert length >= 2 * period
        assert start >= 0
        assert start + length <= len(tokens)
        assert all(tokens[i] == tokens[i + period] for i in range(start, start + length - period))


@given(before=st.text("xy", max_size=5), block=words, times=st.integers(2, 6), after=st.text("zw", max_size=5))
def test_planted_period_is_found(before: str, block: str, times: int, after: str) -> None:
    assume(len(block) * times > max(len(before), len(after)))
    runs = repeated_runs(before + block * times + after)
    start, period, length = max(runs, key=lambda run: run[2])
    assert (start, length) == (len(before), len(block) * times)
    assert len(block) % period == 0


@given(first=st.permutations("abcd"), second=st.permutations("uvwxy"), times=st.integers(2, 4))
def test_two_kinds_of_blocks_are_both_found(first: list[str], second: list[str], times: int) -> None:
    runs = repeated_runs(first * times + second * times)
    assert sorted(runs) == [(0, 4, 4 * times), (4 * times, 5, 5 * times)]


@pytest.mark.parametrize("tokens", ["", "a", "abcdef"])
def test_nothing_repeats(tokens: str) -> None:
    assert repeated_runs(tokens) == []


def problem_of(layers: int, *patterns: str) -> Problem:
    normal = session("gpt2", layers).normal
    tags = pin_tags(normal.module, [pin(pattern, d0="R") for pattern in patterns])
    return build_problem(normal.module, normal.factors, Mesh.of(2), tags=tags)


def test_problem_does_not_grow_with_depth() -> None:
    three, six = problem_of(3), problem_of(6)
    assert len(six.clusters) == len(three.clusters)
    counts = {c.leader.meta["placeholder"].name: c.multiplicity for c in six.clusters if c.leader.op == "placeholder"}
    assert counts["transformer.h.0.mlp.c_fc.weight"] == 6
    assert sum(c.multiplicity for c in six.clusters if c.leader.op == "placeholder") == 4 + 12 * 6 + 2


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_problem_does_not_grow_with_micro_batches(model: str) -> None:
    """The first block goes in time as the others do, whatever gives it its input."""
    normal = session(model, 3).normal
    whole = build_problem(normal.module, normal.factors, Mesh.of(2))
    parted = build_problem(normal.module, normal.factors, Mesh.of(2).with_time(2), split=normal.split(2))
    assert len(parted.clusters) == len(whole.clusters)


def test_pin_of_one_block_does_not_fix_the_others() -> None:
    free, pinned = problem_of(3), problem_of(3, "transformer.h.1.mlp.c_fc.weight")
    nodes = {
        node.meta["placeholder"].name: node
        for node in pinned.module.graph.find_nodes(op="placeholder")
        if node.meta["placeholder"].name.endswith("mlp.c_fc.weight")
    }
    h0, h1, h2 = (pinned.cluster_of[pinned.shared[nodes[f"transformer.h.{i}.mlp.c_fc.weight"]]] for i in range(3))
    assert h1 not in (h0, h2)
    assert pinned.clusters[h1].multiplicity == 1
    assert len(pinned.clusters) > len(free.clusters)
