"""Legal PyTorch that is seldom written: what rewrites graphs must not take it for what is written mostly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import Manual
from autopar.errors import CaptureError
from autopar.graph import spec_of
from tests.models import Example
from tests.passes.test_normalize import evaluate, normal_of

Made = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Of what a layer makes [4, 8], of its input [4, 6], and of whole numbers [4, 6]."""

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore::autopar.factors.MissingRuleWarning")


class Spelled(nn.Module):
    """A layer, and what is made of it; the loss weighs each element by its place."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(6, 8), made

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.made(self.layer(x), x, ids)
        weights = torch.arange(out.numel(), dtype=torch.float32, device=out.device).view(out.shape).cos()
        return (out * weights).sum() + self.layer(x).sum(), out


def example(made: Made) -> Example:
    torch.manual_seed(0)
    return Example(Spelled(made), {"x": torch.randn(4, 6), "ids": torch.randint(6, (4, 6))})


def written(view: Callable[[torch.Tensor], torch.Tensor]) -> Made:
    """What a write into a view leaves."""

    def made(y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        z = y * 1
        view(z).add_(1)
        return z * z

    return made


def heads(y: torch.Tensor) -> torch.Tensor:
    """Four of width 2 for a sequence of 4."""
    return y.view(1, 4, 4, 2)


def in_order_and_backwards(y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids[:, 0].sort().indices
    return y[order][order.argsort(descending=True)]


SAME: dict[str, Made] = {
    "sum of an equation": lambda y, x, ids: torch.einsum("bo->b", y),
    "sum of all": lambda y, x, ids: torch.einsum("ij->", y.tanh()),
    "trace": lambda y, x, ids: torch.einsum("ii", y[:, :4].tanh()),
    "diagonals": lambda y, x, ids: torch.einsum("...ii->...i", y.view(4, 2, 2, 2)),
    "complex of a transposed": lambda y, x, ids: torch.view_as_complex(y.view(4, 2, 4).transpose(1, 2).contiguous()).abs(),
    "other dtype of a transposed": lambda y, x, ids: y + x.t().contiguous().view(torch.int32).remainder(7).sum(),
    "memory of a transposed": lambda y, x, ids: y.t().contiguous().as_strided((8, 4), (4, 1)),
    "overlapping rows": lambda y, x, ids: y[:, 1:7].contiguous().as_strided((4, 5, 2), (6, 1, 1)),
    "write into three dims": written(torch.atleast_3d),
    "write into a grid": written(lambda z: torch.meshgrid(z[:, 0], indexing="ij")[0]),
    "write into a row of a grid": written(lambda z: torch.meshgrid(z[0], z[:1, 0], indexing="xy")[0]),
    "write into a product": written(lambda z: torch.cartesian_prod(z[:, 0])),
    "maxima of equal rows": lambda y, x, ids: F.embedding_bag(ids, y.t() * 0, mode="max"),
    "no bags": lambda y, x, ids: y + F.embedding_bag(ids.flatten()[:0], x, torch.zeros(4, dtype=torch.long), mode="sum").sum(),
    "order backwards": in_order_and_backwards,
    "dtype of an empty part": lambda y, x, ids: torch.cat([torch.empty(0, 8, dtype=torch.float64), y]),
    "numbers by an empty part": lambda y, x, ids: torch.cat([torch.empty(4, 0), ids], 1) @ y[:, :6].t().repeat(2, 1)[:6],
    "nansum of numbers": lambda y, x, ids: y.scatter(1, torch.nansum(ids, 1, keepdim=True) % 2, 0.0),
    "one of a list": lambda y, x, ids: torch.broadcast_tensors(y)[0] + torch.unsafe_split(y, 4)[0] + aten.split_copy.Tensor(y, 8, 1)[0],
    "right sides of another batch": lambda y, x, ids: torch.linalg.solve(y.view(2, 4, 4) + 9 * torch.eye(4), x.view(2, 1, 4, 3)),
    "right sides for all": lambda y, x, ids: torch.linalg.solve(y.view(2, 4, 4) + 9 * torch.eye(4), x[:, :2]),
    "whole number of a sum": lambda y, x, ids: y * (x * 7).sum(0).sum(0, dtype=torch.int64),
    "whether a sum is": lambda y, x, ids: y * (x - x.flip(0)).sum(0).sum(0, dtype=torch.bool),
    "whole numbers on the way": lambda y, x, ids: y[:, :6] * (x * 7).sum(0).cumsum(0, dtype=torch.int64),
    "whole numbers in a place": lambda y, x, ids: y[:, :6] * torch.select_scatter(ids.view(2, 2, 6).sum(0), (x * 7).sum(0), 0, 0)[0],
    "fewer heads of values": lambda y, x, ids: F.scaled_dot_product_attention(heads(y), heads(y)[:, :2], heads(y)[:, :1], enable_gqa=True),
    "places in all": lambda y, x, ids: torch.take_along_dim(y, ids[:, :2].clone()),
    "one place of a row": lambda y, x, ids: y[:, 0].gather(0, torch.tensor(2)),
    "places in a number": lambda y, x, ids: y.sum().gather(0, torch.tensor([0])) + y.sum().index_fill(0, torch.tensor(0), 2.0),
    "one row of many": lambda y, x, ids: y.index_add(0, torch.tensor(3), y[:1]).index_copy(0, torch.tensor(1), y[:1]),
    "none of any": lambda y, x, ids: y * torch.any(y > 0, dim=[]) + torch.cat(y[:0].chunk(2)).sum(),
    "one length for all": lambda y, x, ids: torch._weight_norm(y, y.norm(), -1),
    "parts as they are": lambda y, x, ids: torch.cat([*torch.unsafe_split(y, 4, 1)[::-1], *aten.unbind_copy.int(y[:, None, :3], 1)], 1),
}


@pytest.mark.parametrize("name", SAME)
def test_a_plan_gives_the_same(name: str) -> None:
    given = example(SAME[name])
    found = autopar.verify(given.model, 2, given.batch, Manual(dp=2))
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-5


@pytest.mark.parametrize(
    "query, key, value, is_grouped",
    [((8, 4, 8), (4, 4, 8), (4, 4, 8), True), ((2, 4, 8, 4), (2, 1, 8, 4), (2, 4, 8, 4), False)],
    ids=["no batch", "one head of keys"],
)
def test_causal_attention_is_shared_by_its_queries(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], is_grouped: bool
) -> None:
    def made(y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.reshape(-1)[: math.prod(shape)].view(shape) for shape in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

    torch.manual_seed(0)
    batch = {"x": torch.randn(32, 6), "ids": torch.randint(6, (32, 6))}
    found = autopar.verify(Spelled(made), 2, batch, Manual(cp=2))
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-5


@pytest.mark.parametrize(
    "made, text",
    [
        (lambda y, x, ids: y.t().as_strided((4, 4), (1, 4)), "as_strided reads a view"),
        (lambda y, x, ids: y[:, 2:].as_strided((4, 4), (8, 1)), "as_strided reads a view"),
        (lambda y, x, ids: y[:2].as_strided((4, 8), (8, 1)), "as_strided reads a view"),
        (lambda y, x, ids: torch.nansum(y, dim=[]), "leave dim out"),
        (lambda y, x, ids: y + torch.empty(4, 8).random_(0, 5), "in a way that torch has no function for"),
    ],
    ids=["transposed", "columns", "beyond", "no dim", "random"],
)
def test_what_cannot_be_told_is_refused(made: Made, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        autopar.plan(example(made).model, 2, example(made).batch)


def test_what_looks_at_values_is_refused() -> None:
    given = example(lambda y, x, ids: y * torch.bincount(ids[:, 0], minlength=8))
    with pytest.raises(CaptureError, match=r"bincount.default looks at values of tensors"):
        autopar.verify(given.model, 2, given.batch, Manual(dp=2))


def test_numbers_around_a_mean_give_it_no_gradient() -> None:
    module = normal_of(example(lambda y, x, ids: torch.normal(y, y.abs())))
    drawn = module.graph.find_nodes(op="call_function", target=torch.ops.aten.erfinv.default)
    reached = {user for node in drawn for user in node.users} | {user for node in drawn for mid in node.users for user in mid.users}
    assert reached
    assert not any(spec_of(node).requires_grad for node in reached)


class Drawn(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        normal, like = torch.randn(4, 5000, dtype=torch.complex64), torch.randn_like(x + 1j)
        return normal * x, like * x, torch.rand(4, 5000, dtype=torch.complex64) * x


def test_complex_numbers_have_both_parts() -> None:
    given = Example(Drawn(), {"x": torch.ones(4, 5000)})
    for found, deviation in zip(evaluate(normal_of(given), given), [0.5**0.5, 0.5**0.5, 12**-0.5], strict=True):
        assert [float(part.std()) for part in (found.real, found.imag)] == pytest.approx([deviation] * 2, rel=0.05)
        assert abs(torch.corrcoef(torch.stack([found.real.flatten(), found.imag.flatten()]))[0, 1]) < 0.05


class Reduced(nn.Module):
    """With class weights, as many as a part of the batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return F.cross_entropy(out, labels, weights) + out.std()


def test_an_input_that_has_as_many_rows_as_a_part_is_whole_in_each_part() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6), "labels": torch.randint(2, (4,)), "weights": torch.tensor([1.0, 5.0])}
    found = autopar.verify(Reduced(), 2, batch, Manual(tp=2, microbatches=2), average_microbatches=True)
    assert max(found.loss_error, found.grad_error) < 1e-6
