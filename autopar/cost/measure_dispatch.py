"""Measures the host: how long it takes to launch ops of a model, and the update of a parameter.

What is launched is tiny, so that little but launching takes time: the graphs of blocks of a transformer, forward and backward, run as the
runtime runs them, and AdamW. On CUDA their time goes to all ops, views among them, and autograd calls the backward: it does so in a thread
of its own for each device, where a host may be slower. Plans of stages run their backwards in the thread of the forward, and are priced as
if they did not. On CPUs, where an op is launched by what runs it, it goes to the launches that `cost.pricing` counts: so views, which are
free there, count with the ops around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.capture.trace import capture
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.pricing import BACKWARD_OPS, Pricer
from autopar.cost.timing import time_calls
from autopar.graph import is_call, specs_of
from autopar.mesh import Mesh
from autopar.passes.differentiate import differentiate
from autopar.passes.launches import launch_fast
from autopar.passes.normal_form import normal_form
from autopar.report import Report

HEADS = 4
PARAMETERS, PARAMETER_WIDTH = 64, 64
CALLS, REPEATS = 3, 15
"""Timed together, each some hundred ops; and how often, for hosts have other things to do."""


class Size(NamedTuple):
    """Of a model: how many blocks, and the width and tokens of each."""

    blocks: int
    width: int
    tokens: int


ON_CUDA, ON_CPU = Size(8, 64, 16), Size(2, 16, 4)
"""What CPUs compute is so small that it takes no time."""
ONLY_LAUNCHES = MachineProfile(
    DeviceProfile("only launches", 2**40, (MatmulSample(1, 1, 1, "float32", 1e30),), 1e30, 1.0, "1 s a launch, the rest is free"),
    (LinkProfile(0.0, 1e30),),
)


class _Block(nn.Module):
    """Attention and an MLP, as they stand in GPT-2 and Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, tokens, width = x.shape
        heads = (part.view(1, tokens, HEADS, -1).transpose(1, 2) for part in self.heads(self.norms[0](x)).split(width, dim=-1))
        queries, keys, values = heads
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(1, tokens, width))
        wide = self.wide(self.norms[1](x))
        gated = 0.5 * wide * (1 + torch.tanh(0.8 * (wide + 0.04 * wide * wide * wide)))
        result: torch.Tensor = x + self.narrow(gated)
        return result


class _Model(nn.Module):
    """Blocks, and a loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(size.width) for _ in range(size.blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.blocks(x).sum()
        return loss


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of a model as its graphs take it.

    Args:
        ops: of the model.
        forward, backward: the graphs; the former gives ``num_outputs`` outputs, and what the latter takes.
        given: to the forward.
        tangent: of the loss.
    """

    ops: list[fx.Node]
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_outputs: int
    given: list[torch.Tensor]
    tangent: torch.Tensor

    @staticmethod
    @cache
    def of(device: torch.device, size: Size, dtype: torch.dtype) -> _Step:
        """Made once: who measures again times launches, and hosts change by the second."""
        with device:
            example = torch.randn(1, size.tokens, size.width, dtype=dtype)
            module = normal_form(capture(_Model(size).to(dtype), (example,), {}, symbolic=False), {})
            halves = differentiate(module, gather_again=(), device=device, training=True)
            given = [torch.randn(specs_of(node)[0].shape, dtype=dtype) for node in module.graph.find_nodes(op="placeholder")]
            tangent = torch.ones((), dtype=dtype)
        assert halves.backward is not None
        for half in (halves.forward, halves.backward):
            launch_fast(half.graph)
            half.recompile()
        ops = [node for node in module.graph.nodes if is_call(node)]
        return _Step(ops, halves.forward, halves.backward, halves.num_outputs, given, tangent)

    def run(self) -> None:
        results = self.forward(*self.given)
        self.backward(*results[self.num_outputs :], self.tangent)


class _ByAutograd(Function):
    """`_Step.run`, whose backward autograd calls, in the thread of the device that ``anchor`` is on."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, step: _Step) -> torch.Tensor:
        results = step.forward(*step.given)
        ctx.step, ctx.saved = step, results[step.num_outputs :]
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.step.backward(*ctx.saved, *tangents)
        return tangents[0], None


def measure_dispatch(device: torch.device, report: Report) -> float:
    """Seconds of the host to launch an op (`DeviceProfile.dispatch_s`)."""
    step = _Step.of(device, ON_CUDA, torch.bfloat16)
    anchor = torch.ones_like(step.tangent, requires_grad=True)
    timing = time_calls(lambda: torch.autograd.grad(_ByAutograd.apply(anchor, step), anchor), device, calls=CALLS, repeats=REPEATS)
    op_s = timing.median_s / (len(step.ops) * (1 + BACKWARD_OPS))
    report(f"dispatch: {op_s * 1e6:.1f} us an op, {len(step.ops)} forward; {timing}")
    return op_s


@torch.no_grad()
def measure_launch(report: Report) -> float:
    """Seconds that a CPU takes for an op of a model however small it is (`DeviceProfile.launch_overhead_s`)."""
    step = _Step.of(torch.device("cpu"), ON_CPU, torch.float32)
    timing = time_calls(step.run, torch.device("cpu"), calls=CALLS, repeats=REPEATS)
    pricer = Pricer(ONLY_LAUNCHES, Mesh.of(1))
    times = (pricer.op_time(node, None, {}, 1) for node in step.ops)
    launches = sum(float(time.forward_s[0] + time.backward_s[0]) for time in times)
    report(f"launch: {timing.median_s / launches * 1e6:.1f} us an op, {launches:.0f} in a model; {timing}")
    return timing.median_s / launches


def measure_update(device_mesh: DeviceMesh, device: torch.device, report: Report) -> float:
    """Seconds of the host to launch the update of a parameter by AdamW (`DeviceProfile.update_dispatch_s`) as the runtime has it, that of a
    tensor whose gradient comes in a DTensor."""
    held = [Replicate()] * device_mesh.ndim
    grads = [torch.randn(PARAMETER_WIDTH, PARAMETER_WIDTH, device=device) for _ in range(PARAMETERS)]
    stored = [nn.Parameter(grad.clone()) for grad in grads]
    optimizer = torch.optim.AdamW(stored, 1e-3)

    def update() -> None:
        for parameter, grad in zip(stored, grads, strict=True):
            parameter.grad = DTensor.from_local(grad, device_mesh, held, run_check=False).to_local()
        optimizer.step()
        optimizer.zero_grad()

    timing = time_calls(update, device, calls=CALLS, repeats=REPEATS)
    report(f"update of a parameter: {timing.median_s / PARAMETERS * 1e6:.1f} us; of {PARAMETERS} {timing}")
    return timing.median_s / PARAMETERS
