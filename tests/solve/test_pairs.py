"""Products of models in pairs: by column, then by row."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autopar.mesh import Mesh
from autopar.plan import Pipeline
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.solve.build import build_problem
from autopar.solve.pairs import COLUMN, EITHER, ROW, sides_of
from autopar.solve.pins import products_of
from tests.solve.problems import session


@cache
def blocks(name: str) -> dict[str, set[str]]:
    return sides(session(name, 2))


def sides(of: Session) -> dict[str, set[str]]:
    """Of every parameter that products read."""
    normal = of.normal_for(Pipeline())
    problem = build_problem(normal.module, normal.factors, Mesh.of((1, 2)))
    found = sides_of(problem)
    read = {node.meta["placeholder"].name: products_of(problem, node) for node in normal.module.graph.find_nodes(op="placeholder")}
    return {parameter: {found[product] for product in products} for parameter, products in read.items() if products}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "name, prefix, columns, rows",
    [
        ("gpt2", "transformer.h", "attn.c_attn mlp.c_fc", "attn.c_proj mlp.c_proj"),
        (
            "llama",
            "model.layers",
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
            "self_attn.o_proj mlp.down_proj",
        ),
        (
            "bert",
            "bert.encoder.layer",
            "attention.self.query attention.self.key attention.self.value intermediate.dense",
            "attention.output.dense output.dense",
        ),
    ],
)
def test_blocks_of_transformers(name: str, prefix: str, columns: str, rows: str, layer: int) -> None:
    """Fused or gated, with biases or without, norms before or after."""
    found = blocks(name)
    for side, modules in ((COLUMN, columns), (ROW, rows)):
        assert [found[f"{prefix}.{layer}.{module}.weight"] for module in modules.split()] == [{side}] * len(modules.split())


def test_who_goes_to_which_expert_makes_no_difference() -> None:
    """What experts sum over are tokens, though these are chosen by what a product has given."""
    found, prefix = sides(session("mixture", 1)), "experts.0"
    assert [found[f"{prefix}.{name}"] for name in ("gate.weight", "up", "down")] == [{COLUMN}, {COLUMN}, {ROW}]


class Odd(nn.Module):
    """Three products in a row, and one of what is of columns beside what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.gate, self.mixed = (nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.third(self.second(self.first(x).relu()).relu())
        total: torch.Tensor = self.mixed(y + self.second(self.gate(x))).sum()
        return total


def test_pairs_follow_each_other() -> None:
    found = sides(open_session(make_skeleton(Odd()), (torch.ones(4, 8),), {}))
    assert [found[f"{name}.weight"] for name in ("first", "second", "third", "gate", "mixed")] == [
        {COLUMN}, {ROW}, {COLUMN}, {COLUMN}, {EITHER}
    ]  # fmt: skip
