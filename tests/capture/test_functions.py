"""Functions with a backward of their own: plans ask for it, as autograd does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import autopar
from autopar import Manual
from autopar.errors import CaptureError
from autopar.factors import MissingRuleWarning, find_factors
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from tests.marks import few

pytestmark = pytest.mark.slow


class Reversed(torch.autograd.Function):
    """As of domains that shall not be told apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.scale * grads[0], None


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Centred(torch.autograd.Function):
    """Works along the last dim; what it gives back is not the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * grads[0]


class Both(torch.autograd.Function):
    """Two operands, two results, and memory of one operand; numbers tell calls apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, power: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x * y, x + power * y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x, grads[1] * 2, None


class Attended(torch.autograd.Function):
    """Of tensors of other shapes, sample by sample; the gradient of the weights stops."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights)
        return weights.softmax(-1) @ x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weights,) = ctx.saved_tensors
        return weights.softmax(-1).transpose(-1, -2) @ grads[0], None


class Sized(torch.autograd.Function):
    """Of a size that is open where it is captured."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, batch: int) -> torch.Tensor:
        return x * batch

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class Through(nn.Module):
    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(16, 16), nn.Linear(16, 16), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.way(self.first(x), x)).square().sum()
        return result


def reversed_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Reversed.apply(x, 2.0) + Reversed.apply(x, 0.5)
    return result


def rounded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Rounded.apply(3 * x)
    return result


