"""Large products whose left operand lies row by row go to oneDNN, with the same results; no others do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ops import onednn
from autopar.passes.products import lower_products

ROWS, INPUTS, OUTPUTS = 128, 256, 256
"""2**24 flops: the smallest product that is lowered."""

FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "forward": (lambda x, w, b, g: torch.addmm(b, x, w.t()), 1),
    "without bias": (lambda x, w, b, g: torch.mm(x, w.t()), 1),
    "gradient of the input": (lambda x, w, b, g: torch.mm(g, w), 1),
    "gradient of the weight": (lambda x, w, b, g: torch.mm(g.t(), x), 0),
    "too small": (lambda x, w, b, g: torch.mm(x[:-1], w.t()), 0),
    "scaled bias": (lambda x, w, b, g: torch.addmm(b, x, w.t(), beta=2), 0),
    "a sum that is no bias": (lambda x, w, b, g: torch.addmm(g, x, w.t()), 0),
}
"""What is traced, and how many of its products are lowered."""


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = (ROWS, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,), (ROWS, OUTPUTS)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lowered_products_are_equal(name: str) -> None:
    function, num_lowered = FUNCTIONS[name]
    given = operands(torch.float32)
    lowered = lower_products(make_fx(function, tracing_mode="fake")(*given))
    assert len(lowered.graph.find_nodes(op="call_function", target=onednn.linear)) == num_lowered
    torch.testing.assert_close(lowered(*given), function(*given), rtol=1e-5, atol=1e-4)


def test_other_dtypes_stay() -> None:
    function, _ = FUNCTIONS["forward"]
    lowered = lower_products(make_fx(function, tracing_mode="fake")(*operands(torch.float64)))
    assert not lowered.graph.find_nodes(op="call_function", target=onednn.linear)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the switch itself
def test_the_switch_of_torch_is_heeded() -> None:
    function, _ = FUNCTIONS["forward"]
    with torch.backends.mkldnn.flags(enabled=False):
        lowered = lower_products(make_fx(function, tracing_mode="fake")(*operands(torch.float32)))
    assert not lowered.graph.find_nodes(op="call_function", target=onednn.linear)


def test_error_is_that_of_float32() -> None:
    """Against float64: not further from it than twice `torch.mm` is."""
    x, w, b, _ = operands(torch.float64)
    exact = torch.addmm(b, x, w.t())
    single = [value.float() for value in (x, w, b)]
    mine = (onednn.linear(*single) - exact).abs().max()
    theirs = (torch.addmm(single[2], single[0], single[1].t()) - exact).abs().max()
    assert mine <= 2 * theirs
