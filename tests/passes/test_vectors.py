"""Gathers and reductions of vectors are done several at a time, all else one by one, and the values are the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

import autopar
from autopar import Manual
from autopar.compile import compile_plan, compile_stage
from autopar.mesh import Mesh
from autopar.passes import vectors
from autopar.passes.narrow import cast
from autopar.passes.overlap import ALL_GATHER, REDUCE_SCATTER
from autopar.passes.vectors import ALL_REDUCE, TOGETHER, gather_together, reduce_together
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from autopar.virtual import run_lockstep
from tests.marks import few
from tests.planning import Wanted, compiled, num_of, opened, planned, rank_inputs

aten, WAIT = torch.ops.aten, torch.ops._c10d_functional.wait_tensor.default
D0, D1 = "autopar.d0", "autopar.d1"
MESH = Mesh.of((2, 2))


class Built:
    """A graph that is written by hand, of ``sizes`` as inputs."""

    def __init__(self, *sizes: tuple[int, ...]) -> None:
        self.graph = fx.Graph()
        with FakeTensorMode():
            values = [torch.empty(size) for size in sizes]
        self.inputs = [self._with(self.graph.placeholder(f"x{i}"), value) for i, value in enumerate(values)]

    def _with(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        node.meta |= {"val": value, "custom": {"moved": node.name}}
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        return self._with(node, target(*fx.node.map_arg(args, lambda used: used.meta["val"])))

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return cast(self.graph, x, dtype)

    def gathered(self, x: fx.Node, group: str = D0) -> fx.Node:
        shape = list(x.meta["val"].shape)
        started = self._collective(ALL_GATHER, self.call(aten.view.default, x, [-1]), 2, group, numel=2 * x.meta["val"].numel())
        return self.call(aten.view.default, started, [2 * shape[0], *shape[1:]])

    def scattered(self, x: fx.Node, group: str = D0) -> fx.Node:
        shape = list(x.meta["val"].shape)
        flat = self.call(aten.view.default, x, [-1])
        started = self._collective(REDUCE_SCATTER, flat, "sum", 2, group, numel=x.meta["val"].numel() // 2)
        return self.call(aten.view.default, started, [shape[0] // 2, *shape[1:]])

    def reduced(self, x: fx.Node, group: str = D0) -> fx.Node:
        return self._collective(ALL_REDUCE, x, "sum", group, numel=x.meta["val"].numel())

    def _collective(self, target: Any, x: fx.Node, *args: Any, numel: int) -> fx.Node:
        started = self._with(self.graph.call_function(target, (x, *args)), x.meta["val"].new_empty(numel))
        return self._with(self.graph.call_function(WAIT, (started,)), started.meta["val"])

    def module(self, *results: fx.Node | None) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def started(module: fx.GraphModule) -> list[tuple[str, int]]:
    """Collectives with the number of tensors that each is for."""
    names = {ALL_GATHER: "gather", REDUCE_SCATTER: "scatter", ALL_REDUCE: "reduce"}
    return [(names[node.target], num_of(node)) for node in module.graph.nodes if node.target in names]


def agree(module: fx.GraphModule, changed: fx.GraphModule, shapes: Iterable[tuple[int, ...]]) -> None:
    """Fail unless both give every rank the same, to the last bit."""
    torch.manual_seed(0)
    ranks = [[torch.randn(shape) for shape in shapes] for _ in range(MESH.num_ranks)]
    for plain, other in zip(run_lockstep(module, ranks, MESH), run_lockstep(changed, ranks, MESH), strict=True):
        assert len(plain) == len(other)
        assert all(torch.equal(x, y) and x.shape == y.shape for x, y in zip(plain, other, strict=True))


def test_vectors_are_gathered_together_and_matrices_alone() -> None:
    sizes = (4,), (3, 4), (6,), (1,)
    build = Built(*sizes)
    module = build.module(*(build.call(aten.neg.default, build.gathered(x)) for x in build.inputs))
    changed = gather_together(module, range(4))
    assert started(module) == [("gather", 1)] * 4
    assert started(changed) == [("gather", 3), ("gather", 1)]
    (together,) = [node for node in changed.graph.nodes if node.target is ALL_GATHER and TOGETHER in node.meta]
    assert [custom["moved"] for custom in together.meta[TOGETHER]] == ["all_gather_into_tensor_default", *together_names(module, (2, 3))]
    agree(module, changed, sizes)


def together_names(module: fx.GraphModule, places: Iterable[int]) -> list[str]:
    gathers = [node for node in module.graph.nodes if node.target is ALL_GATHER]
    return [gathers[i].name for i in places]


def test_gathers_start_where_the_first_did_and_pieces_are_taken_where_they_are_used() -> None:
    build = Built((4,), (4,))
    first = build.call(aten.neg.default, build.gathered(build.inputs[0]))
    between = build.call(aten.exp.default, first)
    module = build.module(between, build.call(aten.neg.default, build.gathered(build.inputs[1])))
    order = [node.target for node in gather_together(module, (0, 1)).graph.nodes if node.op == "call_function"]
    assert order.index(ALL_GATHER) < order.index(aten.exp.default)
    assert len(order) - 1 - order[::-1].index(aten.slice.Tensor) > order.index(aten.exp.default)


def test_groups_dtypes_and_inputs_that_are_no_parameters_are_told_apart() -> None:
    build, sizes = Built((4,), (4,), (4,), (4,)), ((4,),) * 4
    wide = build.cast(build.inputs[2], torch.float64)
    results = [build.gathered(build.inputs[0]), build.gathered(build.inputs[1], D1), build.gathered(wide), build.gathered(build.inputs[3])]
    module = build.module(*results)
    assert started(gather_together(module, (0, 1, 2))) == [("gather", 1)] * 4
    changed = gather_together(module, (0, 1, 2, 3))
    assert started(changed) == [("gather", 2), ("gather", 1), ("gather", 1)]
    agree(module, changed, sizes)


def test_buckets_are_filled_and_large_vectors_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "BUCKET_NUM_BYTES", 64)
    monkeypatch.setattr(vectors, "SMALL_NUM_BYTES", 64)
    sizes = (4,), (4,), (8,), (4,), (4,), (4,)  # gathered 32 bytes but for the third: two are a bucket
    build = Built(*sizes)
    module = build.module(*map(build.gathered, build.inputs))
    changed = gather_together(module, range(6))
    assert started(changed) == [("gather", 2), ("gather", 1), ("gather", 2), ("gather", 1)]
    agree(module, changed, sizes)
    build = Built((8,), (8,), (16,), (8,))
    module = build.module(*reversed([build.scattered(x) for x in build.inputs]))  # what comes first fills the first
    changed = reduce_together(module)
    assert started(changed) == [("scatter", 2), ("scatter", 1), ("scatter", 1)]
    agree(module, changed, ((8,), (8,), (16,), (8,)))


def test_what_goes_over_two_axes_does_so_together_twice() -> None:
    sizes = (4,), (2,), (3, 2)
    build = Built(*sizes)
    module = build.module(*(build.gathered(build.gathered(x), D1) for x in build.inputs))
    changed = gather_together(module, range(3))
    assert started(changed) == [("gather", 2), ("gather", 2), ("gather", 1), ("gather", 1)]
    agree(module, changed, sizes)


def test_a_vector_with_two_ways_goes_alone() -> None:
    build = Built((4,), (4,), (4,))
    half = build.gathered(build.inputs[0])
    ways = [build.gathered(half, D1), build.gathered(build.call(aten.neg.default, half), D1)]
    module = build.module(*ways, *(build.gathered(build.gathered(x), D1) for x in build.inputs[1:]))
    changed = gather_together(module, range(3))
    assert started(changed) == [("gather", 1)] * 3 + [("gather", 2)] * 2
    agree(module, changed, ((4,),) * 3)


def test_gradients_of_vectors_are_scattered_when_the_last_is_there() -> None:
    sizes = (8,), (4, 4), (4,), (12,)
    build = Built(*sizes)
    grads = [build.scattered(build.call(aten.exp.default, x)) for x in build.inputs]
    module = build.module(grads[2], None, grads[0], grads[1], grads[3])
    changed = reduce_together(module)
    assert started(changed) == [("scatter", 1), ("scatter", 3)]
    names = [node.target for node in changed.graph.nodes]
    last = len(names) - 1 - names[::-1].index(aten.exp.default)
    assert names[last:].count(REDUCE_SCATTER) == 1  # the row of three; nothing that is computed comes behind it
    assert names[:last].count(aten.slice.Tensor) == 0
    agree(fx.GraphModule({}, without_none(module)), fx.GraphModule({}, without_none(changed)), sizes)


def without_none(module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    result: Any = graph.graph_copy(module.graph, {})
    graph.output(tuple(node for node in result if node is not None))
    return graph


def test_vectors_of_zero1_do_not_travel_with_those_of_zero2() -> None:
    """Whose reductions would have to wait for them, since they start last."""
    names = {"zero1": ("*.c_attn.bias", "*.ln_*.weight"), "zero2": ("*.c_fc.bias", "*.ln_*.bias")}
    _, session = opened("gpt2")
    plan = planned(session, (2,), *(autopar.pin(name, d0=level) for level, named in names.items() for name in named))
    backward = compile_plan(session.normal, plan, device=torch.device("cpu"), training=True).halves.backward
    assert backward is not None
    scatters = backward.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    levels = [{plan.parameter(c["moved"]).held for c in node.meta[TOGETHER]} for node in scatters if TOGETHER in node.meta]
    assert levels == [{("Z2",)}, {("Z1",)}]


def test_gradients_over_two_axes_and_those_that_come_late() -> None:
    sizes = ((8,),) * 6
    build = Built(*sizes)
    x = build.inputs
    twice = [build.scattered(build.scattered(y), D1) for y in x[:2]]
    replicas = [build.reduced(build.scattered(y), D1) for y in x[2:4]]
    module = build.module(*twice, *replicas, build.scattered(x[4]), build.scattered(x[5]))
    changed = reduce_together(module)
    assert started(changed) == [("scatter", 2), ("scatter", 2), ("scatter", 2), ("reduce", 2), ("scatter", 2)]
    agree(module, changed, sizes)
    assert started(reduce_together(module, late=(4,)))[-2:] == [("scatter", 1)] * 2


def test_gradients_that_are_cast_when_they_are_reduced_travel_together() -> None:
    build = Built((8,), (8,))
    module = build.module(*(build.cast(build.scattered(x), torch.float64) for x in build.inputs))
    changed = reduce_together(module)
    assert started(changed) == [("scatter", 2)]
    agree(module, changed, ((8,), (8,)))


def test_what_is_read_on_its_way_or_reduced_otherwise_is_left() -> None:
    build = Built(*((8,),) * 6)
    x = build.inputs
    read = build.scattered(x[0])
    gathered = [build.scattered(build.gathered(y)) for y in x[1:3]]
    reduced = [build.reduced(y) for y in x[3:5]]
    module = build.module(read, build.call(aten.exp.default, read), *gathered, *reduced, build.scattered(x[5]))
    assert reduce_together(module) is module


PLANS: dict[str, Wanted] = {
    "zero1": Manual(dp=4, zero=1),
    "zero3": Manual(dp=4, zero=3),
    "tp_zero2": Manual(dp=2, tp=2, zero=2),
    "tp_zero3": Manual(dp=2, tp=2, zero=3),
}


@pytest.mark.parametrize("plan", few(2, PLANS))
def test_plans_compute_the_same_with_vectors_together(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example, session = opened("gpt2")
    made, together = compiled("gpt2", PLANS[plan])
    monkeypatch.setattr(vectors, "SMALL_NUM_BYTES", 0)
    alone = compile_plan(session.normal, made, device=torch.device("cpu"), training=True)
    inputs = rank_inputs(example, session.normal, made)
    counts = []
    for halves in (alone.halves, together.halves):
        assert halves.backward is not None
        counts.append(len(started(halves.forward)) + len(started(halves.backward)))
        outputs = run_lockstep(halves.forward, inputs, made.mesh)
        loss = [found[: halves.num_outputs] for found in outputs]
        given = [[*found[halves.num_outputs :], torch.ones(())] for found in outputs]
        grads = run_lockstep(halves.backward, given, made.mesh)
        if halves is alone.halves:
            expected = loss, grads
    for values, others in zip(expected, (loss, grads), strict=True):
        for one, other in zip(values, others, strict=True):
            for x, y in zip(one, other, strict=True):
                torch.testing.assert_close(x, y)
    assert counts[1] < counts[0] - 10


class Unheard(nn.Module):
    """Of its four vectors two are in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = self.second(x) * self.third
        loss: torch.Tensor = (self.first(x) * gate).square().mean()
        return loss


def test_a_vector_without_gradient_does_not_travel_with_others() -> None:
    torch.manual_seed(0)
    x, config = torch.randn(8, 8), Manual(dp=2, zero=1, microbatches=2)
    assert autopar.verify(Unheard(), 2, (x,), config).grad_error < 1e-6
    session = open_session(make_skeleton(Unheard()), (x,), {})
    made = compile_stage(session.normal, planned(session, config), 0, device=torch.device("cpu"), training=True)
    assert made.prepare is not None
    assert {made.names[made.taken[i]] for i in made.prepare.with_grad} == {"first.weight", "first.bias"}
