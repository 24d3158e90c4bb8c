"""A script may have a default device and dtype (`torch.set_default_device`, ``with torch.device``, `torch.set_default_dtype`): what autopar
makes has those that autopar says."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._device import _device_constructors

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.runtime.scaling import share_overflow
from tests import models
from tests.marks import few
from tests.pool import RankPool

ROOT = Path(__file__).parent.parent / "autopar"
MAKERS = {f"torch.{name}" for name in dir(torch) if any(getattr(torch, name) is made for made in _device_constructors())}
AS_TORCH_DOES = {
    "rules/check.py": "runs in a process of its own, with samples of the CPU",
    "rules/samples.py": "runs in a process of its own, with samples of the CPU",
    "runtime/order.py": "draws what a loader of torch draws, where torch draws it",
}


def unsaid(node: ast.AST) -> Iterator[str]:
    """Calls that make a tensor and do not say where, but for those ``with device:``."""
    if isinstance(node, ast.With) and any(ast.unparse(item.context_expr) == "device" for item in node.items):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS and not {"device", None} & {k.arg for k in node.keywords}:
        yield f"{node.lineno}: {ast.unparse(node)}"
    for child in ast.iter_child_nodes(node):
        yield from unsaid(child)


def test_each_tensor_that_is_made_has_a_place() -> None:
    paths = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py")}
    found = {name: list(unsaid(ast.parse(path.read_text()))) for name, path in paths.items() if name not in AS_TORCH_DOES}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert all(list(unsaid(ast.parse(paths[name].read_text()))) for name in AS_TORCH_DOES)


def test_a_place_that_is_not_said_is_found() -> None:
    source = "torch.zeros(2)\nwith device:\n    torch.ones(3)\ntorch.full((1,), 2, device=d)\ntorch.rand(*sizes, **kind)\ntorch.cat([x])\n"
    assert list(unsaid(ast.parse(source))) == ["1: torch.zeros(2)"]


@contextmanager
def other_defaults() -> Iterator[None]:
    """Those of a script that has left them as it wants its own tensors."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(dtype)


class Counted(nn.Module):
    """Takes rows by numbers that it counts, and bags of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.bags = nn.EmbeddingBag(16, 8, mode="sum")
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first, rows = (torch.arange(0, count, step, device=ids.device) for count, step in ((ids.numel(), 2), (len(ids), 1)))
        x = self.table(ids) + self.bags(ids.flatten(), first).view(len(ids), -1, 8).mean(1, keepdim=True)
        return F.cross_entropy(self.head(x[rows, labels]), labels % 4)


@pytest.mark.parametrize("wanted", few(2, [None, Manual(pp=2, microbatches=2), Manual(dp=2, zero=3)]), ids=str)
def test_planning_does_not_go_by_defaults(wanted: Manual | None) -> None:
    model, batch = Counted(), {"ids": torch.randint(16, (4, 6)), "labels": torch.randint(6, (4,))}
    expected = str(autopar.check(model, autopar.plan(model, 2, batch, plan=wanted), batch))
    with other_defaults():
        assert autopar.verify(model, 2, batch, wanted).grad_error < 1e-5
        assert str(autopar.check(model, autopar.plan(model, 2, batch, plan=wanted), batch)) == expected


DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")
LINK = LinkProfile(alpha_s=1e-6, bandwidth=1e9)


def train(rank: int, folder: str) -> None:
    """A step of stages and one of shards, recorded, kept and taken up again; autopar is called with other defaults."""
    given, batch = models.speaker(batch=4)
    for name, wanted in {"stages": Manual(pp=2, dp=2, microbatches=2), "shards": Manual(dp=4, zero=3)}.items():
        own, losses = copy.deepcopy(given), []
        plain = torch.optim.SGD(own.parameters(), 0.1)
        for _ in range(2):
            plain.zero_grad()
            losses.append(own(**batch).loss)
            losses[-1].backward()
            plain.step()
        profile = MachineProfile(DEVICE, (LINK,) * len(wanted.grid(4).sizes))
        with other_defaults():
            model = autopar.parallelize(copy.deepcopy(given), 4, plan=wanted, profile=profile)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with model.record() as record:
                first = model(**batch).loss
                first.backward()
                model.clip_grad_norm_(1e6)
                optimizer.step()
            optimizer.zero_grad()
            autopar.save(f"{folder}/{name}", model, optimizer)
            autopar.load(f"{folder}/{name}", model, optimizer)
            autopar.export_weights(f"{folder}/{name}", f"{folder}/{rank}/{name}")
            second = model(**batch).loss
            assert not share_overflow([torch.ones(2, dtype=torch.float16, device="cpu")], torch.device("cpu"))
            record.save_trace(f"{folder}/{name}.json")
        torch.testing.assert_close([first, second], losses, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_training_does_not_go_by_defaults(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train, str(tmp_path))
