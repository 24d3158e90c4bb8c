"""The cut between forward and backward: what is saved, what is made again, and that the gradients are right."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from autopar import Manual
from autopar.compile import compile_plan
from autopar.passes.differentiate import Halves, differentiate
from autopar.rules.registry import TensorSpec
from tests.planning import compiled, num_of, opened, planned

_c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def local_graph(*, scalar: bool = True, second: bool = False) -> fx.GraphModule:
    """Outputs of ``sum(gelu(x @ w.t()))``, with gradients of ``w`` only."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["specs"] = (TensorSpec((4, 6), torch.float64),)
    w.meta["specs"] = (TensorSpec((8, 6), torch.float64, True),)
    y = graph.call_function(aten.linear.default, (x, w))
    y = graph.call_function(aten.gelu.default, (y,))
    y.meta["specs"] = (TensorSpec((4, 8), torch.float64, True),)
    total = graph.call_function(aten.sum.default, (y,))
    total.meta["specs"] = (TensorSpec((), torch.float64, True),)
    graph.output(((total,) if scalar else ()) + ((y,) if second or not scalar else ()))
    return fx.GraphModule({}, graph)


def cut(module: fx.GraphModule, *, training: bool = True) -> Halves:
    return differentiate(module, gather_again=[], device=torch.device("cpu"), training=training)


