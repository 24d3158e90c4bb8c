"""Training with parameters, optimizer state and activations on the host, on four real processes: bit for bit as without.

Here host and device are one memory; what goes to the host is a tensor of its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from tests.marks import only
from tests.pool import RankPool

pytestmark = pytest.mark.slow

DEVICE = DeviceProfile("test", 2**33, tuple(MatmulSample(64, 64, 64, d, 1e9) for d in ("float32", "bfloat16")), 1e9, 1e-6, "for tests")
LINK = LinkProfile(alpha_s=1e-6, bandwidth=1e9)


class Small(nn.Module):
    """A block with a norm, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(1))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(nn.functional.linear(x, self.embed.weight), labels)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(7)
    return [{name: torch.randint(64, (8,), generator=random) for name in ("tokens", "labels")} for _ in range(count)]


def parallel(model: nn.Module, plan: Manual) -> nn.Module:
    profile = MachineProfile(DEVICE, (LINK,) * len(plan.grid(4).sizes))
    made: nn.Module = autopar.parallelize(model, 4, plan=plan, profile=profile, example_batch=batches(1)[0])
    return made


def trained(model: nn.Module, count: int = 3) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses and norms of steps, the second of two calls, with an evaluation between; and what the model has become."""
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
    for i, batch in enumerate(batches(count)):
        for _ in range(1 + (i == 1)):
            loss = model(**batch)
            loss.backward()
        norm = model.clip_grad_norm_(0.1)  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append([float(loss), float(norm), float(model(**batch))])
    return found, {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def continued(plan: Manual, saved: str, loaded: str, folder: str) -> list[list[float]]:
    """Losses and norms of two steps, after two more that were saved by a model with one thing on the host, and loaded by another's."""
    first, second = batches(4)[:2], batches(4)[2:]
    for kind, given in ((saved, first), (loaded, second)):
        model = parallel(build(), replace(plan, offload=kind))
        optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
        if given is second:
            autopar.load(folder, model, optimizer)
        for batch in given:
            loss = model(**batch)
            loss.backward()
            found.append([float(loss), float(model.clip_grad_norm_(0.1))])  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
        if given is first:
            autopar.save(folder, model, optimizer)
    return found


def save_and_load(rank: int, folder: str) -> None:
    """From the host to the device and back, and to the disk and back."""
    plan, disk = Manual(dp=2, tp=2, zero=3), f"optimizer:{folder}/state"
    expected = continued(plan, "", "", f"{folder}/a")
    for i, (saved, loaded) in enumerate((("parameters", ""), ("", disk), (disk, "optimizer"))):
        assert continued(plan, saved, loaded, f"{folder}/{i}") == expected, (saved, loaded)
    assert not [*Path(folder, "state").iterdir()], "what is mapped is nobody else's"


@pytest.mark.exhaustive
def test_checkpoints_move_between_host_device_and_disk(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_and_load, str(tmp_path), timeout=300)


def train(rank: int, plan: Manual) -> None:
    own = build()
    expected, weights = trained(parallel(copy.deepcopy(own), plan))
    for offload in KINDS:
        found, ours = trained(parallel(copy.deepcopy(own), replace(plan, offload=offload)))
        assert found == expected, offload
        assert weights.keys() == ours.keys()
        for name, weight in weights.items():
            assert torch.equal(ours[name], weight), (offload, name)


PLANS = {
    "dp4": Manual(dp=4),
    "zero1": Manual(dp=4, zero=1),
    "zero2": Manual(dp=4, zero=2),
    "zero3": Manual(dp=4, zero=3),
    "tp4": Manual(tp=4),
    "dp2-tp2-zero3": Manual(dp=2, tp=2, zero=3),
    "zero1-m2": Manual(dp=4, zero=1, microbatches=2),
    "zero2-m2": Manual(dp=4, zero=2, microbatches=2),
    "pp2-dp2": Manual(pp=2, dp=2, microbatches=4),
    "pp2-dp2-zero3": Manual(pp=2, dp=2, zero=3, microbatches=4),
    "pp2-tp2-zb": Manual(pp=2, tp=2, microbatches=4, schedule="zb-h1"),
    "zero2-bf16": Manual(dp=4, zero=2, precision="bf16"),
    "pp2-dp2-zero1-bf16": Manual(pp=2, dp=2, zero=1, microbatches=2, precision="bf16"),
    "dp4-m2-bf16": Manual(dp=4, microbatches=2, precision="bf16"),
    "zero3-full": Manual(dp=4, zero=3, recompute="full"),
}
KINDS = ("optimizer", "parameters")


@pytest.mark.parametrize("name", only(["pp2-dp2-zero1-bf16"], PLANS))
def test_training_is_that_without(ranks: RankPool, name: str) -> None:
    ranks.run(train, PLANS[name], timeout=300)
