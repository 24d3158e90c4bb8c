"""Biases are fused where nothing stands between product and addition, and only there."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import autopar
from autopar.compile import compile_plan
from tests.models import gpt2

pytestmark = pytest.mark.slow

aten = torch.ops.aten


def counts(manual: autopar.Manual) -> Counter[object]:
    example = gpt2(layers=1)
    plan = autopar.plan(example.model, 2, example.batch, plan=manual)
    assert plan.normal is not None
    local = compile_plan(plan.normal, plan, device=torch.device("cpu"), training=False).local
    return Counter(node.target for node in local.graph.nodes)


def test_column_parallel_and_data_parallel_biases_are_fused() -> None:
    """Under data parallelism all four products of a block have their bias; under tensor parallelism the two row-parallel ones are
    reduced before the bias is added, once."""
    assert counts(autopar.Manual(dp=2))[aten.addmm.default] == 4
    tensor_parallel = counts(autopar.Manual(tp=2))
    assert tensor_parallel[aten.addmm.default] == 2
    assert tensor_parallel[aten.mm.default] == 2
