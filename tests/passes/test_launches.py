"""Graphs that launch their ops fast, and give the same as they did."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.compile import compile_plan
from autopar.passes.launches import DIRECT, cast_all, launch_fast
from autopar.planner.session import open_session
from autopar.precision import Precision
from autopar.rules.samples import Sample, real, samples
from autopar.runtime.module import make_skeleton
from autopar.runtime.release import released, run_released
from tests.planning import MODELS, planned, rank_inputs

aten = torch.ops.aten
OWN = (
    Sample(aten._softmax.default, (real(4, 6), -1, False)),
    Sample(aten._unsafe_view.default, (real(4, 6), [2, 12])),
    Sample(aten.clone.default, (real(4, 6),), {"memory_format": torch.contiguous_format}),
    Sample(aten.add.Tensor, (real(4, 6), 2), {"alpha": 3}),
    Sample(aten.mul.Tensor, (real(4, 6), 0.5)),
    Sample(aten.sum.dim_IntList, (real(4, 6), [0], True), {"dtype": torch.float32}),
)


class Seen(TorchDispatchMode):
    """The ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def first(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


@pytest.mark.parametrize("op", DIRECT, ids=str)
@torch.no_grad()
def test_functions_of_torch_come_to_their_op(op: Any) -> None:
    own = [sample for sample in (*samples(), *OWN) if sample.op is op]
    assert own
    for sample in own:
        args, kwargs = sample.draw()
        with Seen() as seen:
            made = DIRECT[op](*args, **kwargs)
        assert torch.equal(first(made), first(op(*args, **kwargs)))
        assert seen.ops == [aten.view.default if op is aten._unsafe_view.default else op]  # which differ for autograd alone


class Building:
    """A graph of calls, each with what it gives."""

    def __init__(self) -> None:
        self.module = fx.GraphModule(nn.Module(), fx.Graph())

    def given(self, value: torch.Tensor) -> fx.Node:
        node = self.module.graph.placeholder(f"x{len(self.module.graph.nodes)}")
        node.meta["val"] = value
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.module.graph.call_function(op, args, kwargs)
        node.meta["val"] = op(*fx.node.map_arg(args, lambda used: used.meta["val"]), **kwargs)
        return node

    def run(self, *results: fx.Node) -> list[torch.Tensor]:
        """The results, which are the same when the graph launches fast."""
        given = [node.meta["val"] for node in self.module.graph.find_nodes(op="placeholder")]
        self.module.graph.output(results)
        self.module.recompile()
        expected = self.module(*given)
        launch_fast(self.module.graph)
        self.module.graph.lint()
        self.module.recompile()
        made: tuple[torch.Tensor, ...] = self.module(*given)
        for x, y in zip(made, expected, strict=True):
            assert (x.dtype, x.stride()) == (y.dtype, y.stride())
            assert torch.equal(x, y)
        return list(made)

    @property
    def called(self) -> list[str]:
        return [node.target.__name__ for node in self.module.graph.nodes if node.op == "call_function" and node.target is not getitem]


def test_looks_at_the_same_memory_are_left_out() -> None:
    building = Building()
    x = building.given(torch.randn(4, 6))
    detached = building.call(aten.detach.default, x)
    back = building.call(aten.t.default, building.call(aten.t.default, detached))
    turned = building.call(aten.transpose.int, building.call(aten.transpose.int, back, 0, 1), 0, 1)
    same = building.call(aten.view.default, turned, [4, 6])
    flat = building.call(aten._unsafe_view.default, building.call(aten.view.default, same, [2, 12]), [24])
    building.run(building.call(aten.neg.default, flat))
    assert building.called == ["reshape", "neg"]


def test_a_view_of_what_lies_otherwise_than_on_meta() -> None:
    """A CPU has a sum of an expanded and of a transposed tensor transposed, where meta has it in order: it is copied."""
    same, turned = torch.randn(2, 1, 3).expand(2, 4, 3), torch.randn(2, 3, 4).transpose(1, 2)
    assert (same.to("meta") + turned.to("meta")).is_contiguous()
    assert not (same + turned).is_contiguous()
    building = Building()
    total = building.call(aten.add.Tensor, building.given(same), building.given(turned))
    total.meta["val"] = same.to("meta") + turned.to("meta")
    flat = building.module.graph.call_function(aten.view.default, (total, [8, 3]))
    flat.meta["val"] = total.meta["val"].view(8, 3)
    building.module.graph.output((flat,))
    launch_fast(building.module.graph)
    (found,) = fx.GraphModule(building.module, building.module.graph)(same, turned)
    assert torch.equal(found, (same + turned).reshape(8, 3))


def test_other_looks_stay() -> None:
    """Transposes of other dims, views of what has no such view, and what a caller gets."""
    building = Building()
    x = building.given(torch.randn(2, 3, 4))
    turned = building.call(aten.transpose.int, building.call(aten.transpose.int, x, 0, 1), 1, 2)
    apart = building.call(aten.view.default, building.call(aten.view.default, turned, [3, 2, 2, 2]), [3, 4, 2])
    detached = building.call(aten.detach.default, x)
    _, given = building.run(building.call(aten.neg.default, apart), detached)
    assert building.called == ["transpose", "transpose", "reshape", "reshape", "detach.default", "neg"]
    assert given is not x.meta["val"]


def test_vectors_are_cast_together_when_one_is_wanted() -> None:
    """Those of one dtype that are there by then. Matrices are cast where they were, and so is what is cast again."""
    building, narrow = Building(), torch.bfloat16
    a, b, matrix = (building.given(torch.randn(*shape)) for shape in ((3,), (5,), (2, 3)))
    wide = building.given(torch.randn(4, dtype=torch.float64))
    used = building.call(aten.neg.default, building.call(aten._to_copy.default, a, dtype=narrow))
    casts = [building.call(aten._to_copy.default, x, dtype=narrow) for x in (b, matrix, wide)]
    casts.append(building.call(aten._to_copy.default, a, dtype=torch.float16))
    late = [building.call(aten._to_copy.default, building.call(op, a), dtype=narrow) for op in (aten.tanh.default, aten.neg.default)]
    again = building.call(aten._to_copy.default, late[0], dtype=torch.float32)
    for node in (*casts, *late):
        node.meta["custom"] = {"of": node.name}
    building.run(used, *casts, *late, again)
    assert building.called == ["cast_all", "neg", "to", "to", "to", "tanh", "neg", "cast_all", "to"]
    *_, last = (node for node in building.module.graph.nodes if node.target is cast_all)
    assert last.meta == {"custom": {"of": late[0].name}}


def test_no_more_is_cast_together_than_a_bucket() -> None:
    """Of vectors that are given ten results of 0.4 MB; large ones, and those of integers, are cast alone."""
    building, narrow = Building(), torch.bfloat16
    given = [building.given(torch.randn(200_000)) for _ in range(12)]
    casts = [building.call(aten._to_copy.default, x, dtype=narrow) for x in given]
    large = [building.given(torch.randn(2**18)) for _ in range(2)]
    whole = [building.given(torch.arange(3)) for _ in range(2)]
    others = [building.call(aten._to_copy.default, x, dtype=narrow) for x in (*large, *whole)]
    building.run(*(building.call(aten.neg.default, x) for x in casts), *others)
    assert building.called == [*["to"] * 4, "cast_all", *["neg"] * 10, "cast_all", *["neg"] * 2]


def test_what_a_graph_is_given_in_a_list_is_not_held() -> None:
    building = Building()
    given = [building.given(torch.randn(200_000)) for _ in range(12)]
    casts = [building.call(aten._to_copy.default, x, dtype=torch.bfloat16) for x in given]
    building.module.graph.output(tuple(building.call(aten.neg.default, x) for x in casts))
    building.module = released(building.module)
    assert building.called == ["cast_all", *["neg"] * 10, "cast_all", *["neg"] * 2]


@pytest.mark.parametrize("is_view", [False, True])
def test_what_waits_holds_no_more_than_a_bucket(is_view: bool) -> None:
    """Of vectors that the graph makes six of 0.8 MB; of looks at what is larger two of 2 MiB."""
    building, narrow = Building(), torch.bfloat16
    x = building.given(torch.randn(1024, 512) if is_view else torch.randn(200_000))
    casts = []
    for _ in range(7):
        made = building.call(aten.neg.default, x)
        looked = building.call(aten.select.int, made, 0, 0) if is_view else made
        casts.append(building.call(aten._to_copy.default, looked, dtype=narrow))
    building.run(*casts)
    if is_view:
        assert building.called == [*["neg", "select.int", "neg", "select.int", "cast_all"] * 3, "neg", "select.int", "to"]
    else:
        assert building.called == [*["neg"] * 6, "cast_all", "neg", "to"]


def test_a_cast_is_there_before_its_operand_is_written_to() -> None:
    """Here by an op on a view of it; what is made of the cast comes after."""
    building, narrow = Building(), torch.bfloat16
    a, b = (building.given(torch.randn(*size)) for size in ((1, 3), (5,)))
    own = building.call(aten.neg.default, a)
    looks = [building.call(aten.view.default, own, size) for size in ([3], [3, 1])]
    casts = [building.call(aten._to_copy.default, x, dtype=narrow) for x in (looks[0], b)]
    building.call(aten.tanh_.default, looks[1])
    building.run(*casts, own)
    assert building.called == ["neg", "reshape", "reshape", "cast_all", "tanh_.default"]


def test_a_copy_is_no_cast() -> None:
    """Of the same dtype, or in another order."""
    building = Building()
    x = building.given(torch.randn(4, 4).t())
    same = building.call(aten._to_copy.default, x, dtype=torch.float32)
    ordered = building.call(aten._to_copy.default, x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    plain = building.call(aten._to_copy.default, x, dtype=torch.bfloat16, layout=torch.strided, device=torch.device("cpu"))
    building.run(same, ordered, plain)
    assert building.called == ["_to_copy.default", "_to_copy.default", "to"]


def test_a_move_to_another_device_is_no_cast() -> None:
    building = Building()
    moved = building.call(aten._to_copy.default, building.given(torch.randn(3)), dtype=torch.bfloat16, device=torch.device("meta"))
    building.module.graph.output((moved,))
    launch_fast(building.module.graph)
    assert building.called == ["_to_copy.default"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
@torch.no_grad()
def test_models_give_the_same_bits(name: str) -> None:
    example = MODELS[name](layers=2)
    session = open_session(make_skeleton(example.model), (), example.batch, precision=Precision.of("bf16"))
    plan = planned(session, (1,))
    halves = compile_plan(session.normal, plan, device=torch.device("cpu"), training=True).halves
    assert halves.backward is not None
    (given,) = rank_inputs(example, session.normal, plan)
    expected = halves.forward(*given)
    tangents = [torch.ones_like(expected[i]) for i in halves.differentiable]
    saved = [*expected[halves.num_outputs :], *tangents]
    grads = halves.backward(*saved)
    for module, inputs, results in ((halves.forward, given, expected), (halves.backward, saved, grads)):
        made = run_released(module, [*inputs])
        assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(made, results, strict=True))
        nodes = module.meta["autopar.released"].graph.nodes
        launched = [node.target for node in nodes]
        assert ["val" in node.meta for node in nodes if node.target is cast_all] == [False]
        assert not {aten.mm.default, aten.view.default, aten._to_copy.default}.intersection(launched)
