"""Ops that make tensors of sizes given as numbers: every rank makes the whole."""

from __future__ import annotations

import torch

from autopar.rules.lines import whole
from autopar.rules.registry import register

aten = torch.ops.aten

register(
    [
        aten.scalar_tensor.default, aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format,
        aten.eye.default, aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default,
        aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default,
    ],
    whole,
)  # fmt: skip
