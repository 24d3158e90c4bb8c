"""Which ops a stage computes again in the backward, instead of keeping their results.

=========== ==========================================================================================
level       computed again in every block (Korthikanti et al. 2022, Chen et al. 2016)
=========== ==========================================================================================
none        nothing
selective   all but products of matrices: norms, activations, masks, the inside of attention
full        all but what other blocks read, communication inside of the block included
=========== ==========================================================================================

A *block* is one period of a run of the graph that repeats, cut where least crosses. What is in no block is never computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import fx

from autopar.cost.compute import op_cost
from autopar.graph import call_of, is_getitem
from autopar.solve.blocks import repeated_runs
from autopar.solve.problem import Problem

LEVELS = ("none", "selective", "full")


def blocks_of(problem: Problem, order: Sequence[fx.Node], crossing: np.ndarray) -> dict[fx.Node, int]:
    """The block of every op that is in one.

    Args:
        problem: of the model.
        order: its ops.
        crossing: bytes that cross the border after each op.
    """
    blocks: dict[fx.Node, int] = {}
    count = 0
    for start, period, length in repeated_runs([problem.shared[node] for node in order]):
        offsets = range(min(period, length - period) + 1)
        first = start + min(offsets, key=lambda offset: (crossing[start + offset - 1] if start + offset else 0.0, offset))
        for begin in range(first, start + length - period + 1, period):
            blocks.update(dict.fromkeys(order[begin : begin + period], count))
            count += 1
    return blocks


def made_again(
    problem: Problem, stage_of: Mapping[fx.Node, int], blocks: Mapping[fx.Node, int], levels: Sequence[str]
) -> dict[fx.Node, str]:
    """The ops that are computed again, with the level of their stage.

    Args:
        problem: of the model.
        stage_of: stage of every op.
        blocks: block of every op that is in one.
        levels: of every stage.
    """
    again = {}
    for node, block in blocks.items():
        level = levels[stage_of[node]]
        if level == "none" or (level == "selective" and _is_product(problem, node)):
            continue
        if all(blocks.get(user) == block and stage_of.get(user) == stage_of[node] for user in _users(node)):
            again[node] = level
    return again


def _users(node: fx.Node) -> list[fx.Node]:
    """The ops that read any result of a node."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _users(user) if is_getitem(user) else [user]
    return found


def _is_product(problem: Problem, node: fx.Node) -> bool:
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return node.target is not attention and op_cost(call_of(node), problem.factors.rules.get(node)).is_matmul
