"""Complex numbers in a model, as in rotary positions of Llama's own code: they follow the layout, have gradients, and travel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import Manual
from autopar.compile import compile_plan
from autopar.errors import PlanError
from autopar.layout import Layout
from autopar.ops.collectives import RESHARDS
from autopar.passes.reshard import plan_steps
from autopar.runtime.groups import activate, device_mesh
from tests.lockstep import coordinates, spread, value_layout
from tests.marks import few
from tests.ops.test_collectives import ATOMS, MESH, STEPS, ends, single_step
from tests.pool import RankPool

pytestmark = pytest.mark.slow

HEADS, WIDTH, VOCAB = 4, 32, 64


class Block(nn.Module):
    """Attention with queries and keys turned as complex numbers, and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (HEADS, -1)) for p in (self.q, self.k, self.v))
        q, k = (self.turned(z, turns) for z in (q, k))
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return y

    @staticmethod
    def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns[:, None]).flatten(-2).type_as(x)


class Rotary(nn.Module):
    """Two blocks that share their turns, which cross from one stage to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        angles = torch.outer(torch.arange(16), 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.turns: torch.Tensor
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.scale = nn.Parameter(torch.ones(4))  # so that the turns have gradients

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, turns = self.embed(tokens), self.turns[: tokens.shape[1]] * self.scale
        for block in self.blocks:
            x = block(x, turns)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Spectral(nn.Module):
    """A layer of a Fourier neural operator, whose weights are complex (Li et al. 2021)."""

    def __init__(self, channels: int = 8, modes: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.complex64) / channels)
        self.raised, self.direct = nn.Conv1d(1, channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.raised(x)
        waves = torch.fft.rfft(x)
        mixed = torch.einsum("bim,iom->bom", waves[..., : self.weight.shape[-1]], self.weight)
        y = torch.fft.irfft(F.pad(mixed, (0, waves.shape[-1] - mixed.shape[-1])), n=x.shape[-1])
        return F.mse_loss(F.gelu(y + self.direct(x)).mean(1, keepdim=True), labels)


class Written(nn.Module):
    """The layer as the first code of such operators has it, what was mixed written into zeros; and other writes."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = (nn.Parameter(torch.randn(4, 4, 2, dtype=torch.complex64)) for _ in range(2))
        self.direct = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft(x)
        mixed = torch.zeros(*waves.shape, dtype=torch.complex64)
        mixed[:, :, :2] = torch.einsum("bix,iox->box", waves[:, :, :2], self.low)
        mixed[..., -2:] = torch.einsum("bix,iox->box", waves[..., -2:], self.high).conj()
        mixed = mixed.conj()
        mixed[:, 0] = 0
        mixed[:, 1, 1::2] *= 2j
        mixed[..., 2] = x[..., 0]
        mixed[:, 2].zero_()
        y: torch.Tensor = (torch.fft.irfft(mixed, n=x.shape[-1]) + self.direct(x)).square().mean()
        return y


Batch = tuple[torch.Tensor, torch.Tensor]


def build(name: str = "rotary") -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    if name == "spectral":
        return Spectral(), (torch.randn(8, 1, 16), torch.randn(8, 1, 16))
    return Rotary(), (torch.randint(VOCAB, (8, 8)), torch.randint(VOCAB, (8, 8)))


@pytest.mark.parametrize(
    "name, plan",
    few(
        4,
        [
            ("rotary", Manual(cp=2, tp=2)),
            ("rotary", Manual(dp=2, pp=2, microbatches=2)),
            ("spectral", Manual(dp=2, tp=2, zero=3)),
            ("spectral", Manual(dp=4, zero=1, microbatches=2)),
            ("rotary", Manual(dp=2, tp=2, zero=3)),
            ("rotary", Manual(tp=4, sequence_parallel=True, recompute="full")),
        ],
    ),
    ids=str,
)
@pytest.mark.filterwarnings("ignore::autopar.solve.manual.UnusedSettingWarning")
def test_a_plan_equals_the_model(name: str, plan: Manual) -> None:
    model, batch = build(name)
    found = autopar.verify(model, 4, batch, plan)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)
    assert found.loss_error <= 1e-6, str(found)


