"""A graph and its backward recorded as one graph: the numbers of autograd, by functions alone, and what is known of each node."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from autopar import Manual
from autopar.capture.writes import mutates
from autopar.graph import specs_of
from autopar.passes.joint import BACKWARD, trace_forward, trace_joint
from autopar.rules.samples import Sample, samples
from tests.marks import few
from tests.planning import compiled

aten = torch.ops.aten
DEPEND_ON_NUMBERS = {aten.nonzero.default}
"""What gives a shape that no fake tensor can tell."""
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


def graph_of(function: Function) -> fx.GraphModule:
    """A graph of one call."""
    graph = fx.Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"), graph.placeholder("y"))),))
    return fx.GraphModule({}, graph)


def joint_of(function: Function) -> tuple[fx.GraphModule, torch.Tensor]:
    """The joint graph, and a gradient that comes in."""
    tangent = torch.randn_like(function(*given()))
    return trace_joint(graph_of(function), given(), [tangent], [0]), tangent


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
    monkeypatch.setattr("autopar.passes.recording._functional", lambda *parts: parts[2:])
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
    joint = trace_joint(fx.GraphModule({}, graph), given(), [torch.ones(4, 5, dtype=torch.float64)], [0])

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


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_where_it_is_recorded_gradients_may_be_off(off: Callable[[], AbstractContextManager[None]]) -> None:
    plain = [node.target for node in joint_of(PLAIN["silu"])[0].graph.nodes]
    with off():
        assert [node.target for node in joint_of(PLAIN["silu"])[0].graph.nodes] == plain


def chain(*functions: Callable[..., torch.Tensor]) -> fx.GraphModule:
    """A graph of calls, each of what the one before gives; the first takes ``x`` and ``y``."""
    graph = fx.Graph()
    value = graph.call_function(functions[0], (graph.placeholder("x"), graph.placeholder("y")))
    for function in functions[1:]:
        value = graph.call_function(function, (value,))
    graph.output((value,))
    return fx.GraphModule({}, graph)


def check_chain(*functions: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float64) -> None:
    """What is recorded of it gives the numbers of autograd."""
    local = chain(*functions)
    inputs = [x.detach().to(dtype).requires_grad_() for x in given()]
    (output,) = local(*inputs)
    tangent = torch.randn_like(output)
    joint = trace_joint(local, inputs, [tangent], [0])
    want = [output.detach(), *torch.autograd.grad(output, inputs, tangent)]
    torch.testing.assert_close(list(joint(*(x.detach() for x in inputs), tangent)), want)


def test_a_value_that_lies_apart_from_the_start_of_its_memory() -> None:
    check_chain(lambda x, y: (x * y)[1], lambda z: z.as_strided((3,), (1,), 6), torch.exp)


def test_a_call_that_writes_has_a_gradient() -> None:
    """What it writes into is its own."""
    check_chain(lambda x, y: (x * y).mul_(2).add_(y), torch.tanh)


def test_a_call_that_writes_beside_a_constant_has_a_gradient() -> None:
    """Which has a name of its own in the record of both."""
    check_chain(lambda x, y: (x * y).masked_fill(y > 0, torch.tensor(2.0)).mul_(2).exp(), torch.tanh)


def test_a_call_whose_gradients_lie_in_two_ways_has_two_backwards() -> None:
    check_chain(torch.mul, torch.exp, lambda z: z.sum(), lambda z: z * 2)
    check_chain(torch.mul, torch.exp, torch.exp, lambda z: z.sum())


def test_numbers_of_two_types_are_told_apart() -> None:
    def scaled(x: torch.Tensor, by: object) -> torch.Tensor:
        return x * {"True": 2, "1": 3, "1.0": 5, "0.0": 7, "-0.0": 11}[repr(by)]

    graph = fx.Graph()
    value = graph.placeholder("x")
    for by in (True, 1, 1.0, 0.0, -0.0):
        value = graph.call_function(scaled, (value, by))
    graph.output((value,))
    (x, _), one = given(), torch.ones(4, 5, dtype=torch.float64)
    output, gradient = trace_joint(fx.GraphModule({}, graph), [x], [one], [0])(x.detach(), one)
    torch.testing.assert_close([output, gradient], [x.detach() * 2310, one * 2310])


def test_bits_of_conjugates_and_negatives_go_along() -> None:
    """Whoever reads them makes real numbers of them, which the record of each call has to know."""

    def conjugate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).conj()

    local = chain(conjugate, torch.imag, lambda z: z * 2, lambda z: z.sum())
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(4, 5, dtype=torch.complex64, requires_grad=True) for _ in range(2)]
        tangent = torch.ones(())
    assert computed(trace_joint(local, inputs, [tangent], [0]).graph) == computed(recorded_whole(local, inputs, tangent).graph)
    check_chain(conjugate, torch.imag, lambda z: z * 2, dtype=torch.complex128)


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
    joint_of(lambda x, y: Watched.apply(x) * y)
    assert Watched.threads == [False]
    assert torch._C._is_multithreading_enabled()


def test_an_autocast_in_force_adds_no_casts() -> None:
    def traced() -> list[object]:
        inputs = [torch.randn(4, 5, requires_grad=True) for _ in range(2)]
        joint = trace_joint(graph_of(lambda x, y: F.linear(x, y).exp()), inputs, [torch.ones(4, 4)], [0])
        return [node.target for node in joint.graph.nodes]

    plain = traced()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert traced() == plain


def test_a_forward_alone_is_of_functions_too() -> None:
    forward = trace_forward(graph_of(lambda x, y: F.rms_norm(x, (5,), y[0])), given())
    assert not any(mutates(node) for node in forward.graph.nodes)
    x, y = (x.detach() for x in given())
    torch.testing.assert_close(list(forward(x, y)), [F.rms_norm(x, (5,), y[0])])


def recorded_whole(local: fx.GraphModule, inputs: list[torch.Tensor], tangent: torch.Tensor) -> fx.GraphModule:
    """The joint graph of a graph whose first output is a loss, as `make_fx` records it in one piece."""

    def step(*given: torch.Tensor) -> list[torch.Tensor | None]:
        primals, tangent = given[:-1], given[-1]
        outputs = fx.Interpreter(local).run(*primals)
        wanted = [x for x in primals if x.requires_grad]
        made = iter(torch.autograd.grad(outputs[0], wanted, tangent, allow_unused=True))
        return [*outputs, *(next(made) if x.requires_grad else None for x in primals)]

    module = make_fx(step, tracing_mode="fake")(*inputs, tangent)
    module.graph.eliminate_dead_code()
    return module


def computed(graph: fx.Graph) -> tuple[list[object], Counter[object]]:
    """What each output is made of, down to the inputs, and how often anything is computed, with shapes and strides; in any order."""
    made: dict[fx.Node, object] = {}
    for i, node in enumerate(graph.nodes):
        args = str(fx.node.map_arg((node.args, node.kwargs), lambda used: str(made[used])))
        vals = [(x.shape, x.stride(), x.dtype) for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        made[node] = i if node.op == "placeholder" else hash((node.target, args, str(vals)))
    (output,) = graph.find_nodes(op="output")
    return [made.get(node) for node in output.args[0]], Counter(made[node] for node in made if node is not output)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(1, ["gpt2", "bert", "mlp"]))
def test_it_is_what_torch_records_of_the_whole(name: str) -> None:
    _, made = compiled(name, Manual(dp=2, tp=2, zero=3), 0.1)
    specs = [specs_of(node)[0] for node in made.local.graph.find_nodes(op="placeholder")]
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(spec.shape, dtype=spec.dtype, requires_grad=spec.requires_grad) for spec in specs]
        tangent = torch.ones(())
    whole = recorded_whole(made.local, inputs, tangent)
    assert not any(mutates(node) for node in whole.graph.nodes)  # they would be others than functions
    assert computed(trace_joint(made.local, inputs, [tangent], [0]).graph) == computed(whole.graph)


def of_sample(sample: Sample) -> tuple[fx.GraphModule, list[torch.Tensor], list[torch.Tensor]]:
    """A graph of one call, its inputs, and its outputs as the call gives them."""
    args, kwargs = sample.draw()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    graph = fx.Graph()
    given = [graph.placeholder(f"x{i}") if isinstance(leaf, torch.Tensor) else leaf for i, leaf in enumerate(leaves)]
    call = graph.call_function(sample.call.target, *pytree.tree_unflatten(given, spec))
    torch.manual_seed(0)
    result = sample.call.target(*args, **kwargs)
    several = isinstance(result, tuple | list)
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in range(len(result))) if several else (call,))
    return fx.GraphModule({}, graph), [x for x in leaves if isinstance(x, torch.Tensor)], list(result) if several else [result]


@pytest.mark.slow
def test_every_op_has_its_outputs_and_gradients() -> None:
    """The numbers of autograd."""
    first = {sample.op: sample for sample in reversed([*samples()]) if sample.op not in DEPEND_ON_NUMBERS}
    assert len(first) > 400
    for sample in first.values():
        module, inputs, outputs = of_sample(sample)
        differentiable = [i for i, x in enumerate(outputs) if x.requires_grad]
        tangents = [torch.rand_like(outputs[i]) for i in differentiable]
        wanted = [i for i, x in enumerate(inputs) if x.requires_grad and differentiable]
        made: Sequence[torch.Tensor | None] = ()
        if wanted:
            made = torch.autograd.grad([outputs[i] for i in differentiable], [inputs[i] for i in wanted], tangents, allow_unused=True)
        joint = trace_joint(module, inputs, tangents, differentiable)
        torch.manual_seed(0)
        found = joint(*(x.detach() for x in inputs), *tangents)
        gradients = [found[len(outputs) + i] for i in wanted]
        for have, want in zip([*found[: len(outputs)], *gradients], [*(x.detach() for x in outputs), *made], strict=True):
            assert (have is None) == (want is None), sample
            if want is not None:
                torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12, equal_nan=True, msg=str(sample.op))
