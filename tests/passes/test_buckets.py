"""All-reduces are done in place where that harms nothing, and small ones that only leave the graph are done together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.mesh import Mesh
from autopar.passes import buckets
from autopar.passes.buckets import collect_small, reduce_in_place
from autopar.virtual import run_lockstep

aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
GROUP, OTHER = "autopar.d0", "autopar.d1"


class Built:
    """A graph that is written by hand, of values of ``numel`` float32."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")

    def call(self, target: Any, *args: Any, numel: int = 4, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(numel, dtype=dtype)
        return node

    def reduced(self, value: fx.Node, group: str = GROUP, **like: Any) -> fx.Node:
        return self.call(_c10d.all_reduce.default, value, "sum", group, **like)

    def waited(self, value: fx.Node) -> fx.Node:
        return self.call(_c10d.wait_tensor.default, value)

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule({}, self.graph)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target).removesuffix(".default").split(".")[-1] for node in module.graph.nodes if node.op == "call_function"]


def test_what_is_read_again_is_kept() -> None:
    build = Built()
    alone = build.call(aten.exp.default, build.x)
    shared = build.call(aten.exp.default, build.x)
    viewed = build.call(aten.exp.default, build.x)
    wide = build.call(aten.expand.default, build.call(aten.exp.default, build.x), [4, 4])
    reduced = [build.reduced(build.call(aten.view.default, alone, [4])), build.reduced(shared)]
    reduced += [build.reduced(viewed), build.reduced(build.x), build.reduced(wide)]
    late = build.call(aten.neg.default, build.call(aten.view.default, viewed, [2, 2]))
    module = reduce_in_place(build.module(*map(build.waited, reduced), shared, late))
    found = [node.target is _c10d.all_reduce_.default for node in module.graph.nodes if "all_reduce" in str(node.target)]
    assert found == [True, False, False, False, False]


def test_placeholders_that_are_given_are_written_to() -> None:
    build = Built()
    module = build.module(build.waited(build.reduced(build.x)))
    assert reduce_in_place(module, [build.x]).graph.find_nodes(op="call_function", target=_c10d.all_reduce_.default)


def test_small_ones_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL_NUM_BYTES", 100)
    monkeypatch.setattr(buckets, "BUCKET_NUM_BYTES", 40)
    build = Built()
    values = [build.call(aten.exp.default, build.x) for _ in range(8)]
    reduced = [build.reduced(value) for value in values[:4]]  # 16 bytes each: three are a bucket
    reduced.append(build.reduced(values[4], numel=25))
    reduced.append(build.reduced(values[5], OTHER))
    reduced.append(build.reduced(values[6], dtype=torch.float64))
    used = build.call(aten.neg.default, build.waited(build.reduced(values[7])))
    module = collect_small(reduce_in_place(build.module(*map(build.waited, reduced), used)))
    found = [name for name in targets(module) if "all_reduce" in name]
    # the large one and the one that is used inside go alone and first, what is left of each kind when it is waited for
    assert found == ["all_reduce_coalesced_", "all_reduce_", "all_reduce_", "all_reduce_", "all_reduce_", "all_reduce_"]
    ranks = [[torch.full((4,), float(rank))] for rank in range(4)]
    results = run_lockstep(module, ranks, Mesh.of((2, 2)))
    for rank in range(4):
        for i, result in enumerate(results[rank]):
            members = (rank // 2 * 2, rank // 2 * 2 + 1) if i == 5 else (rank % 2, rank % 2 + 2)
            expected = sum(torch.full((4,), float(member)).exp() for member in members)
            torch.testing.assert_close(result, -expected if i == 7 else expected)


def test_what_is_needed_soon_is_not_held_back() -> None:
    build = Built()
    first, second = (build.reduced(build.call(aten.exp.default, build.x)) for _ in range(2))
    early = build.waited(first)
    third = build.reduced(build.call(aten.exp.default, build.x))
    module = collect_small(reduce_in_place(build.module(early, build.waited(second), build.waited(third))))
    assert targets(module).count("all_reduce_coalesced_") == 1
    assert targets(module).index("all_reduce_coalesced_") < targets(module).index("wait_tensor")
    assert targets(module).count("all_reduce_") == 1