def run(halves: Halves, x: torch.Tensor, w: torch.Tensor, *tangents: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients."""
    assert halves.backward is not None
    results = halves.forward(x, w)
    return list(results[: halves.num_outputs]), list(halves.backward(*results[halves.num_outputs :], *tangents))


@pytest.mark.parametrize("second", [False, True])
def test_gradients_of_the_scalar(second: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    halves = cut(local_graph(second=second))
    assert (halves.differentiable, halves.with_grad) == ((0,), (1,))
    outputs, (grad,) = run(halves, x, w.detach(), torch.tensor(3.0, dtype=torch.float64))
    expected = torch.nn.functional.gelu(x @ w.T)
    (expected.sum() * 3).backward()
    torch.testing.assert_close(outputs, [expected.sum().detach(), expected.detach()][: 1 + second])
    torch.testing.assert_close(grad, w.grad)


def test_gradients_of_a_tensor() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    tangent = torch.randn(4, 8, dtype=torch.float64)
    halves = cut(local_graph(scalar=False))
    _, (grad,) = run(halves, x, w.detach(), tangent)
    torch.nn.functional.gelu(x @ w.T).backward(tangent)
    torch.testing.assert_close(grad, w.grad)


def test_without_training_there_is_no_backward() -> None:
    halves = cut(local_graph(), training=False)
    assert halves.backward is None
    assert (halves.differentiable, halves.with_grad) == ((), ())
    (total,) = halves.forward(torch.ones(4, 6, dtype=torch.float64), torch.ones(8, 6, dtype=torch.float64))
    assert float(total) == pytest.approx(32 * 6)


def count(module: fx.GraphModule | None, target: object) -> int:
    """How many tensors an op is for."""
    assert module is not None
    return sum(num_of(node) for node in module.graph.nodes if node.target is target)


def saved_sizes(halves: Halves) -> list[int]:
    (output,) = halves.forward.graph.find_nodes(op="output")
    saved = [node.meta["val"] for node in output.args[0][halves.num_outputs :] if node.op != "placeholder"]
    return [x.numel() for value in saved for x in (value if isinstance(value, tuple) else (value,))]


WEIGHT = 32 * 64
"""Elements of a weight of the MLP: larger than all of its activations."""


def test_zero_3_gathers_again_and_saves_no_copy() -> None:
    _, made = compiled("mlp", Manual(dp=4, zero=3))
    gathers = count(made.halves.forward, _c10d.all_gather_into_tensor.default)
    assert gathers >= 6  # every parameter of the block
    assert count(made.halves.backward, _c10d.all_gather_into_tensor.default) >= 2  # the weights that the backward needs
    assert WEIGHT not in saved_sizes(made.halves)


@pytest.mark.parametrize("zero", [1, 2])
def test_zero_1_and_2_keep_the_copy(zero: int) -> None:
    _, made = compiled("mlp", Manual(dp=4, zero=zero))
    assert count(made.halves.forward, _c10d.all_gather_into_tensor.default) >= 6
    assert count(made.halves.backward, _c10d.all_gather_into_tensor.default) == 0
    assert WEIGHT in saved_sizes(made.halves)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_reduces_every_gradient_once(zero: int) -> None:
    _, made = compiled("mlp", Manual(dp=4, zero=zero))
    assert count(made.halves.backward, _c10d.reduce_scatter_tensor.default) == 6
    assert count(made.halves.backward, _c10d.all_reduce.default) == 0


def test_data_parallel_reduces_every_gradient_once() -> None:
    _, made = compiled("mlp", Manual(dp=4))
    assert made.halves.backward is not None
    together = made.halves.backward.graph.find_nodes(op="call_function", target=_c10d.all_reduce_coalesced_.default)
    assert [len(node.all_input_nodes) for node in together] == [6]  # they are small
    assert count(made.halves.backward, _c10d.all_reduce.default) == count(made.halves.backward, _c10d.all_reduce_.default) == 0
    assert count(made.halves.backward, _c10d.all_gather_into_tensor.default) == 0


def test_graphs_can_be_printed_while_they_are_traced() -> None:
    """As with TORCH_TRACE, and under pytest: torch prints what it traces, and has a use of its own for ``meta["recompute"]``."""
    _, session = opened("mlp")
    plan = planned(session, Manual(dp=2))
    made = compile_plan(session.normal, plan, device=torch.device("cpu"), training=False)
    assert made.halves.backward is None
    assert "recompute" not in made.local.print_readable(print_output=False)


def given(*, copied: str) -> fx.GraphModule:
    """The sum of ``tanh(x @ w.t())``, and copies of values that are called so."""
    graph = fx.Graph()
    specs = {"x": TensorSpec((4, 6), torch.float64), "w": TensorSpec((8, 6), torch.float64, True)}
    values = {name: graph.placeholder(name) for name in specs}

    def call(name: str, target: object, args: tuple[object, ...], shape: tuple[int, ...]) -> None:
        values[name] = graph.call_function(target, args)  # type: ignore[arg-type]
        specs[name] = TensorSpec(shape, torch.float64, True)

    call("linear", aten.linear.default, (values["x"], values["w"]), (4, 8))
    call("tanh", aten.tanh.default, (values["linear"],), (4, 8))
    call("total", aten.sum.default, (values["tanh"],), ())
    call("twice", aten.mul.Tensor, (values["tanh"], 2), (4, 8))
    call("turned", aten.t.default, (values["twice"],), (8, 4))
    for i, name in enumerate(copied.split()):
        copy = graph.call_function(aten.clone.default, (values[name],), {"memory_format": torch.contiguous_format})
        values[f"copy {i}"], specs[f"copy {i}"] = copy, specs[name]
    for name, node in values.items():
        node.meta["specs"] = (specs[name],)
    graph.output((values["total"], *(node for name, node in values.items() if name.startswith("copy"))))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    "copied, copies",
    [("twice", 0), ("tanh", 1), ("x", 1), ("w", 1), ("twice twice", 2), ("turned", 1), ("twice turned", 2)],
)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_are_copied_where_somebody_else_has_them(copied: str, copies: int, training: bool) -> None:
    """Inputs, what the backward keeps, another output; or where they do not lie as they should."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    halves = cut(given(copied=copied), training=training)
    found = halves.forward.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert len(found) == copies
    before, results = (x.clone(), w.clone()), list(halves.forward(x, w))
    kept = [result.clone() for result in results]
    for result in results[1 : halves.num_outputs]:
        assert result.is_contiguous()
        result.zero_()
    for i, (result, value) in enumerate(zip(results, kept, strict=True)):
        assert torch.equal(result, value) is not (1 <= i < halves.num_outputs)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])
