"""Local graph -> one graph of all that it and its backward compute, op by op.

`make_fx` records what autograd runs on fake tensors. AOTAutograd, which is made of that, runs the graph twice more to make functions of ops
that write into what they are given. A local graph has none (`trace` refuses models that write), and little that autograd adds does, as the
backwards of norms and maxima: only then is what was recorded made one of functions. So it takes three fifths of the time
(`benchmarks/differentiate.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from autopar.trace import mutates

BACKWARD = "is_backward"
"""``meta["partitioner_tag"]`` of what autograd adds."""

Run = Callable[..., Iterable[torch.Tensor]]
"""Tensors -> tensors, as ``fx.Interpreter(graph).run``."""


def trace_forward(run: Run, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """What ``run`` computes of ``inputs``."""

    def recorded(primals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [*run(*primals)]

    return _functional(_record(recorded, inputs), inputs, [])


def trace_joint(
    run: Run, inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor], differentiable: Sequence[int]
) -> fx.GraphModule:
    """What ``run`` computes, and then its backward.

    Args:
        run: writes into none of its inputs; that of `Telling` hands on what is known of the nodes of a graph.
        inputs: a gradient is made for each that requires one.
        tangents: gradients of outputs.
        differentiable: of each of ``tangents``, the position of the output.

    Returns:
        a graph of the inputs and tangents -> the outputs, then for each input its gradient or None.
    """

    def recorded(primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        wanted = [x for x in primals if x.requires_grad]
        with torch.enable_grad():
            outputs = [*run(*primals)]
        traceback.get_current_meta()["partitioner_tag"] = BACKWARD
        made = iter(torch.autograd.grad([outputs[i] for i in differentiable], wanted, tangents, allow_unused=True))
        return [*outputs, *(next(made) if x.requires_grad else None for x in primals)]

    return _functional(_record(recorded, inputs, tangents), inputs, tangents)


def _record(run: Callable[..., Sequence[Any]], *args: Sequence[torch.Tensor]) -> fx.GraphModule:
    """What autograd runs in this thread, on GPUs too; the graph has the casts of an autocast already (`autopar.precision`)."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(traceback.preserve_node_meta())
        module = make_fx(run, tracing_mode="fake")(*map(list, args))
    module.graph.eliminate_dead_code()
    module.graph.set_codegen(fx.graph.CodeGen())  # flat inputs and outputs
    return fx.GraphModule(module, module.graph)


def _functional(module: fx.GraphModule, inputs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same with functions in place of ops that write into what they are given."""
    if not any(mutates(node) for node in module.graph.nodes):
        return module
    run = torch.func.functionalize(fx.Interpreter(module).run, remove="mutations")

    def recorded(primals: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]) -> Any:
        return run(*primals, *tangents)

    return _record(recorded, [x.detach() for x in inputs], tangents)


class Telling(fx.Interpreter):
    """Runs a graph, and tells the nodes of autograd what the node that they come of has in ``meta["custom"]``, for what they add."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.told = set[torch.autograd.graph.Node]()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            new = [x.grad_fn for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
            while new:
                function = new.pop()
                if function not in self.told:
                    self.told.add(function)
                    _tell(function, n.meta.get("custom"))
                    new += [before for before, _ in function.next_functions if before is not None]
        return result


def _tell(function: torch.autograd.graph.Node, custom: object) -> None:
    def begin(_: object) -> None:
        traceback.get_current_meta()["custom"] = custom

    def end(*_: object) -> None:
        traceback.get_current_meta().pop("custom", None)

    if custom:
        function.register_prehook(begin)
        function.register_hook(end)
