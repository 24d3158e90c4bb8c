"""Cuts into stages: what each runs, what goes from one to the next, and that wherever a model is cut it computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from autopar.errors import PlanError
from autopar.graph import Value, is_call, is_getitem, outputs_of, specs_of
from autopar.passes.microbatch import light_nodes
from autopar.passes.stages import Part, cut_stages, follow_parameters, staged_ops, whole_part
from autopar.planner.session import open_session
from tests import models
from tests.marks import few
from tests.models import Example


class Skipping(nn.Module):
    """Four layers of which the first has its weight in the last too; a mask that two of them use, and what the first gives for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.d.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mask = x > 0
        first = torch.tanh(self.a(x))
        second = self.b(first) * mask
        third = self.c(second) * mask
        return (self.d(third) + first).sum(), second, mask


def skipping() -> Example:
    torch.manual_seed(0)
    return Example(Skipping(), {"x": torch.randn(4, 8)})


BUILDERS: dict[str, Callable[[], Example]] = {
    "skipping": skipping,
    "gpt2": lambda: models.gpt2(layers=2, hidden=32, sequence=8),
    "t5": lambda: models.t5(layers=1, hidden=32, sequence=8),
    "nn_transformer": lambda: models.nn_transformer(layers=1, hidden=32, sequence=8),
    "unet": models.unet,
}


@cache
def opened(name: str) -> tuple[Example, fx.GraphModule]:
    example = BUILDERS[name]()
    return example, open_session(example.model, (), example.batch).normal.module


def by_module(module: fx.GraphModule, stages: dict[str, int]) -> dict[fx.Node, int]:
    """Stages of ops by the module that they belong to; ops of none belong with those before them."""
    stage, stage_of = 0, {}
    for node in staged_ops(module):
        stage = stages.get(node.meta["module"], stage)
        stage_of[node] = stage
    return stage_of


def cut_skipping(**stages: int) -> tuple[fx.GraphModule, tuple[Part, ...]]:
    _, module = opened("skipping")
    return module, cut_stages(module, by_module(module, stages), 1 + max(stages.values()))


def names(values: Sequence[Value]) -> set[str]:
    return {value.node.name for value in values}


def targets(part: Part) -> list[str]:
    return [str(node.target) for node in part.nodes if is_call(node)]


def test_what_a_later_stage_wants_is_relayed() -> None:
    """The skip goes through stages that only pass it on, beside what each gives to the next."""
    _, parts = cut_skipping(a=0, b=1, c=2, d=3)
    assert [names(part.received) for part in parts] == [set(), {"tanh"}, {"tanh", "mul"}, {"tanh", "mul_1"}]
    assert [part.sent for part in parts[:-1]] == [part.received for part in parts[1:]]
    assert parts[-1].sent == ()


def test_what_comes_of_inputs_alone_is_made_wherever_it_is_wanted() -> None:
    """Stages 1 and 2 make the mask from the input; nobody sends it. As an output of the model it is of the first stage."""
    module, parts = cut_skipping(a=0, b=1, c=2, d=3)
    assert [any("gt" in target for target in targets(part)) for part in parts] == [True, True, True, False]
    assert [any(node.name == "x" for node in part.nodes) for part in parts] == [True, True, True, False]
    assert {node.name for node in light_nodes(module)} == {"x", "gt"}


def test_a_tied_parameter_belongs_to_every_stage_that_uses_it() -> None:
    module, parts = cut_skipping(a=0, b=1, c=2, d=3)
    tied, b, c = (node for node in module.graph.find_nodes(op="placeholder") if node.name != "x")
    assert tied.meta["placeholder"].aliases
    assert [part.parameters for part in parts] == [(tied,), (b,), (c,), (tied,)]


def test_outputs_are_of_the_stage_that_makes_them() -> None:
    _, parts = cut_skipping(a=0, b=1, c=2, d=3)
    assert [part.outputs for part in parts] == [(2,), (1,), (), (0,)]


def test_a_value_that_one_stage_makes_and_uses_stays() -> None:
    _, parts = cut_skipping(a=0, c=1)
    assert [names(part.received) for part in parts] == [set(), {"tanh", "mul"}]
    assert parts[1].outputs == (0,)


def test_one_stage_is_the_whole_graph() -> None:
    module, (part,) = cut_skipping(a=0)
    assert part == whole_part(module)
    assert part.outputs == (0, 1, 2)
    assert (part.received, part.sent) == ((), ())


