"""Which ops a stage computes again in the backward, instead of keeping their results.

| level     | computed again in every block (Korthikanti et al. 2022, Chen et al. 2016)                          |
|-----------|----------------------------------------------------------------------------------------------------|
| none      | nothing                                                                                            |
| pointwise | all but products of matrices with their biases, and fused attention: norms, activations, masks     |
| selective | all but products of matrices with their biases: fused attention too                                |
| full      | all but what other blocks read, communication inside of the block included                         |

``full:3/8`` is `full` in three of eight blocks of a stage, or of the stages of a rank together, and `pointwise` in the others.

A *block* is one period of a run of the graph that repeats, cut where least crosses; the first and the last may differ in ops at their outer
ends. What is in no block is never computed again, nor is what the backward does not need, as the product that ends a block. What is behind
the last block, as a head and the loss, is in none: its backward comes at once. Only a GPipe schedule has its last stage keep that of all
micro-batches meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from torch import fx

from autopar.cost.compute import OpCost, node_cost
from autopar.cost.pricing import saved_values
from autopar.graph import is_call, is_getitem, operands_of
from autopar.passes.fuse import biased_product
from autopar.solve.blocks import repeated_runs
from autopar.solve.problem import Problem

LEVELS = ("none", "pointwise", "selective", "full")
MIXED = "full"
"""The level that some blocks of a stage may have, while the others have that `BESIDE` it."""
BESIDE = "pointwise"


def share_of(level: str) -> tuple[str, Fraction]:
    """A level by its name, and the share of the blocks that have it.

    Raises:
        ValueError: it is none.
    """
    name, colon, share = level.partition(":") if isinstance(level, str) else ("", "", "")
    try:
        part = Fraction(share) if colon else Fraction(1)
    except (ValueError, ZeroDivisionError):
        part = Fraction(0)
    if name not in LEVELS or (colon and (name != MIXED or not 0 < part < 1)):
        raise ValueError(f"{level!r} is no level of recomputation")
    return name, part


def at_share(level: str, part: int, parts: int) -> str:
    """A level in so many of so many parts of the blocks, or that beside it in all."""
    return level if part >= parts else f"{level}:{part}/{parts}" if part else BESIDE


def num_whole(share: Fraction, blocks: int, chunk: int) -> int:
    """Of the blocks of a stage those that are computed again whole: of all ``chunk + 1`` stages of its rank up to it, of which each has as
    many blocks, the share, rounded up."""
    return math.ceil((chunk + 1) * blocks * share) - math.ceil(chunk * blocks * share)


def blocks_of(problem: Problem, order: Sequence[fx.Node], crossing: np.ndarray) -> dict[fx.Node, int]:
    """The block of every op that is in one.

    Args:
        problem: of the model.
        order: its ops.
        crossing: bytes that cross the border after each op.
    """
    blocks: dict[fx.Node, int] = {}
    count = 0
    for run in repeated_runs([problem.shared[node] for node in order]):
        for begin, end in pairwise(borders(*run, crossing)):
            for node in order[begin:end]:
                blocks.setdefault(node, count)  # longer runs come first
            count += 1
    return blocks


def borders(start: int, period: int, length: int, crossing: np.ndarray) -> list[int]:
    """Positions between the blocks of a run, with those of blocks that are in it but in part.

    Args:
        start, period, length: of the run.
        crossing: bytes that cross the border after each op.
    """
    crossed = np.concatenate(([0.0], crossing))

    def least(low: int, high: int) -> int:
        return low + int(np.argmin(crossed[low : high + 1]))

    end = start + length
    first = least(start, start + min(period, length - period))
    alike = [at for at in range(first, start + min(period, length - period) + 1) if crossed[at] == crossed[first]]
    whole = (at for at in alike if at - period == start or (at > period and crossed[at - period] <= crossed[at]))
    first = next(whole, first)  # a whole block is before it
    borders = list(range(first - (first - start) // period * period, end + 1, period))
    first = borders[0]
    if first > start:  # a part of a block is before it
        earliest = max(min(1, start), first - period)
        borders.insert(0, least(earliest, max(earliest, start - 1)))
    if end > borders[-1] and end < len(crossing) - 1:  # and after it; what is behind that, as head and loss, is in none
        last = min(borders[-1] + period, len(crossing) - 1)
        as_little = (at for at in range(end, last + 1) if crossed[at] <= crossed[borders[-1]])
        borders.append(next(as_little, least(end + 1, last)))
    return borders


def made_again(
    problem: Problem, stage_of: Mapping[fx.Node, int], blocks: Mapping[fx.Node, int], levels: Sequence[str], degree: int = 1
) -> dict[fx.Node, str]:
    """The ops that are computed again, with the level of their block.

    Args:
        problem: of the model.
        stage_of: stage of every op.
        blocks: block of every op that is in one.
        levels: of every stage.
        degree: ranks of the pipeline.
    """
    again, whole = {}, _whole(stage_of, blocks, levels, degree)
    for node, block in blocks.items():
        level, share = share_of(levels[stage_of[node]])
        level = level if share == 1 or block in whole[stage_of[node]] else BESIDE
        if level == "none" or (level != "full" and (_is_product(problem, node) or biased_product(node) is not None)):
            continue
        if level == "pointwise" and _cost(problem, node).is_attention:
            continue
        if all(blocks.get(user) == block and stage_of.get(user) == stage_of[node] for user in _users(node)):
            again[node] = level
    needed = _needed(problem, again) if again else ()
    return {node: level for node, level in again.items() if node in needed}


def _whole(stage_of: Mapping[fx.Node, int], blocks: Mapping[fx.Node, int], levels: Sequence[str], degree: int) -> list[set[int]]:
    """The blocks of every stage that have its level, where not all have."""
    own: list[set[int]] = [set() for _ in levels]
    for node, block in blocks.items():
        own[stage_of[node]].add(block)
    shares = [share_of(level)[1] for level in levels]
    return [
        set(sorted(found)[: num_whole(share, len(found), stage // degree)])
        for stage, (found, share) in enumerate(zip(own, shares, strict=True))
    ]


def _needed(problem: Problem, again: Collection[fx.Node]) -> set[fx.Node]:
    """The ops that have a result which the backward reads, or which others of them are made of; ``again`` are made anew for it."""
    needed: set[fx.Node] = set()
    saved: dict[fx.Node, tuple[list[int], list[int]]] = {}
    for node in reversed(problem.module.graph.nodes):
        if node not in problem.shared or not is_call(node):
            continue
        operands, same = operands_of(node), problem.shared[node]
        if same not in saved:
            saved[same] = saved_values(node, problem.factors.rules.get(node))
        saved_operands, saved_results = saved[same]
        if saved_results:
            needed.add(node)
        made_of = range(len(operands)) if node in again and node in needed else saved_operands
        needed.update(operands[i].node for i in made_of)
    return needed


def _users(node: fx.Node) -> list[fx.Node]:
    """The ops that read any result of a node."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _users(user) if is_getitem(user) else [user]
    return found


def _is_product(problem: Problem, node: fx.Node) -> bool:
    cost = _cost(problem, node)
    return cost.is_matmul and not cost.is_attention


def _cost(problem: Problem, node: fx.Node) -> OpCost:
    return node_cost(node, problem.factors.rules.get(node))
