"""What stands in for kernels without float64 computes what they compute."""

from __future__ import annotations

import pytest
import torch

from autopar.ops.wide import InFloat64

grouped_mm = torch.ops.aten._grouped_mm.default

ENDS = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
"""Of four groups, one of them empty."""
SHAPES = {
    "rows": ((32, 16), (4, 16, 8)),
    "columns": ((4, 8, 16), (16, 32)),
    "sums": ((8, 32), (32, 16)),
    "all alike": ((4, 8, 16), (4, 16, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_products_of_groups_in_float64(name: str) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(shape) for shape in SHAPES[name])
    offs = None if name == "all alike" else ENDS
    expected = grouped_mm(x, y, offs=offs)
    with InFloat64():
        found = grouped_mm(x.double(), y.double(), offs=offs)
        same = grouped_mm(x, y, offs=offs)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found.float(), expected)
    assert torch.equal(same, expected)  # other dtypes have their kernel


def test_its_gradients_are_those_of_float32() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in SHAPES["rows"]]
    grads = list[list[torch.Tensor]]()
    for dtype in (torch.float32, torch.float64):
        x, y = (tensor.clone().to(dtype).requires_grad_() for tensor in tensors)
        with InFloat64():
            grouped_mm(x, y, offs=ENDS).square().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        grads.append([x.grad.float(), y.grad.float()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