@pytest.mark.parametrize("plan", [Manual(dp=2, zero=3), Manual(tp=2), Manual(dp=2, microbatches=2)], ids=str)
def test_parts_are_written(plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(Written(), 2, (torch.randn(4, 4, 8),), plan)
    assert found.grad_error <= 4 * found.reference_error + 1e-7, str(found)
    assert found.output_error <= 1e-6, str(found)


def test_heads_are_shared_without_a_reshard_of_their_numbers() -> None:
    model, batch = build()
    plan = autopar.plan(model, autopar.Cluster(1, 4, "h100"), batch, plan=Manual(tp=4))
    assert plan.normal is not None
    local = compile_plan(plan.normal, plan, device=torch.device("cpu"), training=True).local
    for node in local.graph.nodes:
        if node.target in RESHARDS:
            assert node.meta["specs"][0].dtype is torch.float32
    first = next(node for node in local.graph.nodes if node.target is torch.ops.aten.view_as_complex.default)
    assert first.meta["specs"][0].shape == (8, 8, HEADS // 4, 4)
    assert first.meta["specs"][0].requires_grad


def test_complex_gradients_are_not_compressed() -> None:
    model, batch = build("spectral")
    with pytest.raises(PlanError, match="compress='int8' is for gradients of real numbers, and those of weight are complex; leave"):
        autopar.plan(model, autopar.Cluster(1, 4, "h100"), batch, plan=Manual(dp=4), compress="int8")


def given(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The complex numbers that each rank has of what a reshard takes, and the gradient that it gets."""
    torch.manual_seed(0)
    source, target = ends(name)
    xs = spread(torch.randn(source.shape, dtype=torch.complex128), value_layout(source))
    return xs, [torch.randn(target.local_shape, dtype=torch.complex128) for _ in xs]


def resharded(rank: int) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Of complex numbers, and of their parts beside each other."""
    activate(device_mesh(MESH, "cpu"))
    found = {}
    for name in STEPS:
        xs, tangents = given(name)
        x, tangent = xs[rank].requires_grad_(), tangents[rank]
        step = single_step(*ends(name))
        y = step(x, coordinates(MESH, rank))
        y.backward(tangent)
        parts = torch.view_as_real(x.detach()).requires_grad_()
        both = _of_parts(name)(parts, coordinates(MESH, rank))
        both.backward(torch.view_as_real(tangent))
        assert x.grad is not None
        assert parts.grad is not None
        found[name] = [y.detach(), x.grad], [torch.view_as_complex(both.detach()), torch.view_as_complex(parts.grad)]
    return found


def _of_parts(name: str) -> Any:
    source, target = (Layout(whole.mesh, (*ATOMS, (2,)), whole.placements) for whole in ends(name))
    (step,) = plan_steps(source, target, needs_grad=True)
    return lambda x, coordinates: step.op(x, coordinates[step.axis], **dict(step.arguments))


def test_every_reshard_moves_complex_numbers(ranks: RankPool) -> None:
    for found in ranks.run(resharded):
        for ours, theirs in found.values():
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def trained(rank: int, name: str, plan: Manual) -> tuple[list[float], list[float]]:
    """Losses of three steps, and those of one device."""
    model, batch = build(name)
    losses: list[list[float]] = []
    profile = autopar.Cluster(1, 4, "cpu").with_mesh(plan.grid(4)).profile
    for own in (copy.deepcopy(model), autopar.parallelize(model, 4, plan=plan, profile=profile)):
        optimizer, found = torch.optim.AdamW(own.parameters(), 1e-2, eps=1e-4), list[float]()
        for _ in range(3):
            loss = own(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        losses.append(found)
    return losses[0], losses[1]


TRAINED = [("rotary", Manual(pp=2, dp=2, microbatches=2)), ("spectral", Manual(dp=4, zero=3))]


@pytest.mark.parametrize("name, plan", few(1, TRAINED), ids=str)
def test_training_is_that_of_one_device(ranks: RankPool, name: str, plan: Manual) -> None:
    """With turns, and their gradients, that one stage sends to the next; and with complex weights in shards."""
    for expected, found in ranks.run(trained, name, plan):
        assert found == pytest.approx(expected, rel=1e-5)