def centred(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Centred.apply(x)
    return result


def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = Both.apply(x, y, 2)
    third, _ = Both.apply(first, x, 3)
    result: torch.Tensor = first * second + third
    return result


def attended(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Attended.apply(x, x @ y.transpose(-1, -2))
    return result


WAYS = [reversed_twice, rounded, centred, both, attended]
CALL = (torch.linspace(-1, 1, 8 * 4 * 16).reshape(8, 4, 16),)


@pytest.mark.parametrize("plan", few(1, [Manual(dp=2, microbatches=2), Manual(dp=2, tp=2, zero=3), Manual(pp=2, microbatches=2)]), ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_those_that_were_written(way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(Through(way), plan.dp * plan.tp * plan.pp, CALL, plan)
    assert max(found.loss_error, found.output_error, found.grad_error) < 2e-6, str(found)


@pytest.mark.parametrize(
    "way, line",
    [
        (rounded, "a0 a1 a2 -> a0 a1 a2"),
        (centred, "a0 a1 a2! -> a0 a1 a2!"),
        (both, "a0 a1 a2, a0 a1 a2 -> a0 a1 a2, a0 a1 a2"),
        (attended, "b x0y1! x0y2!, b x1y1! x1y2! -> b x2y1! x2y2!"),
    ],
)
def test_dims_that_a_function_takes_one_by_one_are_free(way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], line: str) -> None:
    normal = open_session(make_skeleton(Through(way)), CALL, {}).normal
    rules = {str(rule) for node, rule in find_factors(normal.module).rules.items() if "autopar_function" in str(node.target)}
    assert rules == {line}


class Flipped(torch.autograd.Function):
    """Takes no dim element by element."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.flip(0, 1, 2)


def test_a_function_that_cannot_be_taken_apart_is_told() -> None:
    with pytest.warns(MissingRuleWarning, match=r"autopar_function\.Flipped_\w+\.default has no rule and is computed replicated"):
        found = autopar.verify(Through(lambda x, y: Flipped.apply(x)), 2, CALL, Manual(dp=2))
    assert found.grad_error < 2e-6


def test_a_size_may_be_open() -> None:
    found = autopar.verify(Through(lambda x, y: Sized.apply(x, len(x))), 2, CALL, Manual(dp=2))
    assert found.grad_error < 2e-6


def test_calls_that_numbers_tell_apart_have_ops_of_their_own() -> None:
    nodes = open_session(make_skeleton(Through(reversed_twice)), CALL, {}).normal.module.graph.nodes
    again = open_session(make_skeleton(Through(reversed_twice)), CALL, {}).normal.module.graph.nodes
    ops = [str(node.target) for node in nodes if "autopar_function" in str(node.target)]
    assert len(set(ops)) == 2
    assert ops == [str(node.target) for node in again if "autopar_function" in str(node.target)]


def scaled(by: float) -> type[torch.autograd.Function]:
    class Scaled(torch.autograd.Function):
        """Of the same name for all numbers."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * by

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * by

    return Scaled


def mixed() -> type[torch.autograd.Function]:
    class Scaled(torch.autograd.Function):
        """What a cell of a notebook has in its place later."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] - grads[0].mean(0)

    Scaled.__qualname__ = scaled(1.0).__qualname__
    return Scaled


def applying(function: type[torch.autograd.Function]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, y: function.apply(x)


class ScaledAs(torch.autograd.Function):
    """By an object, which no name tells apart from others of its class."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, setting: Setting) -> torch.Tensor:
        ctx.setting = setting
        return x * setting.by

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.setting.by, None


class Setting:
    def __init__(self, by: float) -> None:
        self.by = by


def scaled_as(setting: Setting) -> nn.Module:
    return Through(lambda x, y: ScaledAs.apply(x, setting))


def calls(model: nn.Module) -> list[fx.Node]:
    """Those of functions, in its normal graph."""
    graph = open_session(make_skeleton(model), CALL, {}).normal.module.graph
    return [node for node in graph.nodes if "autopar_function" in str(node.target)]


def test_classes_of_one_name_are_told_apart() -> None:
    twice, tenfold = scaled(2.0), scaled(10.0)
    model = Through(lambda x, y: tenfold.apply(twice.apply(x)).sin())
    found = autopar.verify(model, 2, CALL, Manual(dp=2))
    assert max(found.loss_error, found.output_error, found.grad_error) < 2e-6, str(found)
    names = [str(node.target) for node in calls(model)]
    assert len(set(names)) == 2
    assert names == [str(node.target) for node in calls(model)]


def test_a_class_that_is_defined_anew_is_shared_anew() -> None:
    for function in (scaled(2.0), mixed()):
        found = autopar.verify(Through(applying(function)), 2, CALL, Manual(dp=2))
        assert max(found.loss_error, found.output_error, found.grad_error) < 2e-6, str(found)


def test_a_plan_serves_the_same_model_with_another_object() -> None:
    plan = autopar.plan(scaled_as(Setting(2.0)), 2, CALL, plan=Manual(dp=2))
    found = autopar.verify(scaled_as(Setting(2.0)), 2, CALL, autopar.Plan.from_json(plan.to_json()))
    assert found.grad_error < 2e-6


def test_models_keep_what_their_ops_are_of_one_name() -> None:
    (twice,), (tenfold,) = (calls(scaled_as(Setting(by))) for by in (2.0, 10.0))
    assert str(twice.target) == str(tenfold.target)
    x = torch.ones(4)
    assert twice.target(x).equal(2 * x)  # type: ignore[operator]
    assert tenfold.target(x).equal(10 * x)  # type: ignore[operator]


def test_objects_live_no_longer_than_what_calls_with_them() -> None:
    setting = Setting(2.0)
    known, plan = weakref.ref(setting), autopar.plan(scaled_as(setting), 2, CALL, plan=Manual(dp=2))
    del setting
    calls(scaled_as(Setting(2.0)))  # torch holds the graph that it exported last
    gc.collect()
    assert known() is not None
    del plan
    gc.collect()
    assert known() is None


def test_a_function_stays_one_op_where_writes_are_traced_again() -> None:
    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.view(-1).add_(1)
        result: torch.Tensor = Reversed.apply(x, 2.0) * Sized.apply(x, len(y))
        return result

    found = autopar.verify(Through(written), 2, CALL, Manual(dp=2))
    assert max(found.loss_error, found.output_error, found.grad_error) < 2e-6, str(found)


class InList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Any) -> Any:
        return xs[0][0] * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


class InPlace(InList):
    @staticmethod
    def forward(ctx: Any, *xs: Any) -> Any:
        ctx.mark_dirty(xs[0])
        return xs[0].add_(1)


class WithNumber(InList):
    @staticmethod
    def forward(ctx: Any, *xs: Any) -> Any:
        return xs[0] * 1, 3


@pytest.mark.parametrize(
    "way, what",
    [
        (lambda x, y: InList.apply([x, y]), "InList, a torch.autograd.Function, takes tensors in a list"),
        (lambda x, y: InPlace.apply(x * 1), "InPlace, a torch.autograd.Function, changes what it is given in place"),
        (lambda x, y: WithNumber.apply(x)[0], "WithNumber, a torch.autograd.Function, gives back what is no tensor"),
    ],
)
def test_what_cannot_be_an_op_is_refused(way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], what: str) -> None:
    with pytest.raises(CaptureError, match=what):
        autopar.verify(Through(way), 2, CALL, Manual(dp=2))


def hooking(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 0.1)
    return x


def test_hooks_are_refused() -> None:
    """Plans call none: gradients would not be what they make of them."""
    with pytest.raises(CaptureError, match=r"hooks into a gradient \(test_functions.py:\d+ x.register_hook"):
        autopar.verify(Through(hooking), 2, CALL, Manual(dp=2))
    model = Through(rounded)
    handles = [
        model.second.register_full_backward_hook(lambda module, given, made: None),
        model.first.weight.register_hook(lambda grad: grad * 0.1),
    ]
    told = ("module second has backward hooks", r"parameter first.weight has hooks.*parameter.grad")
    for handle, what in zip(handles, told, strict=True):
        with pytest.raises(CaptureError, match=what):
            autopar.verify(model, 2, CALL, Manual(dp=2))
        handle.remove()
    assert autopar.verify(model, 2, CALL, Manual(dp=2)).grad_error < 2e-6
