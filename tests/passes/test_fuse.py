"""Biases are fused where nothing stands between product and addition, and only there; so are backwards of SiLU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import autopar
from autopar.compile import compile_plan
from autopar.passes.fuse import fuse_silu_backwards
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


def test_the_backward_of_silu_is_one_op() -> None:
    x, grad = torch.randn(5, requires_grad=True), torch.randn(5)
    with FakeTensorMode() as mode:
        joint = aot_export_joint_simple(lambda x: (torch.nn.functional.silu(x),), (mode.from_tensor(x),), trace_joint=True)
    assert isinstance(joint, fx.GraphModule)
    ops = [node.target for node in fuse_silu_backwards(joint).graph.find_nodes(op="call_function", target=aten.silu_backward.default)]
    assert len(ops) == 1
    assert not joint.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
    _, found = fx.Interpreter(joint).run([x.detach()], [grad])
    torch.testing.assert_close(found[0], torch.autograd.grad(torch.nn.functional.silu(x), x, grad)[0])


def nearly(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The formula with another number."""
    s = aten.sigmoid(x)
    rest = aten.sub(aten.fill(aten.empty_like(s), 1), s)
    y: torch.Tensor = aten.mul(grad, aten.mul(s, aten.add.Scalar(aten.mul(x, rest), 2)))
    return y


def test_what_is_not_the_backward_of_silu_stays() -> None:
    x, grad = torch.randn(5), torch.randn(5)
    module = make_fx(nearly)(x, grad)
    before = [node.target for node in module.graph.nodes]
    assert [node.target for node in fuse_silu_backwards(module).graph.nodes] == before
    torch.testing.assert_close(module(x, grad), nearly(x, grad))
