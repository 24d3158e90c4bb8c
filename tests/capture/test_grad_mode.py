"""Forwards that record gradients in parts: the plan's gradients are those of autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn

import autopar
from autopar import Manual
from autopar.compile import compile_stage
from autopar.errors import CaptureError
from autopar.passes.differentiate import Halves
from autopar.passes.last_backward import drop_silent
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from tests.marks import only
from tests.planning import planned

pytestmark = pytest.mark.slow

aten = torch.ops.aten


class Parts(nn.Module):
    """A table, a product and a head; ``middle`` makes of the rows of the table what the head takes."""

    seen: torch.Tensor

    def __init__(self, middle: Callable[[Parts, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.product = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        self.register_buffer("seen", torch.ones(16))
        self.middle = middle

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.head(self.middle(self, self.table(ids))) - target).square().mean()
        return result


def last_of_three(model: Parts, x: torch.Tensor) -> torch.Tensor:
    """As models of cycles do: gradients go through the last one alone."""
    for i in range(3):
        with torch.no_grad() if i < 2 else nullcontext():
            x = model.product(x).relu()
    return x


def beside(model: Parts, x: torch.Tensor) -> torch.Tensor:
    """Part of the way has gradients, part has not."""
    with torch.no_grad():
        gate = model.product(x).sigmoid()
    result: torch.Tensor = x * gate
    return result


def in_place(model: Parts, x: torch.Tensor) -> torch.Tensor:
    """What writes makes torch.export functional, which takes regions apart."""
    with torch.no_grad():
        gate = model.product(x).clone()
        gate.mul_(2.0)
    x = x.clone()
    x.add_(1.0)
    result: torch.Tensor = x * gate
    return result


def in_place_and_after(model: Parts, x: torch.Tensor) -> torch.Tensor:
    """What had been detached for the gate has a gradient where it is read again."""
    x = x.clone()
    x.add_(1.0)
    with torch.no_grad():
        gate = model.product(x)
    result: torch.Tensor = model.product(x) * gate
    return result


def nested(model: Parts, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = model.product(x)
        with torch.enable_grad():
            y = model.product(x) * gate
        outside = y.sigmoid()
    result: torch.Tensor = y + outside
    return result


def buffer(model: Parts, x: torch.Tensor) -> torch.Tensor:
    """Statistics, as of batch norm."""
    with torch.no_grad():
        model.seen.mul_(0.9).add_(x.mean(dim=(0, 1)), alpha=0.1)
    return x * model.seen


def frozen(model: Parts, x: torch.Tensor) -> torch.Tensor:
    """Nothing that has a gradient goes in."""
    with torch.no_grad():
        gate = model.seen.cos()
    return x * gate


def cast(model: Parts, x: torch.Tensor) -> torch.Tensor:
    """A region in a region of another kind."""
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        gate = model.product(x)
    result: torch.Tensor = x * gate
    return result


MIDDLES = [last_of_three, beside, in_place, in_place_and_after, nested, buffer, frozen, cast]
CALL = torch.arange(32).reshape(8, 4), torch.linspace(-1, 1, 8 * 4 * 16).reshape(8, 4, 16)


PLANS = [Manual(dp=2, tp=2, zero=3), Manual(dp=2, microbatches=2, recompute="full")]
CASES = [(middle, PLANS[0]) for middle in MIDDLES], [(middle, PLANS[1]) for middle in MIDDLES if middle is not buffer]  # of a whole batch


@pytest.mark.parametrize("middle, plan", only([*CASES[0], (last_of_three, PLANS[1])], [*CASES[0], *CASES[1]]))
def test_gradients_end_where_none_are_recorded(middle: Callable[[Parts, torch.Tensor], torch.Tensor], plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(Parts(middle), 4 if plan.tp == 2 else 2, CALL, plan)
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-6


def test_what_would_get_a_wrong_gradient_is_refused() -> None:
    """In eager mode the loss is that of the changed value, and the gradient that of the one before."""

    def change(model: Parts, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x[:, 0].mul_(0.0)
        return x

    with pytest.raises(CaptureError, match=r"mul_.*test_grad_mode.py.*where none are recorded.*x = x.clone"):
        autopar.verify(Parts(change), 2, CALL, Manual(dp=2))


def test_a_parameter_without_gradient_has_none_in_micro_batches() -> None:
    """The table of `last_of_three`: zeros would let an optimizer decay it."""
    torch.manual_seed(0)
    opened = open_session(make_skeleton(Parts(last_of_three)), CALL, {})
    plan = planned(opened, Manual(dp=2, zero=1, microbatches=2))
    program = compile_stage(opened.normal, plan, 0, device=torch.device("cpu"), training=True)
    assert program.prepare is not None
    assert program.ending is not None
    assert program.ending.last is not None
    reduced = {program.names[program.taken[position]] for position in program.prepare.with_grad}
    assert reduced == {"product.weight", "product.bias", "head.weight", "head.bias"}
    assert program.ending.last.silent == ()


def test_copies_without_gradients_are_not_reduced() -> None:
    """Of three copies, the first two of one parameter; what is made of a gradient and of zeros by more than an addition is left."""
    forward, backward = fx.Graph(), fx.Graph()
    parameter = forward.placeholder("parameter")
    forward.output(tuple(forward.call_function(aten.clone.default, (parameter,)) for _ in range(3)))
    tangents = [backward.placeholder(f"tangents_{i}") for i in range(3)]
    summed = backward.call_function(aten.add.Tensor, (backward.call_function(aten.neg.default, (tangents[0],)), tangents[1]))
    backward.output((summed, backward.call_function(aten.cat.default, (tangents[1:],))))
    halves = Halves(fx.GraphModule({}, forward), fx.GraphModule({}, backward), 3, (0, 1, 2), (0, 1))

    def left(*heard: int) -> tuple[tuple[int, ...], tuple[int, ...], list[object]]:
        found = drop_silent(halves, heard)
        nodes = [] if found.backward is None else [node.target for node in found.backward.graph.nodes if node.op == "call_function"]
        return found.differentiable, found.with_grad, nodes

    assert left(0) == ((0,), (0,), [aten.neg.default])
    assert left(1) == ((1, 2), (0, 1), [aten.cat.default])
    assert left(0, 1) == ((0, 1, 2), (0, 1), [aten.neg.default, aten.add.Tensor, aten.cat.default])
    assert left() == ((), (), [])


def test_planning_where_no_gradients_are_recorded_plans_the_same() -> None:
    with torch.no_grad():
        found = autopar.verify(Parts(beside), 2, CALL, Manual(dp=2))
    assert found.grad_error < 1e-6
