"""Large float32 matrix products on CPUs by oneDNN, which torch carries but asks for bfloat16 only.

`aten.mm` calls MKL. Of the products of a layer, x w' is 1.02 to 1.31 and g w 1.04 to 1.20 times as fast by oneDNN on the AMD EPYC that was
measured first, and both about twice as fast on one with AVX-512, which MKL leaves alone there (`benchmarks/products.py` and its records);
g' x, 0.87 to 1.18 times on the first, stays with `aten.mm`.
"""

from __future__ import annotations

import torch

LEAST_FLOPS = 2**24
"""A call costs 12 us more than one of `aten.mm`; below this many flops, 0.2 ms of one core, a gain of a tenth does not win that back."""


def takes(device: torch.device, dtype: torch.dtype, flops: float) -> bool:
    """Whether a product with a left operand that lies row by row goes to oneDNN, which `torch.backends.mkldnn.flags` can switch off."""
    mkldnn = torch.backends.mkldnn
    return device.type == "cpu" and dtype == torch.float32 and flops >= LEAST_FLOPS and mkldnn.is_available() and bool(mkldnn.enabled)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.t() + bias``, by the private op through which Inductor reaches oneDNN: torch has no public one for float32.

    Args:
        x: rows x in, row by row.
        weight: out x in, with any strides.
        bias: out.

    Returns:
        rows x out.
    """
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result
