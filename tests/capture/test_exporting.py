"""Graph modules that make their code when it is wanted."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import fx

from autopar import Manual
from autopar.capture.exporting import code_when_called
from autopar.compile import compile_plan, compile_stage
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from tests import models
from tests.planning import planned

CPU = torch.device("cpu")


def graph_of(number: int) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), number)))
    return graph


@pytest.mark.parametrize("depth", [1, 2])
def test_code_is_that_of_the_graph_as_it_is(depth: int) -> None:
    """Whether it is called first or read, inside or after, and however many are around it."""
    called, read, left = (fx.GraphModule({}, graph_of(1)) for _ in range(3))
    with ExitStack() as around:
        for _ in range(depth):
            around.enter_context(code_when_called())
        for module in (called, read, left):
            module.graph = graph_of(2)
        assert called(torch.zeros(())) == 2
        assert "add(x, 2)" in read.code
        for module in (called, read):
            module.graph = graph_of(3)
        assert called(torch.zeros(())) == 3
        assert "add(x, 3)" in str(read)
    assert "add(x, 2)" in copy.deepcopy(left).code
    assert "add(x, 2)" in str(left)
    assert left(torch.zeros(())) == 2
    left.graph = graph_of(4)
    assert "add(x, 4)" in left.code
    assert left(torch.zeros(())) == 4


def test_graphs_of_a_plan_make_no_code_before_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.gpt2(layers=1)
    session = open_session(make_skeleton(model), (), batch)
    whole, staged = planned(session, Manual(dp=2, zero=1)), planned(session, Manual(pp=2, microbatches=2))
    made, make_code = list[int](), fx.Graph.python_code

    def counted(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        made.append(len(graph.nodes))
        return make_code(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", counted)
    halves = compile_plan(session.normal, whole, device=CPU, training=True).halves
    stage = compile_stage(session.normal, staged, 0, device=CPU, training=True)
    assert made == []
    assert halves.backward is not None
    for graph in (halves.forward, halves.backward, stage.body.forward):
        assert "def forward" in graph.code
    assert len(made) == 3
