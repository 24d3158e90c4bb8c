"""Problems small enough to enumerate: models of a few ops, machines of random speed, and the minimum by trying every assignment."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import nn

from autopar.compile import Normal
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.pricing import Pricer
from autopar.mesh import Mesh
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.build import build_problem
from autopar.solve.footprint import MemoryUse
from autopar.solve.prices import Prices
from tests import models


class Chain(nn.Module):
    """Three linears with pointwise ops between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in ((8, 16), (16, 8), (8, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(cast(torch.Tensor, layer(x)))
        return x.sum()


class Diamond(nn.Module):
    """One value with four consumers, two of which want it alike, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8, bias=False)
        self.right = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x @ self.left.weight, -1)
        return (y + cast(torch.Tensor, self.left(y)) * cast(torch.Tensor, self.right(y)) + y.sum(0)).sum()


class Attention(nn.Module):
    """A block of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in cast(torch.Tensor, self.qkv(x)).chunk(3, -1))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + cast(torch.Tensor, self.out(heads.transpose(1, 2).flatten(2)))).sum()


class Norms(nn.Module):
    """One norm, with its parameters, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.norm(x + cast(torch.Tensor, self.linear(self.norm(x))))).sum()


SMALL: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "chain": (Chain, (8, 8)),
    "diamond": (Diamond, (8, 8)),
    "attention": (Attention, (4, 4, 8)),
    "norms": (Norms, (8, 8)),
}


@cache
def small(name: str) -> Normal:
    """The normal graph of one of `SMALL`."""
    kind, shape = SMALL[name]
    return open_session(kind(), (torch.randn(shape),), {}).normal


@cache
def session(name: str, layers: int = 2) -> Session:
    """A captured model of `tests.models`."""
    example = cast(models.Example, getattr(models, name)(layers=layers))
    return open_session(make_skeleton(example.model), (), example.batch)


def machine(
    axes: int, *, launch_s: float = 1e-6, bandwidth: float = 1e10, alpha_s: float = 1e-6, link_bandwidth: float = 1e9
) -> MachineProfile:
    """A machine with equal links, whose ops on tiny tensors take microseconds."""
    samples = (MatmulSample(64, 64, 64, "float32", 1e10),)
    device = DeviceProfile("toy", 2**34, samples, bandwidth, launch_s, "made up")
    return MachineProfile(device, (LinkProfile(alpha_s, link_bandwidth),) * axes, "toy")


def random_machine(axes: int, seed: int) -> MachineProfile:
    """A machine where anything between a launch and a message may be what counts, over four orders of magnitude."""
    rng = random.Random(seed)
    device = machine(axes, launch_s=10 ** rng.uniform(-9, -5), bandwidth=10 ** rng.uniform(7, 11)).device
    links = tuple(LinkProfile(10 ** rng.uniform(-9, -5), 10 ** rng.uniform(7, 11)) for _ in range(axes))
    return MachineProfile(device, links, f"random {seed}")


def prices_of(normal: Normal, sizes: Sequence[int], profile: MachineProfile, *, share: bool = True, microbatches: int = 1) -> Prices:
    mesh, split = Mesh.of(sizes), normal.split(microbatches) if microbatches > 1 else None
    grid = mesh.with_time(microbatches) if split is not None else mesh
    problem = build_problem(normal.module, normal.factors, grid, split=split, share=share)
    return Prices(problem, Pricer(profile.for_mesh(mesh), grid))


def random_allowed(prices: Prices, seed: int, *, limit: int, include: Sequence[int] = ()) -> list[list[int]]:
    """Some variants of every cluster, ``limit`` assignments at most; the replicated one and ``include`` always among them."""
    rng = random.Random(seed)
    clusters = prices.problem.clusters
    allowed = [sorted({0, *([include[i]] if include else [])}) for i in range(len(clusters))]
    for _ in range(200):
        index = rng.randrange(len(clusters))
        more = sorted({*allowed[index], rng.randrange(len(clusters[index].variants))})
        if prod(len(rows) for i, rows in enumerate(allowed) if i != index) * len(more) <= limit:
            allowed[index] = more
    return allowed


def walk(prices: Prices, seed: int, *, steps: int = 60, every: int = 20) -> Iterator[list[int]]:
    """Assignments that have a way, from the first variants of all on: one cluster at a time takes another."""
    rng, clusters = random.Random(seed), prices.problem.clusters
    variants = [0] * len(clusters)
    for step in range(1, steps + 1):
        index, other = rng.randrange(len(clusters)), list(variants)
        other[index] = rng.randrange(len(clusters[index].variants))
        if np.isfinite(prices.objective(other).total_s):
            variants = other
        if step % every == 0:
            yield variants


class Tried(NamedTuple):
    """One assignment with what it costs."""

    variants: tuple[int, ...]
    time_s: float
    memory: MemoryUse


def enumerate_all(prices: Prices, allowed: Sequence[Sequence[int]]) -> Iterator[Tried]:
    """Every assignment that has a way."""
    for variants in product(*allowed):
        time_s = prices.objective(variants).total_s
        if np.isfinite(time_s):
            yield Tried(variants, time_s, prices.memory(variants))
