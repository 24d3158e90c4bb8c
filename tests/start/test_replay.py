"""What a replay runs, in which order, and how much memory it has at one time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import nn

from autopar import deferred
from autopar.start import replay as module
from autopar.start.deferred import recorded
from autopar.start.recording import Op, Recording, View
from autopar.start.replay import needed, ordered, replay


def put(found: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    found[name] = value.clone()


def record(build: Callable[[], nn.Module]) -> tuple[Recording, dict[str, View]]:
    with deferred():
        model = build()
    places = {name: recorded(tensor) for name, tensor in model.named_parameters()}
    found = {name: place for name, place in places.items() if place is not None}
    return next(iter(found.values()))[0], {name: view for name, (_, view) in found.items()}


def names_of(ops: Iterable[Op]) -> list[str]:
    return [str(op.func).split(".")[1] for op in ops]


class Twice(nn.Module):
    """Draws its weights by their own `reset_parameters`, then again, as transformers do, and scales and converts all at the end."""

    def __init__(self, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)
        self.to(torch.bfloat16)


class Counted(module._Memory):
    """Notes the most bytes at one time, beside the constants."""

    most = 0

    def tensor(self, view: View) -> torch.Tensor:
        value = super().tensor(view)
        Counted.most = max(Counted.most, sum(storage.nbytes() for storage in self._held.values()))
        return value

    def put(self, view: View, value: torch.Tensor) -> None:
        super().put(view, value)
        Counted.most = max(Counted.most, sum(storage.nbytes() for storage in self._held.values()))


def test_the_peak_is_about_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, views = record(Twice)
    monkeypatch.setattr(module, "_Memory", Counted)
    Counted.most, seen = 0, list[tuple[int, ...]]()
    replay(recording, [(view, lambda value: seen.append(tuple(value.shape))) for view in views.values()])
    assert len(seen) == 12
    weight = 32 * 32 * 4
    assert weight <= Counted.most <= 1.6 * weight, Counted.most / weight  # a weight, and itself in bfloat16


def test_only_what_is_wanted_is_run() -> None:
    recording, views = record(Twice)
    names = [str(op.func) for op in needed(recording.ops, [views["layers.0.weight"].storage])]
    assert names == ["aten.uniform_.default"] * 12 + ["aten.normal_.default", "aten.mul_.Tensor", "aten._to_copy.default"]
    assert len(needed(recording.ops, [views["layers.5.bias"].storage])) == 12 + 12 + 2


def test_values_are_handed_out_as_soon_as_they_are_there() -> None:
    recording, views = record(Twice)
    ops = ordered(needed(recording.ops, [view.storage for view in views.values()]))
    assert names_of(ops) == ["uniform_"] * 12 + ["normal_", "mul_", "_to_copy"] * 12


def test_what_depends_on_nothing_waits() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            ones = [torch.ones(4) for _ in range(3)]
            self.own = nn.ParameterList(one * torch.rand(4) for one in ones)

    recording, views = record(Late)
    ops = ordered(needed(recording.ops, [view.storage for view in views.values()]))
    assert names_of(ops) == ["ones", "rand", "mul"] * 3


def test_reading_before_a_change_stays_before_it() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            x = torch.zeros(3)
            self.first = nn.Parameter(x.clone())
            x.normal_()
            self.second = nn.Parameter(x.clone())
            x.fill_(7)
            self.third = nn.Parameter(x + torch.rand(3))
            x.fill_(9)
            self.fourth = nn.Parameter(x.clone())

    torch.manual_seed(0)
    real = Copies()
    torch.manual_seed(0)
    recording, views = record(Copies)
    found = dict[str, torch.Tensor]()
    replay(recording, [(view, partial(put, found, name)) for name, view in views.items()])
    assert all(torch.equal(found[name], value) for name, value in real.named_parameters())
