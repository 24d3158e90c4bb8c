"""The two halves of a backward give what the whole gives, and the later one nothing that a stage before waits for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import Manual
from autopar.compile import compile_stage
from autopar.passes.split_backward import SplitBackward, split_backward
from autopar.planner.session import open_session
from autopar.stage import StageProgram
from tests import models
from tests.marks import few
from tests.models import Example
from tests.planning import planned

aten = torch.ops.aten


@cache
def stages(case: str) -> tuple[StageProgram, ...]:
    """Both stages of a model of two blocks: its name, and how much is computed again."""
    name, _, level = case.partition(" ")
    example: Example = getattr(models, name)(layers=1 if name in ("t5", "nn_transformer") else 2, batch=4)
    session = open_session(example.model, (), example.batch)
    plan = planned(session, Manual(pp=2, microbatches=2, schedule="zb-h1", recompute=level or "none"))
    return tuple(compile_stage(session.normal, plan, s, device=torch.device("cpu"), training=True) for s in range(2))


def halves(made: StageProgram) -> tuple[fx.GraphModule, SplitBackward]:
    assert made.body.backward is not None
    assert made.split is not None
    return made.body.backward, made.split


def random_inputs(graph: fx.GraphModule) -> list[torch.Tensor]:
    """Values of the shapes and dtypes of the placeholders; indices are small, variances positive."""
    torch.manual_seed(0)
    found = []
    for node in graph.graph.find_nodes(op="placeholder"):
        like = node.meta["val"]
        value = torch.rand(like.shape) if like.dtype.is_floating_point else torch.randint(0, 2, like.shape)
        found.append(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value))
    return found


def calls(graph: fx.GraphModule) -> list[object]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


MODELS = few(3, ["gpt2", "unet", "llama full", "t5", "llama", "vit", "gpt2 selective", "gpt2 full"])


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_both_together_are_the_backward(name: str, stage: int) -> None:
    backward, split = halves(stages(name)[stage])
    given = random_inputs(backward)
    expected = backward(*given)
    first = split.inputs(*given)
    count = len(split.to_inputs)
    late = iter(split.weights(*first[count:], *(given[i] for i in split.saved)))
    early = iter(first[:count])
    found = [next(early) if i in split.to_inputs else next(late) for i in range(len(expected))]
    assert next(late, None) is None
    assert len(first) == count + split.num_left
    torch.testing.assert_close(found, list(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_computed_twice(name: str, stage: int) -> None:
    backward, split = halves(stages(name)[stage])
    assert sorted(map(str, calls(split.inputs) + calls(split.weights))) == sorted(map(str, calls(backward)))


@pytest.mark.parametrize("name", MODELS)
def test_the_later_half_gives_parameters_alone(name: str) -> None:
    """The first stage receives nothing, so that all of its backward is for parameters; the last gives back all that it received."""
    first, last = stages(name)
    _, split = halves(first)
    assert split.to_inputs == ()
    assert calls(split.inputs) == []
    _, split = halves(last)
    assert len(split.to_inputs) == sum(wire.needs_grad for wire in last.received) > 0
    (output,) = split.weights.graph.find_nodes(op="output")
    num_parameters = sum(not is_input for is_input in last.is_input)
    assert 0 < len(output.args[0]) <= num_parameters
    assert len(output.args[0]) + len(split.to_inputs) == len(last.body.with_grad)


def test_products_go_half_and_half() -> None:
    """Each linear layer of a block has one product for its input and one for its weight; attention is on the way to the input."""
    _, split = halves(stages("gpt2")[1])
    early, late = calls(split.inputs), calls(split.weights)
    assert late.count(aten.mm.default) >= 4
    assert early.count(aten.mm.default) >= 4
    assert [t for t in early if "attention" in str(t)]
    assert not [t for t in late if "attention" in str(t)]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_are_tensors(name: str) -> None:
    """A tuple of results would keep all of them, also those that the stage before got."""
    for made in stages(name):
        for graph in (halves(made)[1].inputs, halves(made)[1].weights):
            assert all(isinstance(node.meta["val"], torch.Tensor) for node in graph.graph.find_nodes(op="placeholder"))


def again_and_smaller(x: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    again = x.tanh()
    return tangent * again, tangent.t() @ (again * x)


def again_and_no_smaller(x: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tangent * 2, tangent.t() @ x.tanh()


def again_of_what_others_want(x: torch.Tensor, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    again = x.tanh()
    return tangent * again, tangent.t() @ (again * x), tangent.t() @ again, tangent.t() @ x


@pytest.mark.parametrize(
    "backward, lasting, left, saved",
    [
        (again_and_smaller, [], ["mul_1"], ["tangent_1"]),
        (again_and_smaller, [0], ["tanh"], ["x_1", "tangent_1"]),  # all the same: the input lies there anyway
        (again_and_no_smaller, [], [], ["x_1", "tangent_1"]),
        (again_of_what_others_want, [], ["tanh"], ["x_1", "tangent_1"]),
    ],
)
def test_little_is_left_of_what_is_computed_again(
    backward: Callable[..., object], lasting: list[int], left: list[str], saved: list[str]
) -> None:
    graph = make_fx(backward, tracing_mode="fake")(torch.rand(4, 3), torch.rand(4, 3))
    (output,) = graph.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0]),)
    split = split_backward(graph, [0], num_saved=1, lasting=lasting)
    names = [node.name for node in split.weights.graph.find_nodes(op="placeholder")]
    assert (names[: split.num_left], names[split.num_left :]) == (left, saved)
