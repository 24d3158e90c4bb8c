"""Flops against torch's own counter, kept tensors against what autograd really keeps, bytes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from autopar.capture.trace import capture
from autopar.compile import normal_graph
from autopar.cost.compute import OpCost, evaluate, node_cost, op_cost, summed_bytes
from autopar.graph import is_call
from autopar.rules.notation import Rule
from autopar.rules.registry import Call, Op, TensorSpec, rule_of

aten = torch.ops.aten


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def call_of(op: Op, *args: object, **kwargs: object) -> Call:
    """The call that an eager call of ``op`` makes."""
    results = pytree.tree_leaves(op(*args, **kwargs))
    specs, named = pytree.tree_map_only(torch.Tensor, spec_of, (args, kwargs))
    return Call(op, specs, named, tuple(spec_of(result) for result in results))


def leaf(*shape: int, requires_grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, generator=generator) + 0.5).to(dtype).requires_grad_(requires_grad)


def index(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(0))


def counted_flops(op: Op, *args: object, **kwargs: object) -> tuple[int, int]:
    """Flops of the forward and of the backward, by torch."""
    with FlopCounterMode(display=False) as forward:
        result = op(*args, **kwargs)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def priced_flops(cost: OpCost, **sizes: int) -> tuple[float, float]:
    return float(evaluate(cost.flops, sizes)), float(evaluate(cost.backward_flops, sizes))


CONTRACTIONS = [
    (
        aten.linear.default,
        "b s k, n k -> b s n ; 0 | 1",
        (leaf(2, 8, 16), leaf(32, 16)),
        {"b": 2, "s": 8, "k": 16, "n": 32},
    ),
    (aten.mm.default, "m k, k n -> m n ; 0 | 1", (leaf(8, 16), leaf(16, 4)), {"m": 8, "k": 16, "n": 4}),
    (aten.mm.default, None, (leaf(8, 16), leaf(16, 4, requires_grad=False)), {}),
    (aten.addmm.default, "n, m k, k n -> m n", (leaf(4), leaf(8, 16), leaf(16, 4)), {"m": 8, "k": 16, "n": 4}),
    (
        aten.bmm.default,
        "b m k, b k n -> b m n ; 0 | 1",
        (leaf(3, 8, 16), leaf(3, 16, 4)),
        {"b": 3, "m": 8, "k": 16, "n": 4},
    ),
    (aten.bmm.default, None, (leaf(3, 8, 16), leaf(3, 16, 4)), {}),
    (aten.matmul.default, None, (leaf(3, 8, 16), leaf(3, 16, 4)), {}),
    (
        aten.convolution.default,
        "b c h! w!, o c i! j! -> b o y! x! ; 0 | 1",
        (leaf(2, 3, 8, 8), leaf(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {"b": 2, "c": 3, "o": 5, "i": 3, "j": 3, "h": 8, "w": 8, "x": 8, "y": 8},
    ),
]


@pytest.mark.parametrize(
    "op, line, args, sizes", CONTRACTIONS, ids=lambda x: str(x) if isinstance(x, torch._ops.OpOverload) else ""
)
def test_flops_are_those_that_torch_counts(
    op: Op, line: str | None, args: tuple[object, ...], sizes: dict[str, int]
) -> None:
    cost = op_cost(call_of(op, *args), Rule.parse(line) if line else None)
    assert cost.is_matmul
    assert priced_flops(cost, **sizes) == counted_flops(op, *args)


def test_einsum_counts_all_letters() -> None:
    args = ("bij,bjk->bik", [leaf(2, 3, 4), leaf(2, 4, 5)])
    assert priced_flops(op_cost(call_of(aten.einsum.default, *args), None)) == counted_flops(aten.einsum.default, *args)


@pytest.mark.parametrize("equation", ["btec,bte->btec", "bte,btec->tbec"])
def test_an_einsum_that_sums_over_nothing_has_no_flops(equation: str) -> None:
    first, second = (leaf(*({"b": 2, "t": 3, "e": 4, "c": 5}[x] for x in term)) for term in equation.partition("->")[0].split(","))
    cost = op_cost(call_of(aten.einsum.default, equation, [first, second]), None)
    assert not cost.is_matmul
    assert priced_flops(cost) == (0, 0)
    assert cost.saved == {0, 1}


def test_flops_of_attention_are_torch_s_formulas() -> None:
    """Torch counts the kernels of CUDA only, so its formulas are asked."""
    q, k, v = leaf(2, 4, 64, 16), leaf(2, 4, 32, 16), leaf(2, 4, 32, 16)
    call = call_of(aten.scaled_dot_product_attention.default, q, k, v)
    cost = op_cost(call, Rule.parse("b h s d!, b h t! d!, b h t! e! -> b h s e!"))
    shapes = q.shape, k.shape, v.shape
    expected = sdpa_flop_count(*shapes), sdpa_backward_flop_count(q.shape, *shapes)
    assert priced_flops(cost, b=2, h=4, s=64, t=32, d=16, e=16) == expected


def test_causal_attention_does_half_the_work() -> None:
    q, k, v = (leaf(2, 4, 64, 16) for _ in range(3))
    op = aten.scaled_dot_product_attention.default
    whole, causal = (op_cost(call_of(op, q, k, v, is_causal=flag), None) for flag in (False, True))
    assert priced_flops(causal) == tuple(flops / 2 for flops in priced_flops(whole))


def test_causal_attention_of_a_part_of_the_queries_has_a_mask() -> None:
    """All scores are computed, and a mask is kept."""
    q, k, v = (leaf(2, 4, 64, 16) for _ in range(3))
    call = call_of(aten.scaled_dot_product_attention.default, q, k, v, is_causal=True)
    rule = rule_of(call)
    assert rule is not None
    cost = op_cost(call, rule)
    sizes = {**rule.bind([(2, 4, 64, 16)] * 3, [(2, 4, 64, 16)]), "s": 32}
    assert priced_flops(cost, **sizes) == (2 * 2 * 4 * 32 * 64 * (16 + 16), 5 * 2 * 4 * 32 * 64 * (16 + 16))
    assert evaluate(cost.hidden_bytes, sizes) == 4 * 2 * 4 * 32 + 4 * 32 * 64
    assert evaluate(cost.hidden_bytes, {**sizes, "s": 64}) == 4 * 2 * 4 * 64


class Kept(NamedTuple):
    op: Op
    args: tuple[object, ...]


SQUARE = (leaf(4, 4), leaf(4, 4))
FROZEN = leaf(4, 4, requires_grad=False)
X = leaf(4, 6)
IMAGE = leaf(2, 6, 4, 4)
MASK = torch.rand(4, 6) > 0.5
KEPT = [
    Kept(aten.mm.default, SQUARE),
    Kept(aten.mm.default, (leaf(4, 4), FROZEN)),
    Kept(aten.mm.default, (FROZEN, leaf(4, 4))),
    Kept(aten.linear.default, (leaf(4, 4), FROZEN)),
    Kept(aten.bmm.default, (leaf(2, 4, 4), leaf(2, 4, 4))),
    Kept(aten.addmm.default, (leaf(4), *SQUARE)),
    Kept(aten.add.Tensor, SQUARE),
    Kept(aten.sub.Tensor, SQUARE),
    Kept(aten.mul.Tensor, SQUARE),
    Kept(aten.mul.Tensor, (leaf(4, 4), FROZEN)),
    Kept(aten.mul.Tensor, (leaf(4, 4), 2.0)),
    Kept(aten.div.Tensor, SQUARE),
    Kept(aten.div.Tensor, (leaf(4, 4), FROZEN)),
    Kept(aten.div.Tensor, (leaf(4, 4), 2.0)),
    Kept(aten.pow.Tensor_Scalar, (X, 3)),
    Kept(aten.pow.Tensor_Tensor, SQUARE),
    *(
        Kept(op, (X,))
        for op in (
            aten.relu.default,
            aten.sigmoid.default,
            aten.tanh.default,
            aten.exp.default,
            aten.sqrt.default,
            aten.rsqrt.default,
            aten.reciprocal.default,
            aten.gelu.default,
            aten.silu.default,
            aten.softplus.default,
            aten.hardswish.default,
            aten.leaky_relu.default,
            aten.elu.default,
            aten.log.default,
            aten.sin.default,
            aten.cos.default,
            aten.erf.default,
            aten.abs.default,
            aten.neg.default,
            aten.sum.default,
            aten.clone.default,
            aten.square.default,
        )
    ),
    Kept(aten.softmax.int, (X, -1)),
    Kept(aten._safe_softmax.default, (X, -1)),
    Kept(aten.log_softmax.int, (X, -1)),
    Kept(aten.logsumexp.default, (X, [-1])),
    Kept(aten.amax.default, (X, [-1])),
    Kept(aten.max.dim, (X, -1)),
    Kept(aten.topk.default, (X, 2)),
    Kept(aten.cumsum.default, (X, 0)),
    Kept(aten.clamp.default, (X, 0.0, 1.0)),
    Kept(aten.var.correction, (X, [-1])),
    Kept(aten.cat.default, ([X, X],)),
    Kept(aten.stack.default, ([X, X],)),
    Kept(aten.view.default, (X, [24])),
    Kept(aten.transpose.int, (X, 0, 1)),
    Kept(aten.expand.default, (leaf(1, 6), [4, 6])),
    Kept(aten.slice.Tensor, (X, 0, 0, 2)),
    Kept(aten.masked_fill.Scalar, (X, MASK, 0.0)),
    Kept(aten.where.self, (MASK, X, leaf(4, 6))),
    Kept(aten.tril.default, (X,)),
    Kept(aten.maximum.default, (X, leaf(4, 6))),
    Kept(aten.embedding.default, (leaf(9, 4), index(2, 3, below=9))),
    Kept(aten.gather.default, (X, 1, index(4, 2, below=6))),
    Kept(aten.index_select.default, (X, 0, index(3, below=4))),
    Kept(aten.index.Tensor, (X, [index(3, below=4)])),
    Kept(aten.scatter_add.default, (X, 0, index(4, 6, below=4), leaf(4, 6))),
    Kept(aten.index_add.default, (X, 0, index(3, below=4), leaf(3, 6))),
    Kept(aten.layer_norm.default, (X, [6], leaf(6), leaf(6))),
    Kept(aten.layer_norm.default, (X, [6])),
    Kept(aten.native_layer_norm.default, (X, [6], leaf(6), leaf(6), 1e-5)),
    Kept(aten.mse_loss.default, (X, leaf(4, 6))),
    Kept(
        aten.convolution.default, (leaf(2, 3, 8, 8), leaf(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    ),
    Kept(aten.scaled_dot_product_attention.default, tuple(leaf(2, 4, 8, 16) for _ in range(3))),
    Kept(aten.rms_norm.default, (X, [6], leaf(6))),
    Kept(aten.group_norm.default, (IMAGE, 3, leaf(6), leaf(6))),
    Kept(aten.batch_norm.default, (IMAGE, leaf(6), leaf(6), torch.zeros(6), torch.ones(6), True, 0.1, 1e-5, False)),
    Kept(aten.max_pool2d_with_indices.default, (IMAGE, [2, 2])),
    Kept(aten.nll_loss_nd.default, (X, index(4, below=6))),
    Kept(aten.binary_cross_entropy_with_logits.default, (X, leaf(4, 6, requires_grad=False))),
    Kept(aten.baddbmm.default, (leaf(2, 4, 4), leaf(2, 4, 4), leaf(2, 4, 4))),
    Kept(aten.scatter.src, (X, 0, index(4, 6, below=4), leaf(4, 6))),
    Kept(aten.index_put.default, (X, [index(3, below=4)], leaf(3, 6))),
    Kept(aten.native_dropout.default, (X, 0.5, True)),
    Kept(aten.cummax.default, (X, 0)),
    Kept(aten.cumprod.default, (X, 0)),
    Kept(aten.pow.Scalar, (2.0, X)),
    Kept(aten.addcmul.default, (X, leaf(4, 6), leaf(4, 6))),
    Kept(aten.to.dtype, (X, torch.bfloat16)),
    Kept(aten.topk.default, (FROZEN, 2)),
    Kept(aten.view_as_complex.default, (leaf(4, 6, 2),)),
    Kept(aten.polar.default, (X, leaf(4, 6))),
    Kept(aten.clamp_min.Tensor, (X, leaf(4, 6))),
    Kept(aten.median.dim, (X, 0)),
    Kept(aten.std_mean.dim, (X, [0])),
    Kept(aten.scatter_reduce.two, (X, 0, index(4, 6, below=4), leaf(4, 6), "amax")),
    Kept(aten.max_pool3d_with_indices.default, (leaf(2, 4, 4, 4, 4), [2, 2, 2])),
    Kept(aten.conv_transpose2d.input, (IMAGE, leaf(IMAGE.shape[1], 5, 2, 2), None, [2, 2])),
    Kept(aten.clamp.Tensor, (X, leaf(6, requires_grad=False), leaf(4, 6, requires_grad=False))),
    Kept(aten.binary_cross_entropy.default, (torch.rand(4, 6).requires_grad_(), torch.rand(4, 6), torch.rand(6))),
    Kept(aten.binary_cross_entropy_with_logits.default, (X, torch.rand(4, 6), torch.rand(6), torch.rand(6))),
    *(Kept(aten.pad.default, (leaf(2, 4, 6), [1, 1], mode)) for mode in ("constant", "reflect", "replicate", "circular")),
    Kept(aten.cosine_similarity.default, (X, leaf(4, 6))),
    Kept(aten.tile.default, (X, [2, 2])),
    Kept(aten.slice_scatter.default, (X, leaf(4, 2), 1, 2, 4)),
    Kept(aten.select_scatter.default, (X, leaf(4), 1, 2)),
    Kept(aten.diff.default, (X,)),
    Kept(aten.fill.Scalar, (X, 2.0)),
    Kept(aten.fill.Tensor, (X, leaf())),
    Kept(aten.trunc.default, (X,)),
    Kept(aten.remainder.Scalar, (X, 0.7)),
    Kept(aten.fmod.Scalar, (X, 0.7)),
    Kept(aten.index_copy.default, (X, 0, torch.tensor([3, 1]), leaf(2, 6))),
    Kept(aten.pixel_unshuffle.default, (leaf(2, 3, 4, 4), 2)),
]


def really_kept(op: Op, args: Sequence[object]) -> frozenset[int]:
    """Operands and results whose memory autograd holds after the call."""
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = op(*args)
    tensors = [t for t in pytree.tree_leaves((args, results)) if isinstance(t, torch.Tensor)]
    return frozenset(i for i, tensor in enumerate(tensors) if tensor.untyped_storage().data_ptr() in kept)


@pytest.mark.parametrize("case", KEPT, ids=lambda case: str(case.op))
def test_kept_tensors_are_those_that_autograd_keeps(case: Kept) -> None:
    assert op_cost(call_of(case.op, *case.args), None).saved == really_kept(case.op, case.args)


def test_cross_entropy_keeps_as_much_as_the_logits() -> None:
    call = call_of(aten.cross_entropy_loss.default, leaf(4, 9), index(4, below=9))
    cost = op_cost(call, Rule.parse("b v!, b -> ."))
    assert cost.saved == {0, 1}
    assert float(evaluate(cost.num_bytes, {"b": 4, "v": 9})) == 2 * 4 * 9 * 4 + 4 * 8 + 4


def test_a_recurrent_layer_keeps_the_gates_of_every_step() -> None:
    """Four gates of a state of 6, of 3 steps of 4 sequences."""
    weights = [leaf(24, 5), leaf(24, 6), leaf(24), leaf(24)]
    call = call_of(aten.lstm.input, leaf(4, 3, 5), [leaf(1, 4, 6)] * 2, weights, True, 1, 0.0, True, False, True)
    assert float(evaluate(op_cost(call, None).hidden_bytes, {})) == 4 * (4 * 6) * 3 * 4


def test_bytes_of_a_linear() -> None:
    call = call_of(aten.linear.default, leaf(2, 8, 16), leaf(32, 16))
    cost = op_cost(call, Rule.parse("b s k, n k -> b s n ; 0 | 1"))
    x, w, y = 4 * 2 * 8 * 16, 4 * 32 * 16, 4 * 2 * 8 * 32
    sizes = {"b": 2, "s": 8, "k": 16, "n": 32}
    assert float(evaluate(cost.num_bytes, sizes)) == x + w + y
    assert float(evaluate(cost.backward_num_bytes, sizes)) == 2 * (x + w + y)


def test_views_are_free_in_both_directions() -> None:
    cost = op_cost(call_of(aten.transpose.int, X, 0, 1), Rule.parse("a b -> b a ; 0"))
    assert (cost.num_bytes, cost.backward_num_bytes, cost.saved) == (0, 0, frozenset())


def test_windows_write_a_gradient_of_the_operand_s_size() -> None:
    cost = op_cost(call_of(aten.slice.Tensor, X, 0, 0, 2), None)
    assert (cost.num_bytes, cost.backward_num_bytes) == (0, 4 * (2 * 6 + 4 * 6))


def test_addition_passes_gradients_through_unless_it_broadcasts() -> None:
    same, broadcast = (op_cost(call_of(aten.add.Tensor, leaf(4, 6), other), None) for other in (leaf(4, 6), leaf(6)))
    assert same.backward_num_bytes == 0
    assert broadcast.backward_num_bytes == 4 * (4 * 6 + 6)


def test_embedding_reads_rows_and_not_the_table() -> None:
    call = call_of(aten.embedding.default, leaf(1000, 4), index(2, 3, below=9))
    cost = op_cost(call, Rule.parse("v& d, b s -> b s d ; 0"))
    assert float(evaluate(cost.num_bytes, {"v": 1000, "d": 4, "b": 2, "s": 3})) == 2 * 4 * 24 + 8 * 6


class Moved(TorchDispatchMode):
    """Bytes that ops of aten read and write, views and getting ready left out."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func not in (aten.ones_like.default, aten.detach.default):
            tensors = [x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor) and x.dim()]
            self.num_bytes += sum(x.numel() * x.itemsize for x in tensors)
        return result


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.mul.Tensor, (leaf(4, 6), leaf(4, 6))),
        (aten.mul.Tensor, (leaf(4, 6), leaf(6))),
        (aten.mul.Tensor, (leaf(4, 6), leaf(4, 6, requires_grad=False))),
        (aten.mul.Tensor, (leaf(4, 6, requires_grad=False), leaf(6))),
        (aten.mul.Tensor, (leaf(4, 6), 2.0)),
        (aten.pow.Tensor_Scalar, (leaf(4, 6), 3.0)),
        (aten.pow.Tensor_Scalar, (leaf(4, 6), 2)),
    ],
    ids=lambda value: " ".join(str(getattr(x, "shape", x)) for x in value) if isinstance(value, tuple) else "",
)
def test_a_backward_moves_what_the_ops_of_autograd_move(op: Op, args: tuple[Any, ...]) -> None:
    result = op(*args)
    wanted, incoming = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad], torch.ones_like(result)
    with Moved() as moved:
        torch.autograd.grad(result, wanted, incoming)
    assert float(evaluate(op_cost(call_of(op, *args), None).backward_num_bytes, {})) == moved.num_bytes


