"""Capture of models as users write them, traps of export included, and what the user reads when it cannot be done."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import autopar
from autopar.capture.outputs import Constant, leaves_of_call
from autopar.capture.trace import Captured, Signature, Source, capture
from autopar.errors import CaptureError, InputError
from autopar.graph import outputs_of
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from tests import models
from tests.marks import few

pytestmark = pytest.mark.slow


def inputs_of(captured: Captured) -> list[str]:
    return [entry.name for entry in captured.placeholders if entry.source is Source.INPUT]


class Small(nn.Module):
    """A linear layer before what a test is about."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def test_tied_parameters_are_one_placeholder_with_an_alias() -> None:
    model, batch = models.gpt2(tied=True)
    captured = capture(model, (), batch)
    parameters = [entry for entry in captured.placeholders if entry.source is Source.PARAMETER]
    assert [entry.name for entry in parameters] == [name for name, _ in model.named_parameters()]
    (tied,) = [entry for entry in parameters if entry.aliases]
    assert (tied.name, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))


def test_untied_parameters_have_no_alias() -> None:
    model, batch = models.gpt2(tied=False)
    entries = capture(model, (), batch).placeholders
    assert not any(entry.aliases for entry in entries)
    assert {"lm_head.weight", "transformer.wte.weight"} <= {entry.name for entry in entries}


def test_one_tensor_given_twice_is_two_inputs() -> None:
    model, batch = models.gpt2()
    ids = batch["input_ids"]
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    assert inputs_of(captured) == ["input_ids", "labels"]
    graph = captured.graph.graph
    assert all(node.users for node in graph.find_nodes(op="placeholder") if node.name in ("input_ids", "labels"))


def test_order_of_keywords_does_not_matter() -> None:
    model, batch = models.gpt2()
    turned = dict(reversed(batch.items()))
    assert list(turned) != list(batch)
    assert Signature.of((), turned) == Signature.of((), batch)
    first, second = capture(model, (), batch), capture(model, (), turned)
    assert first.placeholders == second.placeholders
    assert str(first.graph.graph) == str(second.graph.graph)


def test_signatures_tell_calls_apart() -> None:
    _, batch = models.gpt2()
    signature = Signature.of((), batch)
    assert signature != Signature.of((), models.gpt2(batch=2).batch)
    assert signature != Signature.of((), {**batch, "use_cache": False})
    assert Signature.of((), {**batch, "use_cache": True}) != Signature.of((), {**batch, "use_cache": False})


@pytest.mark.parametrize("build", few(3, [models.gpt2, models.vit, models.mlp, models.bert, models.nn_transformer_encoder]))
def test_the_batch_of_every_input_is_a_symbol(build: Callable[..., models.Example]) -> None:
    model, batch = build(batch=6)
    captured = capture(model, (), batch)
    assert captured.static_reason == ""
    assert set(captured.sizes.values()) == {6}
    nodes = captured.graph.graph.find_nodes(op="placeholder")
    sizes = [node.meta["val"].shape[0] for node, entry in zip(nodes, captured.placeholders, strict=True) if entry.name in batch]
    assert len(sizes) == len(batch)
    assert {size.node.expr for size in sizes} == set(captured.sizes)


def in_graph_order(captured: Captured, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [batch[name] for name in inputs_of(captured)]


def test_sizes_are_bound_for_another_batch() -> None:
    model, batch = models.bert()
    captured = capture(model, (), batch)
    bound = captured.bind_sizes(in_graph_order(captured, models.bert(batch=6).batch))
    assert bound == dict.fromkeys(captured.sizes, 6)


def test_sizes_that_do_not_fit_are_refused() -> None:
    model, batch = models.bert()
    captured = capture(model, (), batch)
    with pytest.raises(InputError, match=r"has size 8 in dim 1 \(shape \(4, 8\)\), the captured model needs 16"):
        captured.bind_sizes(in_graph_order(captured, models.bert(sequence=8).batch))
    uneven = {**batch, "labels": models.bert(batch=6).batch["labels"]}
    with pytest.raises(InputError, match=r"has size \d in dim 0 .* the captured model needs \d; give inputs of equal batch size"):
        captured.bind_sizes(in_graph_order(captured, uneven))


class Nested(Small):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, object]:
        y = self.linear(x)
        return {"loss": y.sum() * scale, "rest": (y, [3, None]), "name": "nested"}


def test_nested_outputs_keep_their_structure_and_constants() -> None:
    captured = capture(Nested(), (torch.randn(2, 4),), {"scale": 3.0})
    assert captured.outputs == (None, None, Constant(3), Constant(None), Constant("nested"))
    rebuilt = pytree.tree_unflatten(["loss", "y", 3, None, "nested"], captured.out_spec)
    assert rebuilt == {"loss": "loss", "rest": ("y", [3, None]), "name": "nested"}
    assert inputs_of(captured) == ["x"]


