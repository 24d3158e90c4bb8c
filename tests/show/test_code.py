from __future__ import annotations

import ast
import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from autopar.capture.trace import capture
from autopar.compile import normal_graph
from autopar.ops import collectives
from autopar.rules.registry import TensorSpec
from autopar.show.code import dtype_text, graph_code
from tests import models


def local_graph() -> fx.GraphModule:
    graph = fx.Graph()
    x, coordinate = graph.placeholder("x"), graph.placeholder("coordinate_tp")
    x.meta.update(specs=(TensorSpec((4, 8)),), layout="[R S1]")
    coordinate.meta.update(specs=(TensorSpec((1,), torch.int64),))
    whole = graph.call_function(
        collectives.all_gather,
        (x, coordinate),
        {"axis": "tp", "size": 4, "spot": collectives.Spot(1, 1), "partial_grad": True},
    )
    whole.meta.update(specs=(TensorSpec((4, 32)),), layout="[R R*]", module="h.0", line="model.py:3 y = self.f(x)")
    parts = graph.call_function(torch.ops.aten.split.Tensor, (whole, 16, 1))
    parts.meta.update(specs=(TensorSpec((4, 16)),) * 2, module="h.0", line="model.py:4 a, b = y.split(16)")
    first = graph.call_function(operator.getitem, (parts, 0))
    filled = graph.call_function(torch.ops.aten.masked_fill.Scalar, (first, first, float("-inf")))
    filled.meta.update(module="h.1", line="model.py:9\n  continued")
    made = graph.call_function(
        torch.ops.aten.arange.default, (4,), {"dtype": torch.bfloat16, "device": torch.device("cpu"), "layout": torch.strided}
    )
    moved = graph.call_method("to", (made, None), {"index": slice(None, 2), "sizes": [1, (2,)]})
    graph.output((filled, moved))
    return fx.GraphModule({}, graph)


def test_a_local_graph(golden: Callable[[str, str], None]) -> None:
    code = graph_code(local_graph())
    ast.parse(code)
    golden("show/graph_code", code)


def test_collectives_keep_their_name() -> None:
    assert "collectives.all_gather(x, coordinate_tp, axis='tp', size=4, spot=Spot(dim=1, before=1)" in graph_code(local_graph())


def test_what_no_line_asked_for_does_not_part_a_module() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for module, line in (("h.0", "model.py:1 a"), ("", ""), ("h.0", "model.py:2 b"), ("", "model.py:3 loss")):
        node = graph.call_function(torch.ops.aten.relu.default, (node,))
        node.meta.update(module=module, line=line)
    graph.output(node)
    comments = [line.strip() for line in graph_code(fx.GraphModule({}, graph)).splitlines() if line.strip().startswith("#")]
    assert comments == ["# h.0", "# the model itself"]


@pytest.mark.parametrize("build", [models.gpt2, models.bert, models.mlp])
def test_normal_graphs_are_python(build: Callable[[], models.Example]) -> None:
    model, batch = build()
    captured = capture(model, (), dict(batch))
    for module in (captured.graph, normal_graph(captured, captured.sizes).module):
        code = graph_code(module)
        (function,) = ast.parse(code).body
        assert isinstance(function, ast.FunctionDef)
        calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        assert len(function.body) == len(calls) + 1


def test_a_line_has_shape_source_and_op() -> None:
    model, batch = models.gpt2()
    captured = capture(model, (), dict(batch))
    code = graph_code(normal_graph(captured, captured.sizes).module)
    (line, *_) = [line for line in code.splitlines() if "aten.layer_norm" in line]
    assert ': "f32[4, 16, 96]" = torch.ops.aten.layer_norm.default(' in line
    assert "  # modeling_gpt2.py:" in line
    assert "    # transformer.h.0.ln_1" in code
    assert "# parameter transformer.wte.weight" in code


@pytest.mark.parametrize(
    "dtype, text", [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.bool, "b8"), (torch.uint8, "u8"), (torch.int64, "i64")]
)
def test_dtypes(dtype: torch.dtype, text: str) -> None:
    assert dtype_text(dtype) == text
