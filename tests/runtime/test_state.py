"""What a checkpoint has of optimizers fits those at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from tests.pool import RankPool
from tests.runtime.test_checkpoint import SHARDED, STAGES, make


def test_what_was_frozen_midway_keeps_its_state(tmp_path: Path) -> None:
    """As with `load_state_dict`: it may train on some day."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    autopar.save(tmp_path, model, optimizer)
    again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    again[0].requires_grad_(False)
    other = torch.optim.AdamW(again.parameters())
    autopar.load(tmp_path, again, other)
    torch.testing.assert_close(other.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in again.parameters())


def save_named(rank: int, folder: str) -> list[list[str]]:
    """Names that an optimizer of named parameters has on this rank, after a checkpoint of stages."""
    found = []
    for plan in (STAGES, SHARDED):
        model = make(plan)[0]
        optimizer = torch.optim.AdamW(model.named_parameters(), 0.1 if plan is STAGES else 0.2)
        if plan is STAGES:
            autopar.save(folder, model, optimizer)
        autopar.load(folder, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
        found.append(optimizer.param_groups[0]["param_names"])
    return found


@pytest.mark.slow
def test_names_of_parameters_are_no_settings(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks of other stages have others."""
    first, *_, last = ranks.run(save_named, str(tmp_path))
    assert first[0] != last[0]
    assert first[1] == last[1]
