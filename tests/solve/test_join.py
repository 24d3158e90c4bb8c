"""Ops of one cluster: what that costs against every op by itself, and what stays apart."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from autopar.compile import Normal
from autopar.mesh import Mesh
from autopar.planner.session import open_session
from autopar.solve import build
from autopar.solve.build import build_problem
from autopar.solve.decide import PLAN_GAP
from autopar.solve.intra import solve
from autopar.solve.pins import pin, pin_tags
from autopar.solve.problem import Problem
from tests.marks import few
from tests.solve.problems import prices_of, random_machine, session

GAP = 1e-3


class Parallel(nn.Module):
    """Two products that read one value, as attention and MLP of GPT-J do, added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.left = nn.Linear(8, 8, bias=False)
        self.right = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(cast(torch.Tensor, self.up(x)))
        branches = cast(torch.Tensor, self.left(hidden)) + cast(torch.Tensor, self.right(hidden))
        return torch.softmax(x + branches, -1).sum()


def groups(problem: Problem) -> list[set[str]]:
    """Names of the ops that lie together."""
    return [{member.name for member in cluster.members} for cluster in problem.clusters if len(cluster.members) > 1]


def problem_of(normal: Normal, *patterns: str) -> Problem:
    tags = pin_tags(normal.module, [pin(pattern, d0="R") for pattern in patterns])
    return build_problem(normal.module, normal.factors, Mesh.of(2), tags=tags)


@pytest.mark.slow
def test_a_rotary_embedding_and_a_gated_product_are_one_choice_each() -> None:
    problem = problem_of(session("llama", 1).normal)
    ops = {index: cluster.members for index, cluster in enumerate(problem.clusters) if cluster.leader.op != "placeholder"}
    kinds = {index: {str(node.target).split(".")[1] for node in members} for index, members in ops.items()}
    (queries,) = (index for index, kind in kinds.items() if kind == {"add", "cat", "mul", "neg", "slice"})
    assert [kind for kind in kinds.values() if "silu" in kind] == [{"mul", "silu"}]
    products = [kind for kind in kinds.values() if "linear" in kind]
    assert set().union(*products) <= {"linear", "reshape", "transpose", "unsqueeze", "view"}
    read = [edge.value.node.name for edge in problem.edges if edge.target == queries]
    assert len(read) == len(set(read)) == 2  # of three ops that read the queries one edge, and of both tables, which share a decision


@pytest.mark.slow
@pytest.mark.parametrize("mesh", few(1, ["2", "4", "2x2"]))
@pytest.mark.parametrize("seed", few(2, range(4)))
@pytest.mark.parametrize("name", few(1, ["gpt2", "llama", "bert", "vit"]))
def test_the_best_plan_is_hardly_slower_than_with_every_op_by_itself(
    monkeypatch: pytest.MonkeyPatch, name: str, seed: int, mesh: str
) -> None:
    sizes = tuple(map(int, mesh.split("x")))
    normal, profile = session(name, 1).normal, random_machine(len(sizes), seed)
    few_clusters = prices_of(normal, sizes, profile)
    monkeypatch.setattr(build, "take_in", lambda *_: None)
    many_clusters = prices_of(normal, sizes, profile)
    assert len(few_clusters.problem.clusters) < len(many_clusters.problem.clusters)

    few_s, many_s = (solve(prices, memory_limit_bytes=float("inf"), gap=GAP).objective.total_s for prices in (few_clusters, many_clusters))
    assert many_s * (1 - GAP) <= few_s <= many_s * (1 + PLAN_GAP)


def test_partial_sums_are_added_before_they_are_reduced() -> None:
    """An op that took in the sum of both branches would want each of them reduced by itself."""
    normal = open_session(Parallel(), (torch.randn(8, 8),), {}).normal
    problem = problem_of(normal)
    first, second = (node for node in normal.module.graph.nodes if str(node.target) == "aten.add.Tensor")
    assert problem.cluster_of[first] != problem.cluster_of[second]
    chosen = problem.clusters[problem.cluster_of[first]]
    assert "+0" in {choice.name for choice in chosen.choices[0]}


@pytest.mark.slow
def test_what_is_pinned_stays_by_itself() -> None:
    normal = session("llama", 1).normal
    (silu,) = (node.name for node in normal.module.graph.nodes if str(node.target) == "aten.silu.default")
    assert any(silu in group for group in groups(problem_of(normal)))
    assert not any(silu in group for group in groups(problem_of(normal, silu)))