class Counting(Small):
    def forward(self, x: torch.Tensor, of_values: bool = False) -> tuple[object, ...]:
        y = self.linear(x).sum()
        return y, x.shape[0], y.item() if of_values else x.numel() // 3, self.linear(x)


@pytest.mark.parametrize("only_losses", [False, True])
def test_numbers_are_those_of_each_call(only_losses: bool) -> None:
    captured = capture(Counting(), (torch.randn(3, 4),), {}, only_losses=only_losses)
    (rows,) = captured.sizes
    last = Constant(None) if only_losses else None
    assert leaves_of_call(captured.outputs, captured.sizes) == (None, Constant(3), Constant(4), last)
    assert leaves_of_call(captured.outputs, {rows: 5}) == (None, Constant(5), Constant(6), last)
    assert len(outputs_of(captured.graph.graph)) == 2 - only_losses


def test_numbers_that_values_tell_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"a number that depends on values of tensors \(test_trace\.py:.*take \.item\(\) of it after"):
        capture(Counting(), (torch.randn(3, 4), True), {})


def test_a_model_output_is_rebuilt_as_its_type() -> None:
    model, batch = models.gpt2()
    captured = capture(model, (), batch)
    rebuilt = pytree.tree_unflatten([torch.tensor(1.0), torch.tensor(2.0)], captured.out_spec)
    assert type(rebuilt) is type(model(**batch))
    assert (float(rebuilt.loss), float(rebuilt.logits)) == (1.0, 2.0)


class WithBuffers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.constant = torch.full((4,), 5.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.linear(x) * self.scale + self.shift + self.constant).sum()
        return result


@pytest.mark.filterwarnings("error:Attempted to insert a get_attr Node")
def test_buffers_are_placeholders_and_plain_tensors_are_constants() -> None:
    model, x = WithBuffers(), torch.randn(2, 4)
    captured = capture(model, (x,), {})
    buffers = [entry.name for entry in captured.placeholders if entry.source is Source.BUFFER]
    assert buffers == ["scale", "shift"]
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
    (result,) = captured.graph(*(state[entry.name] for entry in captured.placeholders))
    torch.testing.assert_close(result, model(x))


