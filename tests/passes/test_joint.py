"""A graph and its backward recorded as one graph: the numbers of autograd, by functions alone, and what is known of each node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from autopar.passes.joint import BACKWARD, Telling, trace_forward, trace_joint
from autopar.trace import mutates

aten = torch.ops.aten
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PLAIN: dict[str, Function] = {
    "linear": lambda x, y: F.linear(x, y),
    "silu": lambda x, y: F.silu(x) * y,
    "softmax": lambda x, y: F.softmax(x, -1) @ y.mT,
    "used twice": lambda x, y: x * y + x,
    "product": lambda x, y: (x * y).cumprod(-1),
}
WRITING: dict[str, Function] = {
    "maximum": torch.maximum,
    "norm": lambda x, y: F.normalize(x, dim=-1) + y,
    "rms_norm": lambda x, y: F.rms_norm(x, (5,), y[0]),
    "std": lambda x, y: x.std(-1) * y[:, 0],
}


def given() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def joint_of(function: Function) -> tuple[fx.GraphModule, torch.Tensor]:
    """The joint graph, and a gradient that comes in."""
    tangent = torch.randn_like(function(*given()))
    return trace_joint(lambda *inputs: [function(*inputs)], given(), [tangent], [0]), tangent


@pytest.mark.parametrize("name", [*PLAIN, *WRITING])
def test_outputs_and_gradients_are_those_of_autograd(name: str) -> None:
    function = (PLAIN | WRITING)[name]
    joint, tangent = joint_of(function)
    inputs = given()
    output = function(*inputs)
    want = torch.autograd.grad(output, inputs, tangent, allow_unused=True)
    found = joint(*(x.detach() for x in inputs), tangent)
    torch.testing.assert_close([x for x in found if x is not None], [output.detach(), *(x for x in want if x is not None)])
    assert [x is None for x in found[1:]] == [x is None for x in want]
    assert not any(mutates(node) for node in joint.graph.nodes)
    assert [node.name for node in joint.graph.find_nodes(op="placeholder")] == ["primals_1", "primals_2", "tangents_1"]


@pytest.mark.parametrize("name", WRITING)
def test_formulas_that_write_become_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are such formulas: without the step that makes functions of them, the graph has ops that write."""
    monkeypatch.setattr("autopar.passes.joint._functional", lambda module, *_: module)
    assert any(mutates(node) for node in joint_of(WRITING[name])[0].graph.nodes)


def test_the_backward_of_silu_is_one_op() -> None:
    joint, _ = joint_of(lambda x, y: F.silu(x) * y)
    targets = [node.target for node in joint.graph.nodes]
    assert aten.silu_backward.default in targets
    assert aten.sigmoid.default not in targets


@pytest.mark.parametrize("writing", [False, True])
def test_a_backward_knows_what_its_forward_is(writing: bool) -> None:
    """Gradients that are added up are of no node; with functions made of what writes, nodes know the same."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(aten.mul.Tensor, (x, y))
    last = graph.call_function(aten.maximum.default if writing else aten.tanh.default, (first, y) if writing else (first,))
    whole = graph.call_function(aten.add.Tensor, (last, first))
    for node in (first, last):
        node.meta["custom"] = {"of": node.name}
    graph.output((whole,))
    joint = trace_joint(Telling(fx.GraphModule({}, graph)).run, given(), [torch.ones(4, 5, dtype=torch.float64)], [0])

    def known(target: object, *, backward: bool) -> list[object]:
        nodes = [node for node in joint.graph.nodes if node.target is target]
        return [n.meta.get("custom", {}).get("of") for n in nodes if (n.meta.get("partitioner_tag") == BACKWARD) is backward]

    assert known(aten.mul.Tensor, backward=False) == [first.name]
    assert known(aten.mul.Tensor, backward=True) == [first.name] * 2
    if writing:
        assert known(aten.masked_fill.Scalar, backward=True) == [last.name] * 2
    else:
        assert known(aten.tanh_backward.default, backward=True) == [last.name]
    assert known(aten.add.Tensor, backward=False) == [None]
    assert None in known(aten.add.Tensor, backward=True)


def test_where_it_is_recorded_gradients_may_be_off() -> None:
    plain = [node.target for node in joint_of(PLAIN["silu"])[0].graph.nodes]
    with torch.no_grad():
        assert [node.target for node in joint_of(PLAIN["silu"])[0].graph.nodes] == plain


class Watched(torch.autograd.Function):
    """Twice its operand; notes whether its backward may run in another thread."""

    threads: list[bool]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        Watched.threads.append(torch._C._is_multithreading_enabled())
        return 2 * grads[0]


def test_the_backward_is_recorded_where_the_forward_is() -> None:
    """That of tensors on a GPU would run in a thread of its own, which records nothing."""
    Watched.threads = []
    trace_joint(lambda x, y: [Watched.apply(x) * y], given(), [torch.ones(4, 5, dtype=torch.float64)], [0])
    assert Watched.threads == [False]
    assert torch._C._is_multithreading_enabled()


def test_an_autocast_in_force_adds_no_casts() -> None:
    def traced() -> list[object]:
        inputs = [torch.randn(4, 5, requires_grad=True) for _ in range(2)]
        joint = trace_joint(lambda x, y: [F.linear(x, y).exp()], inputs, [torch.ones(4, 4)], [0])
        return [node.target for node in joint.graph.nodes]

    plain = traced()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert traced() == plain


def test_a_forward_alone_is_of_functions_too() -> None:
    forward = trace_forward(lambda x, y: [F.rms_norm(x, (5,), y[0])], given())
    assert not any(mutates(node) for node in forward.graph.nodes)
    x, y = (x.detach() for x in given())
    torch.testing.assert_close(list(forward(x, y)), [F.rms_norm(x, (5,), y[0])])
