"""What FSDP adds to a step of one device, by when it gathers: its own code and streams, on collectives that a kernel stands in for.

    python benchmarks/fsdp_overlap.py

On one CUDA device, as one of eight ranks of which the others do not exist: each collective is the kernel of `paced` on a stream of its own,
as NCCL has one for a group, and takes what it would on NVLink 4. Eight blocks of a GPT of 13 billion parameters with 2 x 2,048 tokens in
bfloat16, each computed again. Shards are copied to where they are gathered, so that weights are numbers: products of what memory holds by
chance draw less power, and were a sixth faster. ``busy``: kernels other than collectives.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from paced import paced
from steps import step_times
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, NVLINK = 8, 370e9
WIDTH, HEADS, LAYERS, VOCABULARY, BATCH = 5120, 40, 8, 50368, (2, 2048)
WARM_UP, STEPS, TIMES = 3, 4, 4


class Block(nn.Module):
    """As those of MPT, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        parts = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.heads(self.norms[0](x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        result: torch.Tensor = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return result


class Model(nn.Module):
    """Blocks between an embedding and the same as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).flatten(0, 1).float(), tokens.flatten())


@dataclass(slots=True)
class Network:
    """What stands in for it: so many SMs for so many times as long as on NVLink; none of them: shards are copied, nothing else."""

    channels: int
    slower: float
    stream: torch.cuda.Stream
    num_bytes: int = 0

    def gather(self, *args: Any, **named: Any) -> Done | None:
        target, source = (*args, *(named[key] for key in ("output_tensor", "output", "input_tensor", "input") if key in named))[:2]
        if not self.channels:
            target.view(RANKS, -1).copy_(source.view(1, -1))
        self._pass(target, source)
        return Done() if named.get("async_op") else None

    def scatter(self, *args: Any, **named: Any) -> Done | None:
        source = (*args, *(named[key] for key in ("output", "output_tensor", "input", "input_tensor") if key in named))[1]
        self._pass(torch.empty_like(source) if self.channels else source, source)
        return Done() if named.get("async_op") else None

    def _pass(self, target: torch.Tensor, source: torch.Tensor) -> None:
        whole = target.numel() * target.element_size()
        self.num_bytes += whole
        if self.channels:
            self.stream.wait_stream(torch.cuda.current_stream())
            paced(target, source, self.slower * whole * (RANKS - 1) / RANKS / NVLINK, self.channels, self.stream)
            torch.cuda.current_stream().wait_stream(self.stream)


class Done:
    """Of a collective: streams wait for it already."""

    def wait(self) -> None:
        pass


def bare(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def fsdp1(model: nn.Module, prefetch: BackwardPrefetch | None) -> nn.Module:
    half = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=half,
        backward_prefetch=prefetch,
        use_orig_params=True,
        device_id=torch.device("cuda", 0),
    )


def fsdp2(model: nn.Module) -> nn.Module:
    settings: dict[str, Any] = {
        "mesh": dist.device_mesh.init_device_mesh("cuda", (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def busy_s(step: Callable[[], object]) -> float:
    """Seconds of a step in which kernels other than collectives run."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type.name == "CUDA" and e.name != "paced" and e.time_range.elapsed_us() > 0]
    found = end = 0.0
    for start, stop in sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels):
        found += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return found * 1e-6


def run(name: str, wrap: Callable[[nn.Module], nn.Module], network: Network) -> None:
    """A row of the table."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, tokens = Model(), torch.randint(VOCABULARY, BATCH)
    model = wrap(model)
    again = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=again, check_fn=lambda module: isinstance(module, Block))

    def step() -> None:
        model(tokens).backward()
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(WARM_UP):
        step()
    network.num_bytes = 0
    times = step_times(step, STEPS, TIMES)
    passed = network.num_bytes / (TIMES * STEPS)
    print(f"| {name} | {statistics.median(times) * 1e3:.1f} ms | {busy_s(step) * 1e3:.1f} ms | {passed / 1e9:.2f} GB |", flush=True)


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    stream = torch.cuda.Stream()
    ways = {
        "FSDP, BACKWARD_POST": partial(fsdp1, prefetch=BackwardPrefetch.BACKWARD_POST),
        "FSDP, BACKWARD_PRE": partial(fsdp1, prefetch=BackwardPrefetch.BACKWARD_PRE),
        "FSDP, no prefetch": partial(fsdp1, prefetch=None),
        "FSDP2": fsdp2,
    }
    print(f"| {torch.cuda.get_device_name()} | step | busy | passed around |\n|---|--:|--:|--:|")
    run("without FSDP", bare, Network(0, 1.0, stream))
    for channels, slower in ((0, 1.0), (24, 1.0), (8, 3.0)):
        for name, wrap in ways.items():
            network = Network(channels, slower, stream)
            for names, own in ((("all_gather_into_tensor", "all_gather_single"), network.gather),
                               (("reduce_scatter_tensor", "reduce_scatter_single"), network.scatter)):  # of torch 2.11 and 2.13
                for each in names:
                    setattr(dist, each, own)
            run(f"{name}, {f'{channels} SMs, {slower:g} times as long' if channels else 'shards copied'}", wrap, network)
            gc.collect()
            torch.cuda.empty_cache()
    run("without FSDP, again", bare, Network(0, 1.0, stream))


if __name__ == "__main__":
    main()
