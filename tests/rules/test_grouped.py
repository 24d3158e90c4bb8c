"""Products of groups of rows, beside a product for each group; and whose they become."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  it defines an op
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import CaptureError
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton

grouped_mm = torch.ops.autopar.grouped_mm
ENDS = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
"""Of four groups, one of them empty, before the last of eight rows."""


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 5, dtype=torch.double, requires_grad=True), torch.randn(4, 5, 3, dtype=torch.double, requires_grad=True)


def test_each_group_has_its_matrix() -> None:
    x, weight = operands()
    expected = torch.cat([x[:2] @ weight[0], x[2:5] @ weight[2], x[5:7] @ weight[3], torch.zeros(1, 3)])
    torch.testing.assert_close(grouped_mm(x, weight, ENDS), expected)


def test_gradients() -> None:
    x, weight = operands()
    assert torch.autograd.gradcheck(lambda x, weight: grouped_mm(x, weight, ENDS), (x, weight))


def test_shapes_are_known_without_values() -> None:
    x, weight = (tensor.to("meta") for tensor in operands())
    found = grouped_mm(x, weight, ENDS.to("meta"))
    assert (found.shape, found.dtype, found.device.type) == ((8, 3), torch.double, "meta")


class Experts(nn.Module):
    """As `transformers` writes it where parameters are not in bfloat16; every fourth row goes to each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ends = nn.functional.one_hot(ids, 4).sum(0).cumsum(0).int()
        result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(x, self.weight, ends).square().sum()
        return result


def test_products_of_transformers_become_ours() -> None:
    given = torch.randn(8, 8), torch.arange(8) // 2
    targets = [node.target for node in open_session(make_skeleton(Experts()), given, {}).normal.module.graph.nodes]
    assert grouped_mm.default in targets
    assert torch.ops.transformers.grouped_mm_fallback.default not in targets
    found = autopar.verify(Experts(), 2, given, Manual(tp=2))
    assert max(found.loss_error, found.grad_error) < 1e-6, str(found)


@torch.library.custom_op("autopar_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: gradient * 2 if gradient.sum().item() else gradient)


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = doubled(super().forward(x)).sum()
        return result


@pytest.mark.filterwarnings("ignore::autopar.factors.MissingRuleWarning")
def test_a_backward_that_looks_at_values_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"backward of autopar_tests\.doubled\.default looks at values.*torch\.library\.custom_op"):
        autopar.verify(Doubling(4, 4), 2, (torch.randn(4, 4),), Manual(dp=2))
