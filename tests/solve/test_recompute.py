"""Where blocks begin and end, by hand: `o` is a border that one residual crosses, `.` one inside of a block."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import Manual, api
from autopar.graph import is_call
from autopar.mesh import Mesh
from autopar.solve.build import build_problem
from autopar.solve.recompute import at_share, borders, made_again, num_whole, share_of
from tests.solve.problems import session

CROSSING = {"o": 1.0, ".": 3.0, "-": 0.5}
"""Bytes over the border after each op; `-` is one that less crosses."""


@pytest.mark.parametrize(
    "after, run, expected",
    [
        ("..o...o...o...o", (3, 4, 12), [3, 7, 11, 15]),
        ("..o...o...o...o", (4, 4, 11), [3, 7, 11, 15]),
        ("..o...o...o...o..", (5, 4, 8), [3, 7, 11, 15]),
        ("o...-...-...-..", (3, 4, 12), [1, 5, 9, 13]),
        (".o.o.o.o.o.o", (3, 4, 8), [2, 6, 10]),
        ("...............", (2, 4, 8), [1, 5, 9, 10]),
        ("o.-...-...-..", (1, 4, 12), [1, 3, 7, 11]),
        (".-.-.-.-....", (0, 4, 8), [0, 4, 8]),
        ("-.o.o.o.o.o.o", (1, 4, 12), [1, 5, 9, 13]),
        ("..o...o...oo..-", (3, 4, 9), [3, 7, 11, 12]),
        ("..o...o...o.o.-", (3, 4, 10), [3, 7, 11, 13]),
        ("..o...o...o...o.-", (3, 4, 11), [3, 7, 11, 15]),
    ],
    ids=[
        "the run is of whole blocks",
        "the first block is in the run but for an op",
        "both end blocks are in it in part",
        "more crosses before the first block",
        "of two places in a block, the one with a whole block before it",
        "nothing crosses less than anything else",
        "less crosses inside of blocks than before the first",
        "the run is where the graph begins",
        "more crosses before the first block than at both places in it, one of which ends it",
        "a norm like that of blocks is behind the last, and then a head and the loss, from where nothing crosses",
        "the last block is half as long, and a head and the loss are behind it",
        "the last block is in it but for an op, and a head and the loss are behind it",
    ],
)
def test_borders(after: str, run: tuple[int, int, int], expected: list[int]) -> None:
    assert borders(*run, np.array([CROSSING[kind] for kind in after])) == expected


def test_borders_of_any_run_rise_and_hold_it() -> None:
    """Whole periods of the run are between them."""
    random = np.random.default_rng(0)
    for _ in range(500):
        size, period = int(random.integers(8, 60)), int(random.integers(1, 8))
        length = int(random.integers(2 * period, size + 1)) if 2 * period <= size else 0
        if not length:
            continue
        start = int(random.integers(0, size - length + 1))
        found = borders(start, period, length, random.integers(1, 5, size).astype(float))
        assert found == sorted(set(found))
        assert 0 <= found[0] < start + period
        assert start + length - period < found[-1] <= size
        assert any(end - begin == period for begin, end in pairwise(found))


@pytest.mark.parametrize(
    "level, expected", [("none", ("none", 1)), ("full", ("full", 1)), ("full:3/8", ("full", Fraction(3, 8))), ("full:0.5", ("full", 0.5))]
)
def test_levels(level: str, expected: tuple[str, Fraction]) -> None:
    assert share_of(level) == expected


@pytest.mark.parametrize("level", ["", "some", "pointwise:1/2", "full:0", "full:1", "full:3/2", "full:", "full:half", "full:1/0"])
def test_what_is_no_level(level: str) -> None:
    with pytest.raises(ValueError, match=f"'{level}' is no level of recomputation"):
        share_of(level)


def test_shares_in_words() -> None:
    assert [at_share("full", part, 4) for part in (0, 1, 4, 5)] == ["pointwise", "full:1/4", "full", "full"]


@pytest.mark.parametrize("blocks, chunks", [(1, 8), (3, 4), (5, 1), (2, 3)])
@pytest.mark.parametrize("share", [Fraction(1, 8), Fraction(1, 2), Fraction(7, 8)])
def test_as_many_blocks_of_a_rank_as_a_share_says(blocks: int, chunks: int, share: Fraction) -> None:
    """Rounded up for all its stages together, of which none has more than its own, and no two differ by more than one."""
    each = [num_whole(share, blocks, chunk) for chunk in range(chunks)]
    assert sum(each) == math.ceil(share * blocks * chunks)
    assert max(each) - min(each) <= 1
    assert max(each) <= blocks


def test_some_blocks_of_each_stage_are_made_again_whole() -> None:
    """Two blocks on each of two ranks, or on each of two stages of one, of which half are whole: the first of each, or the whole second."""
    normal = session("llama", 4).normal
    problem = build_problem(normal.module, normal.factors, Mesh.of(2))
    order = [node for node in normal.module.graph.nodes if is_call(node) and node in problem.shared]
    named = [(node, str(node.meta["module"]).split(".")) for node in order]
    block_of = {node: int(name[2]) for node, name in named if name[:2] == ["model", "layers"]}
    stage_of = {node: block // 2 for node, block in block_of.items()}
    for level, degree, whole in (("full:1/2", 2, {0, 2}), ("full:1/4", 2, {0, 2}), ("full:1/4", 1, {0}), ("full", 1, {0, 1, 2, 3})):
        again = made_again(problem, stage_of, block_of, [level] * 2, degree)
        assert {block_of[node] for node, at in again.items() if at == "full"} == whole
        assert {block_of[node] for node, at in again.items() if at == "pointwise"} == {0, 1, 2, 3} - whole


def test_products_are_not_made_again_with_their_biases_in_selective_recomputation() -> None:
    """A bias is added by the kernel of its product; a sum of activations is made again, and so is everything else."""
    normal = session("gpt2").normal
    problem = build_problem(normal.module, normal.factors, Mesh.of(2))
    ops = [node for node in normal.module.graph.nodes if is_call(node) and node in problem.shared]
    one_block = dict.fromkeys(ops, 0)
    again = made_again(problem, one_block, one_block, ["selective"])
    biased = [node for node in ops if node.target is torch.ops.aten.add.Tensor and "bias" in str(node.args[1])]
    products = {node.args[0] for node in biased}
    assert len(biased) == 8
    assert again.keys().isdisjoint({*biased, *products})
    attention = torch.ops.aten.scaled_dot_product_attention.default
    assert {attention, torch.ops.aten.tanh.default} <= {node.target for node in again}
    pointwise = made_again(problem, one_block, one_block, ["pointwise"])
    assert {node.target for node in again.keys() - pointwise.keys()} == {attention}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.down(F.gelu(self.up(self.norm(x)))))


class Wide(nn.Module):
    """Blocks, and behind them what begins like a block, and ends with logits in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(500, 32), nn.ModuleList(Block(32) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 500, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


def test_head_and_loss_are_in_no_block() -> None:
    """Their backward comes at once: to compute them again would take a product more, and leave no more memory."""
    with torch.device("meta"):
        model, tokens = Wide().bfloat16(), torch.zeros(8, 16, dtype=torch.long)
    plan = api.plan(model, 2, (tokens, tokens.clone()), plan=Manual(dp=2, recompute="full"))
    again = {node.name for node in plan.graph.graph.nodes if node.meta.get("module", "").startswith("blocks.")}
    assert again
    assert {op.name for op in plan.ops if op.recompute} <= again
    assert sum(op.recompute == "full" for op in plan.ops) == 4 * 4, "norm, product with its bias, and activation of each block"