def test_gradients_of_what_several_ops_read_are_summed() -> None:
    """Also of one result of several, of what an op reads twice, and not of ops that give no gradient. Readers share what it takes."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            twice, thrice = self.layer(x).split(2, dim=-1)
            result: torch.Tensor = (twice.exp() + twice.sin()).sum() + (thrice.tanh() + thrice * thrice + (thrice > 0)).sum()
            return result

    captured = capture(Read(), (leaf(4, 4, requires_grad=False),), {})
    calls = [node for node in normal_graph(captured, captured.sizes).module.graph.nodes if is_call(node)]
    summed = {str(node.target): float(evaluate(summed_bytes(node, node_cost(node, None)), {})) for node in calls}
    one = 3 * 4 * (4 * 2)
    found = {name: num_bytes for name, num_bytes in summed.items() if num_bytes}
    of_thrice = {"aten.tanh.default": one * 2 / 3, "aten.mul.Tensor": one * 4 / 3}
    assert found == pytest.approx({"aten.exp.default": one / 2, "aten.sin.default": one / 2} | of_thrice)


@pytest.mark.parametrize("other, hidden", [(leaf(4, 6), 2 * 4 * (24 + 2 * 4)), (leaf(4, 6, requires_grad=False), 4 * (24 + 2 * 4))])
def test_a_cosine_keeps_what_its_gradients_are_multiplied_with(other: torch.Tensor, hidden: int) -> None:
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        result = aten.cosine_similarity.default(X, other)
    assert result.shape == (4,)
    own = {x.untyped_storage().data_ptr() for x in (X, other)}
    assert sum(size for at, size in kept.items() if at not in own) == hidden
    assert op_cost(call_of(aten.cosine_similarity.default, X, other), None).hidden_bytes == hidden


@pytest.mark.parametrize("train, hidden", [(True, 24), (False, 0)])
def test_dropout_keeps_a_mask_where_it_acts(train: bool, hidden: int) -> None:
    cost = op_cost(call_of(aten.dropout.default, X, 0.5, train), None)
    assert (cost.saved, cost.hidden_bytes) == (frozenset(), hidden)
    assert (cost.num_bytes == 0) is not train


@pytest.mark.parametrize(
    "op, x",
    [(aten.max_pool1d.default, leaf(2, 6, 8)), (aten.max_pool2d.default, IMAGE), (aten.max_pool3d.default, leaf(2, 4, 4, 4, 4))],
    ids=["1d", "2d", "3d"],
)
def test_a_largest_of_each_window_keeps_where_it_was(op: Op, x: torch.Tensor) -> None:
    """In int64, as the op that also gives the indices has them."""
    args = x, [2] * (x.dim() - 2)
    cost, num_results = op_cost(call_of(op, *args), None), op(*args).numel()
    operand, result, indices = 4 * x.numel(), 4 * num_results, 8 * num_results
    assert (cost.saved, cost.hidden_bytes) == (frozenset({0}), indices)
    assert (cost.num_bytes, cost.backward_num_bytes) == (operand + result + indices, 2 * operand + result + indices)


def test_unknown_ops_are_bound_by_memory_and_keep_their_operands() -> None:
    call = Call(
        len, (TensorSpec((4, 6), torch.float32, True), TensorSpec((6,))), {}, (TensorSpec((4, 6), torch.float32, True),)
    )
    cost = op_cost(call, Rule.parse("a b, b -> a b"))
    assert not cost.is_matmul
    assert cost.saved == {0, 1}
    assert float(evaluate(cost.num_bytes, {"a": 4, "b": 6})) == 4 * (24 + 6 + 24)


def test_what_needs_no_gradient_has_no_backward() -> None:
    cost = op_cost(call_of(aten.mm.default, FROZEN, FROZEN), None)
    assert (cost.backward_flops, cost.backward_num_bytes, cost.saved) == (0, 0, frozenset())


def test_evaluate_takes_arrays() -> None:
    cost = op_cost(call_of(aten.mm.default, *SQUARE), Rule.parse("m k, k n -> m n ; 0 | 1"))
    values = evaluate(cost.flops, {"m": np.array([4, 2, 4]), "k": 4, "n": np.array([4, 4, 1])})
    assert values.tolist() == [128.0, 64.0, 32.0]


def test_a_rule_is_priced_once() -> None:
    rule = "m k, k n -> m n ; 0 | 1"
    first = op_cost(call_of(aten.mm.default, leaf(4, 4), leaf(4, 4)), Rule.parse(rule))
    assert op_cost(call_of(aten.mm.default, leaf(8, 2), leaf(2, 6)), Rule.parse(rule)) is first


@pytest.mark.parametrize(
    "op, args, sides",
    [
        (aten.linear.default, (leaf(2, 3, 5), leaf(7, 5)), (6, 7, 5)),
        (aten.mm.default, (leaf(3, 5), leaf(5, 7)), (3, 7, 5)),
        (aten.addmm.default, (leaf(7), leaf(3, 5), leaf(5, 7)), (3, 7, 5)),
        (aten.bmm.default, (leaf(2, 3, 5), leaf(2, 5, 7)), (3, 7, 5)),
        (aten.matmul.default, (leaf(2, 3, 5), leaf(5, 7)), (6, 7, 5)),
        (aten.conv2d.default, (leaf(2, 3, 8, 8), leaf(5, 3, 3, 3)), (2 * 6 * 6, 5, 27)),
        (aten.scaled_dot_product_attention.default, (leaf(2, 4, 3, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8)), (3, 6, 8)),
        (aten.dot.default, (leaf(5), leaf(5)), None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_sides_of_a_product(op: Op, args: tuple[torch.Tensor, ...], sides: tuple[int, ...] | None) -> None:
    cost = op_cost(call_of(op, *args), None)
    assert cost.is_matmul
    assert (cost.sides and tuple(float(evaluate(side, {})) for side in cost.sides)) == sides


@pytest.mark.parametrize(
    "op, args, kwargs, stream",
    [
        (aten.gelu.default, (leaf(4),), {}, "gelu"),
        (aten.gelu.default, (leaf(4),), {"approximate": "tanh"}, "gelu_tanh"),
        (aten.tanh.default, (leaf(4),), {}, "tanh"),
        (aten.silu.default, (leaf(4),), {}, "gelu"),
        (aten._log_softmax.default, (leaf(4, 4), -1, False), {}, "softmax"),
        (aten.add.Tensor, (leaf(4), leaf(4)), {}, ""),
        (aten.add.Tensor, (leaf(4), 1.0), {}, ""),
        (aten.add.Tensor, (leaf(2, 4), leaf(4)), {}, "broadcast"),
        (aten.mul.Tensor, (leaf(2, 1), leaf(2, 4)), {}, "broadcast"),
        (aten.mul.Tensor, (leaf(), leaf(2, 4)), {}, ""),
        (aten._to_copy.default, (leaf(4),), {"dtype": torch.bfloat16}, "cast"),
        (aten._to_copy.default, (leaf(4),), {"dtype": torch.float32}, ""),
    ],
    ids=str,
)
def test_which_measured_op_another_is_like(op: Op, args: tuple[object, ...], kwargs: dict[str, object], stream: str) -> None:
    cost = op_cost(call_of(op, *args, **kwargs), None)
    assert (cost.stream, cost.is_matmul, cost.is_attention) == (stream, False, False)
