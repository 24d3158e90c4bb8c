"""Experts that take sorted rows: each rank sorts its own, wherever it is sure that rows go their own ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # makes the op of products by groups
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import Manual
from autopar.graph import is_call, is_sorted, value_of
from autopar.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL_GRAD, Placement, shard
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.ways import has_way
from tests.marks import few
from tests.planning import planned

pytestmark = pytest.mark.slow

aten, ours = torch.ops.aten, torch.ops.autopar
multiply = torch.ops.transformers.grouped_mm_fallback
EXPERTS, COPIES, WIDTH = 4, 2, 16


class Routed(nn.Module):
    """Two products with a matrix for each expert, a bias, and weights of a token's copies; a subclass puts together what comes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 32) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 32))
        self.down = nn.Parameter(torch.randn(EXPERTS, 32, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(COPIES, -1)
        ids, order = chosen.reshape(-1).sort()
        ends = F.one_hot(ids, EXPERTS).sum(0).cumsum(0).int()
        tokens = order // COPIES
        inner = F.silu(multiply(flat[tokens], self.up, ends) + self.bias[ids])
        outer = multiply(inner, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return (x + self.together(outer, order, tokens, ends).view_as(x)).square().sum()

    def together(self, rows: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Added(Routed):
    def together(self, rows: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows) // COPIES, WIDTH).index_add(0, tokens, rows)


class Inverse(Routed):
    def together(self, rows: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        where = torch.empty_like(order)
        where[order] = torch.arange(len(order), device=order.device)
        return rows[where].view(-1, COPIES, WIDTH).sum(1)


class Argsort(Routed):
    def together(self, rows: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return rows[order.argsort()].view(-1, COPIES, WIDTH).sum(1)


class Neighbours(Inverse):
    """Rows beside each other, of whatever tokens they are."""

    def together(self, rows: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return super().together(rows + rows.roll(1, 0), order, tokens, ends)


class Counted(Inverse):
    """How many rows each expert has counts too."""

    def together(self, rows: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return super().together(rows, order, tokens, ends) * (ends[0] / ends[-1])


class LeftInOrder(Routed):
    def together(self, rows: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, COPIES, WIDTH).sum(1)


class OtherEnds(Inverse):
    """Every expert takes the rows of the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        ids, order = self.gate(flat).argmax(-1).sort()
        ends = F.one_hot((ids + 1) % EXPERTS, EXPERTS).sum(0).cumsum(0).int()
        where = torch.empty_like(order)
        where[order] = torch.arange(len(order), device=order.device)
        result: torch.Tensor = multiply(multiply(flat[order], self.up, ends), self.down, ends)[where].square().sum()
        return result


FOUND, NOT_FOUND = [Inverse, Added, Argsort], [Neighbours, Counted, LeftInOrder, OtherEnds]


def opened(model: type[Routed]) -> Session:
    return open_session(make_skeleton(model()), (torch.randn(8, 4, WIDTH),), {})


def targets(model: type[Routed]) -> list[object]:
    return [node.target for node in opened(model).normal.module.graph.nodes]


@pytest.mark.parametrize("model", FOUND)
def test_rows_that_are_put_back_are_each_ranks_own(model: type[Routed]) -> None:
    found = targets(model)
    assert {aten.sort.default, aten.index_put.default, aten.index_add.default, ours.grouped_mm.default}.isdisjoint(found)
    assert [found.count(op.default) for op in (ours.sort_ids, ours.take_sorted, ours.sorted_mm, ours.put_back)] == [1, 2, 2, 1]


@pytest.mark.parametrize("model", NOT_FOUND)
def test_what_is_not_known_to_go_row_by_row_stays(model: type[Routed]) -> None:
    assert targets(model).count(aten.sort.default) == 1
    assert ours.grouped_mm.default in targets(model)
    assert ours.sort_ids.default not in targets(model)


@pytest.mark.parametrize("plan", few(1, [Manual(dp=2, tp=2, zero=3, microbatches=2), Manual(dp=4), Manual(tp=2)]), ids=str)
@pytest.mark.parametrize("model", few(2, FOUND))
def test_numbers_are_those_of_the_model(model: Callable[[], Routed], plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(model(), plan.dp * plan.tp, (torch.randn(8, 4, WIDTH),), plan)
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-6, str(found)


@pytest.mark.parametrize("model", NOT_FOUND)
def test_numbers_of_the_others_are_too(model: Callable[[], Routed]) -> None:
    torch.manual_seed(0)
    found = autopar.verify(model(), 2, (torch.randn(8, 4, WIDTH),), Manual(dp=2))
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-6, str(found)


def test_tokens_stay_where_they_are() -> None:
    """On data-parallel ranks nothing but gradients of parameters, and the loss, is reduced."""
    plan = planned(opened(Inverse), Manual(dp=4))
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
    reduced = {collective.value for collective in plan.collectives if collective.phase == "backward"}
    assert reduced == {"gate.weight", "gate.bias", "up", "bias", "down"}


def test_rows_in_order_are_marked_until_they_are_back() -> None:
    graph = opened(Inverse).normal.module.graph
    calls = [node for node in graph.nodes if is_call(node)]
    marked = {str(node.target).split(".")[1] for node in calls if is_sorted(value_of(node))}
    assert {"sort_ids", "take_sorted", "sorted_mm", "index", "silu", "mul"} <= marked
    assert {"put_back", "topk", "reshape", "linear"}.isdisjoint(marked)


ROWS, COLUMNS = shard(0), shard(1)


@pytest.mark.parametrize(
    "held, wanted, is_way",
    [
        (ROWS, ROWS, True),
        (ROWS, REPLICATED, False),
        (REPLICATED, ROWS, False),
        (PARTIAL, ROWS, False),
        (ROWS, COLUMNS, False),
        (COLUMNS, REPLICATED, True),
        (PARTIAL, REPLICATED, True),
        (REPLICATED, COLUMNS, True),
    ],
    ids=str,
)
def test_nothing_moves_along_sorted_rows(held: Placement, wanted: Placement, is_way: bool) -> None:
    assert has_way(held, wanted, is_parameter=False, needs_grad=False)
    assert has_way(held, wanted, is_parameter=False, needs_grad=False, keeps_rows=True) == is_way
    assert has_way(REPLICATED_PARTIAL_GRAD, COLUMNS, is_parameter=False, needs_grad=True, keeps_rows=True)
