"""A graph with blocks taken out is that of the model with fewer layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import fx, nn

from autopar.compile import Normal
from autopar.graph import is_call, operands_of, specs_of
from autopar.planner.session import open_session
from autopar.solve.fold import KEPT, LEAST_REMOVED, fold
from tests.marks import exhaustive, few
from tests.solve.problems import session

pytestmark = pytest.mark.slow

Line = tuple[str, list[tuple[int, int]], tuple[object, ...]]


def wiring(normal: Normal) -> list[Line]:
    """Every node with what it reads by position, and how its sizes factor."""
    nodes = list(normal.module.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}

    def line(node: fx.Node) -> Line:
        read = [(place[value.node], value.index) for value in operands_of(node)] if is_call(node) else []
        return str(node.target) if is_call(node) else node.op, read, specs_of(node) if "specs" in node.meta else ()

    return [line(node) for node in nodes]


@pytest.mark.parametrize("name", few(1, ["llama", "gpt2", "bert"]))
def test_it_is_the_graph_of_fewer_layers(name: str) -> None:
    layers = KEPT + LEAST_REMOVED + 2
    folded = fold(session(name, layers).normal)
    assert folded is not None
    short = session(name, layers - folded.removed).normal
    assert wiring(folded.normal) == wiring(short)


@exhaustive
def test_a_block_that_is_left_stands_for_those_that_are_gone() -> None:
    normal = session("llama", 12).normal
    folded = fold(normal)
    assert folded is not None
    repeats = folded.repeats(KEPT + folded.removed)

    def products(module: fx.GraphModule, times: dict[fx.Node, int]) -> int:
        return sum(times.get(node, 1) for node in module.graph.nodes if "linear" in str(node.target))

    assert products(folded.normal.module, repeats) == products(normal.module, {})
    parameters = [len([n for n in module.graph.nodes if n.op == "placeholder"]) for module in (folded.normal.module, normal.module)]
    assert parameters[1] - parameters[0] == sum(repeats[n] - 1 for n in repeats if n.op == "placeholder")


class Tail(nn.Module):
    """Equal layers, and then others that are as many ops as four of them."""

    def __init__(self, others: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.others = nn.ModuleList(nn.Linear(8 + i, 9 + i) for i in range(others))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.others):
            x = torch.relu(cast(torch.Tensor, layer(x)))
        return x.sum()


def test_a_model_that_has_much_else_is_left_as_it_is() -> None:
    few, many = (fold(open_session(Tail(others), (torch.randn(4, 8),), {}).normal) for others in (1, 4))
    assert few is not None
    assert many is None


class Skips(nn.Module):
    """Every layer reads what the first gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = first = cast(torch.Tensor, self.layers[0](x))
        for layer in self.layers[1:]:
            y = cast(torch.Tensor, layer(y)) + first
        return y.sum()


class Mirrored(Skips):
    """The layers of the second half read those of the first, the last first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for layer in self.layers[:12]:
            kept.append(torch.relu(cast(torch.Tensor, layer(kept[-1]))))
        y = kept.pop()
        for layer in self.layers[12:]:
            y = torch.relu(cast(torch.Tensor, layer(y))) + kept.pop()
        return y.sum()


class EveryOther(Skips):
    """Two kinds of layers in turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = (torch.relu if i % 2 else torch.tanh)(cast(torch.Tensor, layer(x)))
        return x.sum()


@pytest.mark.parametrize("kind, removed", [(Skips, 19), (EveryOther, 7), (Mirrored, None)])
def test_what_is_wired_otherwise(kind: Callable[[], nn.Module], removed: int | None) -> None:
    folded = fold(open_session(kind(), (torch.randn(4, 8),), {}).normal)
    assert (folded.removed if folded is not None else None) == removed


def test_few_blocks_are_left_as_they_are() -> None:
    assert fold(session("llama", KEPT + LEAST_REMOVED - 1).normal) is None
