"""Optimizer state on a disk between steps: the same training, and nothing lost where a disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from autopar.runtime.disk import keep_on_disk


def trained(folder: Path | None, steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=True)
    if folder is not None:
        keep_on_disk(model.parameters(), str(folder))
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def mapped(path: Path) -> int:
    """Files of a folder that this process has mapped."""
    return len({line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line})


def test_training_is_that_in_memory(tmp_path: Path) -> None:
    expected, own = trained(None)
    model, optimizer = trained(tmp_path / "state")
    assert mapped(tmp_path) == 1, "that of the last step alone"
    assert not [*(tmp_path / "state").iterdir()]
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)
    for ours, theirs in zip(optimizer.state_dict()["state"].values(), own.state_dict()["state"].values(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(tmp_path)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    model(torch.ones(8, 64)).square().mean().backward()
    before = [x.clone() for state in optimizer.state.values() for x in state.values()]
    with pytest.raises(OSError, match="no space left"):
        optimizer.step()
    after = [x for state in optimizer.state.values() for x in state.values()]
    assert all(torch.isfinite(x).all() for x in after)
    assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the step was made, in memory"
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"offload='optimizer:.*cannot write there"):
        keep_on_disk(nn.Linear(2, 2).parameters(), str(tmp_path / "file"))