class Branches(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if y.sum() > 0:  # the line to blame
            return y
        return y * 2


class Sizes(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int(x.argmax())
        result: torch.Tensor = self.linear(x)[:count].sum()
        return result


@pytest.mark.parametrize("kind, line", [(Branches, "if y.sum() > 0:"), (Sizes, "count = int(x.argmax())")])
def test_data_dependent_control_flow_is_blamed_on_its_line(
    kind: type[nn.Module], line: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(CaptureError) as error:
        capture(kind(), (torch.randn(2, 4),), {})
    text = str(error.value)
    assert text.startswith(f"cannot capture {kind.__name__} as one graph at {__file__}:")
    assert f"in forward: `{line}" in text
    assert "use torch.where, torch.cond, or masks instead of Python if/int()/.item()" in text
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")


def test_code_is_made_for_what_is_called_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after every pass of the export; afterwards graph modules are as ever, also where the export failed."""
    made, make_code, recompile = list[int](), fx.Graph.python_code, fx.GraphModule.recompile

    def counted(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        made.append(len(graph.nodes))
        return make_code(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", counted)
    model, batch = models.gpt2(layers=1, device="meta")
    captured = capture(make_skeleton(model), (), batch)
    whole = len(captured.graph.graph.nodes)
    assert sum(size >= whole // 2 for size in made) == 1
    assert "def forward" in captured.graph.code
    with pytest.raises(CaptureError):
        capture(Branches(), (torch.randn(2, 4),), {})
    assert fx.GraphModule.recompile is recompile


def test_logging_is_as_it_was_after_a_failure() -> None:
    with pytest.raises(CaptureError):
        capture(Branches(), (torch.randn(2, 4),), {})
    assert not logging.getLogger("torch.fx.experimental.symbolic_shapes").disabled


class WrongShapes(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) @ torch.ones(3, 3)
        return result


def test_an_error_of_the_model_is_quoted() -> None:
    with pytest.raises(CaptureError, match=r"`result: .* torch\.ones\(3, 3\)`(.|\n)*check that the model runs on this batch by itself"):
        capture(WrongShapes(), (torch.randn(2, 4),), {})


def test_a_wrong_call_is_refused_at_once() -> None:
    with pytest.raises(CaptureError, match="Branches cannot be called with this batch: missing a required argument: 'x'"):
        capture(Branches(), (), {"y": torch.randn(2, 4)})


def test_buffers_that_change_come_last() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    captured = capture(model, (torch.randn(2, 4),), {})
    (output,) = captured.graph.graph.find_nodes(op="output")
    assert sorted(captured.updates) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert [tuple(node.meta["val"].shape[1:]) for node in output.args[0][:1]] == [(4,)]
    assert len(output.args[0]) == 4
    assert len(captured.outputs) == 1
    assert capture(model.eval(), (torch.randn(2, 4),), {}).updates == ()


class Writing(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.mul_(2))
        return out.sum()


def test_inputs_that_change_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes 'x' in place \(user input mutation\).*work on a copy of it"):
        capture(Writing(), (torch.randn(2, 4),), {})


class Contrastive(Small):
    """Its targets are the positions in the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        targets = torch.tensor(list(range(x.shape[0])), device=x.device)
        return nn.functional.cross_entropy(y @ y.T, targets)


class Refusing(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x.shape[0], int):
            raise TypeError("the batch must be a number")
        result: torch.Tensor = self.linear(x).sum()
        return result


@pytest.mark.parametrize(
    "kind, reason",
    [(Contrastive, "the model computes with the batch size 8 itself"), (Refusing, "TypeError: the batch must be a number")],
)
def test_a_batch_that_cannot_be_symbolic_is_noted(kind: type[nn.Module], reason: str) -> None:
    model, x = kind(), torch.randn(8, 4)
    captured = capture(model, (x,), {})
    assert captured.sizes == {}
    assert captured.static_reason == reason
    assert open_session(model, (x,), {}).captured.static_reason == reason


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_without_rows_is_refused(training: bool) -> None:
    """Of the first input that has dims; another may be empty."""
    model = nn.Linear(4, 4).train(training)
    with pytest.raises(InputError, match=r"input \[0\] of shape \(0, 4\) has no rows: its dim 0 is the batch"):
        autopar.plan(model, 2, (torch.zeros(0, 4),))
    captured = open_session(Beside(), (torch.ones(()), torch.zeros(8, 4), torch.zeros(0)), {})
    assert captured.batch_size == 8
    with pytest.raises(InputError, match=r"input \['x'\] of shape \(0, 4\) has no rows"):
        open_session(Beside(), (torch.ones(()),), {"x": torch.zeros(0, 4), "y": torch.zeros(2)})


class Beside(nn.Module):
    def forward(self, scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (scale * x).sum() + y.sum()


class OnTheCpu(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (self.linear(x) + torch.ones(4, device="cpu")).sum()
        return result


def test_a_tensor_made_elsewhere_is_explained() -> None:
    with pytest.raises(CaptureError, match=r"on the device of its inputs \(device=x\.device\)"):
        autopar.plan(OnTheCpu(), 2, (torch.randn(8, 4),))


def test_an_output_that_cannot_be_opened_is_explained() -> None:
    example = models.gpt2()
    cast(Any, example.model).config.use_cache = True
    with pytest.raises(CaptureError, match=r"DynamicCache(.|\n)*called with use_cache=False"):
        autopar.plan(example.model, 2, example.batch)


def test_a_batch_of_one_is_noted() -> None:
    assert "batch size 1" in capture(Nested(), (torch.randn(1, 4),), {}).static_reason


def test_lines_are_those_of_the_user() -> None:
    captured = capture(WithBuffers(), (torch.randn(2, 4),), {})
    lines = {node.meta["line"] for node in captured.graph.graph.nodes if node.op == "call_function"}
    assert len(lines) == 1
    assert lines.pop().startswith("test_trace.py:")


def test_frames_are_those_that_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def traces() -> list[str]:
        model, batch = models.gpt2(layers=1, device="meta")
        return [node.meta.get("stack_trace", "") for node in capture(make_skeleton(model), (), batch).graph.graph.nodes]

    found = traces()
    monkeypatch.setattr("autopar.capture.trace.frames_of_forwards", nullcontext)
    assert found == traces()
    assert any(found)


@pytest.mark.parametrize("build", few(1, [models.llama, models.gpt2, models.t5, models.batch_norm]), ids=lambda build: build.__name__)
def test_normal_graphs_are_alike_with_and_without_a_symbolic_batch(build: Callable[..., models.Example]) -> None:
    """So that a plan that was made for a described cluster binds to what `parallelize` captures."""
    example = build(device="meta")
    whole, static = (open_session(make_skeleton(example.model), (), example.batch, symbolic=symbolic) for symbolic in (True, False))
    assert whole.hash == static.hash
    assert static.captured.static_reason == ""


@pytest.mark.parametrize("given, text", [
    (torch.ones(4, 8, dtype=torch.float64), r"aten.linear.default takes values of several dtypes, float64\[\d+, 8\], float32\[3, 8\]"),
    (torch.ones(4, 8, dtype=torch.int64), r"int64\[\d+, 8\], float32\[3, 8\].* which torch refuses; convert the batch"),
])  # fmt: skip
def test_products_of_several_dtypes_are_refused(given: torch.Tensor, text: str) -> None:
    """Torch does so, but not on meta."""
    with torch.device("meta"):
        model = nn.Linear(8, 3)
    with pytest.raises(CaptureError, match=text):
        capture(model, (given.to("meta"),), {}, symbolic=False)