def test_an_op_comes_no_earlier_than_what_it_reads() -> None:
    _, module = opened("skipping")
    stage_of = by_module(module, {"a": 0, "b": 2, "c": 3})
    (product,) = [node for node in stage_of if node.name == "mul"]
    with pytest.raises(PlanError, match=r"op mul of stage 1 needs \w+ of the later stage 2; an op comes no earlier than what it reads"):
        cut_stages(module, stage_of | {product: 1}, 4)


def run_part(part: Part, received: dict[Value, object], state: dict[str, torch.Tensor]) -> dict[Value, object]:
    """All values that a stage has, from those that it receives and its placeholders."""
    have = dict(received)

    def load(node: fx.Node) -> Any:
        if is_getitem(node):
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            return have[Value(source, index)]
        return have[Value(node)]

    for node in part.nodes:
        if node.op == "placeholder":
            have[Value(node)] = state[node.meta["placeholder"].name]
        elif node.op == "get_attr":
            have[Value(node)] = getattr(node.graph.owning_module, str(node.target))
        elif node.target is not getitem:
            assert callable(node.target)
            result = node.target(*fx.node.map_arg(node.args, load), **fx.node.map_arg(node.kwargs, load))
            several = result if isinstance(result, tuple | list) else [result]
            have.update({Value(node, i): x for i, x in enumerate(several)})
            assert len(specs_of(node)) == len(several)
    return have


@pytest.mark.parametrize("name", few(2, BUILDERS))
@settings(max_examples=10)
@given(st.data())
def test_cut_anywhere_it_computes_the_same(name: str, data: st.DataObject) -> None:
    """Stages run one after the other, each on nothing but its placeholders and what the one before sent."""
    example, module = opened(name)
    state = {**dict(example.model.named_parameters()), **dict(example.model.named_buffers()), **example.batch}
    ops = staged_ops(module)
    borders = data.draw(st.lists(st.integers(1, len(ops) - 1), min_size=1, max_size=3, unique=True), "borders")
    stage_of = {node: sum(i >= border for border in borders) for i, node in enumerate(ops)}
    parts = cut_stages(module, stage_of, len(borders) + 1)
    assert [node for part in parts for node in part.nodes if node in stage_of] == ops
    outputs = outputs_of(module.graph)
    expected = run_part(whole_part(module), {}, state)
    given_on: dict[Value, object] = {}
    made = {}
    for part in parts:
        assert set(part.received) == set(given_on)
        have = run_part(part, given_on, state)
        given_on = {value: have[value] for value in part.sent}
        made.update({position: have[outputs[position]] for position in part.outputs})
    assert set(made) == set(range(len(outputs)))
    for position, value in enumerate(outputs):
        torch.testing.assert_close(made[position], expected[value], rtol=0, atol=0)


def homes_of(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    homes: dict[str, tuple[int, ...]] = {}
    for stage, part in enumerate(parts):
        for node in part.parameters:
            homes[node.meta["placeholder"].name] = (*homes.get(node.meta["placeholder"].name, ()), stage)
    return homes


@pytest.mark.parametrize("name", few(2, BUILDERS))
@settings(max_examples=10)
@given(st.data())
def test_ops_follow_their_parameters(name: str, data: st.DataObject) -> None:
    """From where the parameters lie alone, every op finds a stage, and every parameter is read only where it lies."""
    _, module = opened(name)
    ops = staged_ops(module)
    borders = data.draw(st.lists(st.integers(1, len(ops) - 1), min_size=1, max_size=3, unique=True), "borders")
    stages = len(borders) + 1
    homes = homes_of(cut_stages(module, {n: sum(i >= border for border in borders) for i, n in enumerate(ops)}, stages))
    stage_of = follow_parameters(module, homes, stages)
    assert list(stage_of) == ops
    found = homes_of(cut_stages(module, stage_of, stages))
    assert all(set(found[parameter]) <= set(homes[parameter]) for parameter in homes)


def test_an_op_goes_to_the_first_stage_that_it_can() -> None:
    _, module = opened("skipping")
    stage_of = follow_parameters(module, {"a.weight": (0, 3), "b.weight": (1,), "c.weight": (2,)}, 4)
    by_name = {node.name: stage for node, stage in stage_of.items()}
    assert (by_name["tanh"], by_name["mul"], by_name["mul_1"], by_name["sum_1"]) == (0, 1, 2, 3)


def test_parameters_on_earlier_stages_alone_are_an_error() -> None:
    _, module = opened("skipping")
    homes = {"a.weight": (0,), "b.weight": (1,), "c.weight": (2,)}
    with pytest.raises(PlanError, match=r"comes after stage 2 but reads a\.weight, which is on earlier stages"):
        follow_parameters(module, homes, 3)
