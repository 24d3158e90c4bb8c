"""Measures the host: how long it takes to launch ops of a model on CUDA, and the update of a parameter.

What is launched is tiny, so that the device waits for the host: blocks of a transformer, forward and backward, whose ops and views are
counted as they pass the dispatcher; then AdamW on parameters that are DTensors, as those of parallel models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.pricing import BACKWARD_OPS
from autopar.cost.timing import time_calls
from autopar.report import Report

WIDTH, HEADS, TOKENS, BLOCKS = 64, 4, 16, 8
PARAMETERS = 64
CALLS, REPEATS = 3, 15
"""Timed together, each some hundred ops; and how often, for hosts have other things to do."""


class _Block(nn.Module):
    """Attention and an MLP, as they stand in GPT-2 and Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.view(1, TOKENS, HEADS, -1).transpose(1, 2) for part in self.heads(self.norms[0](x)).split(WIDTH, dim=-1))
        queries, keys, values = heads
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(1, TOKENS, WIDTH))
        wide = self.wide(self.norms[1](x))
        gated = 0.5 * wide * (1 + torch.tanh(0.8 * (wide + 0.04 * wide * wide * wide)))
        result: torch.Tensor = x + self.narrow(gated)
        return result


class _Counter(TorchDispatchMode):
    """Counts ops of aten, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def measure_dispatch(device_mesh: DeviceMesh, device: torch.device, report: Report) -> tuple[float, float]:
    """Seconds to launch an op, and the update of a parameter (`DeviceProfile.dispatch_s`, ``update_dispatch_s``)."""
    model = nn.Sequential(*(_Block() for _ in range(BLOCKS))).to(device, torch.bfloat16)
    x = torch.randn(1, TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    with _Counter() as counter, torch.no_grad():
        model(x)
    parameters = list(model.parameters())
    step = time_calls(lambda: torch.autograd.grad(model(x).sum(), parameters), device, calls=CALLS, repeats=REPEATS)
    op_s = step.median_s / (counter.ops * (1 + BACKWARD_OPS))
    report(f"dispatch: {op_s * 1e6:.1f} us an op, {counter.ops} forward; {step}")
    held = [Replicate()] * device_mesh.ndim
    grads = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(PARAMETERS)]
    stored = [nn.Parameter(DTensor.from_local(grad.clone(), device_mesh, held, run_check=False)) for grad in grads]
    optimizer = torch.optim.AdamW(stored, 1e-3)

    def update() -> None:
        for parameter, grad in zip(stored, grads, strict=True):
            parameter.grad = DTensor.from_local(grad, device_mesh, held, run_check=False)
        optimizer.step()
        optimizer.zero_grad()

    timing = time_calls(update, device, calls=CALLS, repeats=REPEATS)
    report(f"update of a parameter: {timing.median_s / PARAMETERS * 1e6:.1f} us; of {PARAMETERS} {timing}")
    return op_s, timing.median_s / PARAMETERS
