"""Proof of rules by brute force: a call on the whole against the same call on virtual ranks, forward and backward.

*Wrong*: a choice that the rule offers, whose shards or gradients are not those of the whole. *Missing*: placements of the operands that
the rule does not offer, though the results on the ranks are shards, replicas or parts of the whole. Factors of sizes that 4 divides are
checked as two atoms, so that shards of the minor one (strided shards) are proved too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.utils import _pytree as pytree

from autopar.layout import PARTIAL, REPLICATED, Kind, Layout, Placement, shard, take_shard
from autopar.mesh import Mesh
from autopar.rules.notation import Rule, Term
from autopar.rules.recurrent import LAYERS
from autopar.rules.registry import Call, Coordinate, Local, Op, TensorSpec, has_gradients, local_form, rule_of
from autopar.rules.samples import Sample, samples
from autopar.rules.strategies import Choice, axis_choices
from autopar.virtual import run_lockstep

aten = torch.ops.aten

_TOLERANCE = 1e-9

_CONSTANT = "its values do not depend on the operand's"
_PARAMETERS = "linear in parameters, which are never partial sums"
_TARGETS = "linear in targets or class weights, which are never partial sums"
_SHORT = "its kernel reads beyond weights that are too short"
_WEIGHTS = r"R P( P)?( R R)? -> .*"
_SUMMED = r"S\S+ S\S+ P -> P"
_ADDEND = "a summed factor with a partial addend cannot be written; biases are split off before"
KNOWN_MISSING: dict[Op, tuple[str, str]] = {
    aten.zeros_like.default: (".*", _CONSTANT),
    aten.ones_like.default: (".*", _CONSTANT),
    aten.full_like.default: (".*", _CONSTANT),
    aten.fill.Scalar: (".*", _CONSTANT),
    aten.new_ones.default: (".*", _CONSTANT),
    aten.new_zeros.default: (".*", _CONSTANT),
    aten.new_full.default: (".*", _CONSTANT),
    aten.new_empty.default: (".*", _CONSTANT),
    aten.to.other: (".*", "of the second operand only the dtype is read"),
    aten.type_as.default: (".*", "of the second operand only the dtype is read"),
    aten.native_dropout.default: ("P -> P R", "a rule says the same of all results"),
    aten.copy.default: (".*", "of the first operand only shape and dtype are read"),
    aten.fill.Tensor: (".*", "of the first operand only shape and dtype are read"),
    aten._native_batch_norm_legit_no_training.default: (".*", _SHORT),
    aten._native_batch_norm_legit_functional.default: (".*", _SHORT),
    aten._weight_norm.default: (".*", _SHORT),
    **dict.fromkeys(LAYERS, (".*", _SHORT)),
    aten.polar.default: ("P R -> P", "its backward takes what it is given for lengths, which are positive"),
    aten.expand_as.default: (". P -> .", "of the second operand only the shape is read"),
    aten.broadcast_tensors.default: (r"(R P|P R) -> .*", "a rule says the same of all results"),
    aten._linalg_solve_ex.default: (r"R (P|S2) -> .*", "a rule says the same of all results"),
    aten.linear.default: (_SUMMED, _ADDEND),
    aten.addmm.default: (r"P S\S+ S\S+ -> P", _ADDEND),
    aten.baddbmm.default: (r"P S\S+ S\S+ -> P", _ADDEND),
    aten.einsum.default: (".*", "ellipses and repeated letters are not read"),
    aten.layer_norm.default: (_WEIGHTS, _PARAMETERS),
    aten.native_layer_norm.default: (_WEIGHTS, _PARAMETERS),
    aten.rms_norm.default: (_WEIGHTS, _PARAMETERS),
    aten.group_norm.default: (_WEIGHTS, _PARAMETERS),
    aten.instance_norm.default: (_WEIGHTS, _PARAMETERS),
    aten.batch_norm.default: (".* P .* -> P", _PARAMETERS),
    aten.conv1d.default: (_SUMMED, _ADDEND),
    aten.conv2d.default: (_SUMMED, _ADDEND),
    aten.conv_transpose1d.default: (_SUMMED, _ADDEND),
    aten.conv_transpose2d.input: (_SUMMED, _ADDEND),
    aten.cross_entropy_loss.default: (r"R (R )?P -> P", _TARGETS),
    aten.nll_loss.default: (r"R R P -> P", _TARGETS),
    aten.nll_loss_nd.default: (r"R R P -> P", _TARGETS),
    aten.binary_cross_entropy.default: (r"R R P -> P", _TARGETS),
    aten.binary_cross_entropy_with_logits.default: (r"R R P R -> P", _TARGETS),
    aten.scatter_add.default: (r"P S\S+ S\S+ -> P", _ADDEND),
    aten.scatter_reduce.two: (r"P S\S+ S\S+ -> P", _ADDEND),
    aten.index_add.default: (r"P S\S+ S\S+ -> P", _ADDEND),
    aten.index_put.default: (r"P( S\S+)+ -> P", _ADDEND),
    aten.embedding.default: (r"R S\S+ -> S\S+", "the backward of scale_grad_by_freq counts all ids"),
}
"""For an op, which missing choices (a pattern for their text; ``.*`` does not even try them) are not reported, and why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One choice that is wrong or missing."""

    op: str
    sample: str
    kind: str
    choice: str
    error: float

    def __str__(self) -> str:
        error = f", max error {self.error:.1e}" if self.kind == "wrong" else ""
        return f"{self.op}({self.sample}): {self.kind} [{self.choice}]{error}"


class _Whole:
    """A sample run on the whole: operands, results, random gradients of the results, gradients of the operands."""

    def __init__(self, sample: Sample, rule: Rule) -> None:
        self.call: Call = sample.call
        args, kwargs = sample.draw()
        self.operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.random = torch.Generator().manual_seed(1)
        self.needs_grad = [x.requires_grad for x in self.operands]
        self.operands = [x.detach() for x in self.operands]
        inputs = self.leaves(self.operands)
        outputs = _run(self.call.target, self.call.args, self.call.kwargs, inputs)
        self.results = [output.detach() for output in outputs]
        self.result_grads = [
            torch.rand(output.shape, generator=self.random, dtype=output.dtype) if output.requires_grad else None
            for output in outputs
        ]
        self.operand_grads = _gradients(outputs, inputs, self.result_grads)
        self.rule = rule
        self.sizes = rule.bind([x.shape for x in self.operands], [x.shape for x in self.results])
        self.atoms = {
            letter: (2, size // 2) if size and size % 4 == 0 and letter not in rule.ranged else (size,)
            for letter, size in self.sizes.items()
        }

    def leaves(self, tensors: Sequence[Any]) -> list[Any]:
        """Operands ready for a gradient to be asked for."""
        return [x.detach().clone().requires_grad_(needs) for x, needs in zip(tensors, self.needs_grad, strict=True)]

    def parts(self, whole: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Random tensors that sum to ``whole``."""
        if not has_gradients(whole.dtype):
            return [whole, *[torch.zeros_like(whole)] * (count - 1)]
        parts = [torch.rand(whole.shape, generator=self.random, dtype=whole.dtype) * 4 - 2 for _ in range(count - 1)]
        return [*parts, whole - sum(parts)]


def check_call(sample: Sample, rule: Rule, *, num_ranks: int = 2, missing: bool = True) -> list[Finding]:
    """Everything wrong with a rule for one call and, if ``missing``, everything that it does not offer."""
    mesh = Mesh.of(num_ranks)
    whole = _Whole(sample, rule)
    needs_grad = [grad is not None for grad in whole.operand_grads]
    choices = axis_choices(
        rule, whole.atoms, axis_size=num_ranks, needs_grad=needs_grad, result_needs_grad=any(needs_grad)
    )
    findings = []
    for choice in choices:
        try:
            error = _error(whole, choice, mesh)
            text = str(choice)
        except Exception as failure:  # what an op raises on a shard is a finding
            error, text = math.inf, f"{choice}: {type(failure).__name__}: {failure}".splitlines()[0]
        if not error <= _TOLERANCE:
            findings.append(Finding(str(whole.call.target), str(sample), "wrong", text, error))
    if not missing:
        return findings
    known = {tuple(REPLICATED if p.holds_whole else p for p in choice.operands) for choice in choices}
    findings += [
        Finding(str(whole.call.target), str(sample), "missing", text, 0.0) for text in _missing(whole, known, mesh)
    ]
    return findings


def check_op(op: Op, *, num_ranks: int = 2) -> list[Finding]:
    """Findings on all samples of an op, less what KNOWN_MISSING excuses."""
    return check_all(ops=[op], num_ranks=num_ranks)


def check_all(*, ops: Iterable[Op] | None = None, num_ranks: int = 2) -> list[Finding]:
    """Findings on all samples of ``ops`` (default: the whole table)."""
    chosen = None if ops is None else set(ops)
    findings = []
    for sample in samples():
        if chosen is not None and sample.op not in chosen:
            continue
        rule = rule_of(sample.call)
        assert rule is not None, f"{sample.op} has a sample but no rule"
        is_searched = KNOWN_MISSING.get(sample.op, ("", ""))[0] != ".*"
        found = check_call(sample, rule, num_ranks=num_ranks, missing=is_searched)
        findings += [finding for finding in found if not _is_known(sample.op, finding)]
    return findings


def _is_known(op: Op, finding: Finding) -> bool:
    pattern, _ = KNOWN_MISSING.get(op, ("", ""))
    return finding.kind == "missing" and re.fullmatch(pattern, finding.choice) is not None


def _error(whole: _Whole, choice: Choice, mesh: Mesh) -> float:
    """Largest difference between what the ranks get under a choice and what they should."""
    rule, count = whole.rule, mesh.num_ranks
    letter, _, atom = choice.name.partition(".")
    sharded = {letter: int(atom or 0)} if letter in whole.sizes else {}
    operands = _scatter(whole, whole.operands, rule.operands, choice.operands, mesh, {Kind.PARTIAL})
    grads = _scatter(whole, whole.result_grads, rule.results, choice.results, mesh, {Kind.REPLICATED_PARTIAL_GRAD})
    target, args, kwargs = local_form(whole.call, _local(whole, sharded, mesh, axes=dict.fromkeys(sharded, (0,))))
    if any(isinstance(leaf, Coordinate) for leaf in pytree.tree_leaves(args)):
        inputs = [whole.leaves(given) for given in operands]
        results, operand_grads = _run_together(target, args, inputs, grads, mesh)
    else:
        results, operand_grads = [], []
        for rank in range(count):
            inputs = whole.leaves(operands[rank])
            outputs = _run(target, args, kwargs, inputs)
            results.append([output.detach() for output in outputs])
            operand_grads.append(_gradients(outputs, inputs, grads[rank]))
    worst = 0.0
    for i, (want, term, placement) in enumerate(zip(whole.results, rule.results, choice.results, strict=True)):
        have = [result[i] for result in results]
        worst = max(worst, _difference(have, want, _layout(whole, term, placement, mesh), {Kind.PARTIAL}))
    for i, (grad, term, placement) in enumerate(zip(whole.operand_grads, rule.operands, choice.operands, strict=True)):
        if grad is None:
            continue
        layout = _layout(whole, term, placement, mesh)
        have = [torch.zeros(layout.local_shape, dtype=grad.dtype) if g[i] is None else g[i] for g in operand_grads]
        worst = max(worst, _difference(have, grad, layout, {Kind.REPLICATED_PARTIAL_GRAD}))
    return worst


def _missing(whole: _Whole, known: set[tuple[Placement, ...]], mesh: Mesh) -> Iterator[str]:
    """Placements of the operands that are not ``known`` and under which the results can be put together, with the results' placements."""
    rule = whole.rule
    options = [_placements(whole, term, x, mesh.num_ranks) for term, x in zip(rule.operands, whole.operands, strict=True)]
    scattered = [
        {p: _scatter(whole, [x], [term], [p], mesh, {Kind.PARTIAL}) for p in placements}
        for x, term, placements in zip(whole.operands, rule.operands, options, strict=True)
    ]
    for placements in product(*options):
        if placements in known or all(placement.holds_whole for placement in placements):
            continue
        sharded: dict[str, int] = {}
        for term, placement in zip(rule.operands, placements, strict=True):
            if placement.is_sharded:
                letter, atom = _letter(whole, term, placement)
                if sharded.setdefault(letter, atom) != atom:
                    break
        else:
            per_rank = [
                [split[p][rank][0] for split, p in zip(scattered, placements, strict=True)] for rank in range(mesh.num_ranks)
            ]
            results = _recombined(whole, _local(whole, sharded, mesh, axes={}), per_rank, mesh)
            if results:
                yield f"{' '.join(map(str, placements))} -> {results}"


def _recombined(whole: _Whole, local: Local, operands: list[list[Any]], mesh: Mesh) -> str:
    """The placements of the results if ranks with these operands hold consistent parts of them; empty if not."""
    try:
        target, args, kwargs = local_form(whole.call, local)
        with torch.no_grad():
            results = [_run(target, args, kwargs, list(map(_fenced, inputs))) for inputs in operands]
    except Exception:  # an op that refuses these shards is no choice
        return ""
    found = []
    for i, (want, term) in enumerate(zip(whole.results, whole.rule.results, strict=True)):
        have = [result[i] for result in results]
        fitting = [
            str(p)
            for p in _placements(whole, term, want, mesh.num_ranks)
            if _difference(have, want, _layout(whole, term, p, mesh), {Kind.PARTIAL}) <= _TOLERANCE
        ]
        if not fitting:
            return ""
        found.append("/".join(fitting))
    return " ".join(found)


def _fenced(operand: Any) -> Any:
    """With nan around it in memory, where else the rest of the whole may lie: not all kernels look whether their operands fit each other
    (scaled_dot_product_attention on CPUs reads keys and values by the length of one of them)."""
    if not isinstance(operand, torch.Tensor) or not operand.dtype.is_floating_point:
        return operand
    size = operand.numel()
    room = operand.new_full((3 * size,), math.nan)
    inside = room[size : 2 * size].view(operand.shape)
    return inside.copy_(operand)


def _placements(whole: _Whole, term: Term, tensor: torch.Tensor, num_ranks: int) -> list[Placement]:
    """Every placement of a tensor: replicated, partial if it has floats, a shard of each atom."""
    found = [REPLICATED, PARTIAL] if has_gradients(tensor.dtype) and tensor.numel() else [REPLICATED]
    for dim, letters in enumerate(term):
        sizes = [size for letter in letters for size in whole.atoms[letter]]
        found += [shard(dim, atom) for atom, size in enumerate(sizes) if size > 1 and size % num_ranks == 0]
    return found


def _letter(whole: _Whole, term: Term, placement: Placement) -> tuple[str, int]:
    """The factor, and its atom, that a placement shards."""
    flat = [(letter, atom) for letter in term[placement.dim] for atom in range(len(whole.atoms[letter]))]
    return flat[placement.atom]


def _local(whole: _Whole, sharded: dict[str, int], mesh: Mesh, *, axes: dict[str, tuple[int, ...]]) -> Local:
    sizes = {
        letter: size // mesh.num_ranks if letter in sharded else size for letter, size in whole.sizes.items()
    }
    shapes = tuple(tuple(math.prod(sizes[x] for x in dim) for dim in term) for term in whole.rule.results)
    return Local(sizes, shapes, axes, mesh.sizes, mesh.names)


def _layout(whole: _Whole, term: Term, placement: Placement, mesh: Mesh) -> Layout:
    atoms = tuple(tuple(size for letter in dim for size in whole.atoms[letter]) or (1,) for dim in term)
    return Layout(mesh, atoms, (placement,))


def _scatter(
    whole: _Whole,
    tensors: Sequence[torch.Tensor | None],
    terms: Sequence[Term],
    placements: Sequence[Placement],
    mesh: Mesh,
    partial: set[Kind],
) -> list[list[Any]]:
    """For each rank its part of every tensor; those of a kind in ``partial`` get random parts of the sum."""
    columns: list[list[torch.Tensor | None]] = []
    for tensor, term, placement in zip(tensors, terms, placements, strict=True):
        if tensor is None:
            columns.append([None] * mesh.num_ranks)
        elif placement.kind in partial:
            columns.append(list(whole.parts(tensor, mesh.num_ranks)))
        elif placement.is_sharded:
            layout = _layout(whole, term, placement, mesh)
            columns.append([take_shard(tensor, layout, mesh.coordinate(rank)) for rank in range(mesh.num_ranks)])
        else:
            columns.append([tensor] * mesh.num_ranks)
    return [[column[rank] for column in columns] for rank in range(mesh.num_ranks)]


def _difference(have: list[torch.Tensor], want: torch.Tensor, layout: Layout, partial: set[Kind]) -> float:
    """Largest difference of the ranks' tensors from their parts of ``want``; infinite if shapes differ."""
    (placement,) = layout.placements
    if placement.kind in partial:
        if any(x.shape != want.shape for x in have) or want.dtype is torch.bool:
            return math.inf
        return _distance(torch.stack(have).sum(0), want)
    if not placement.is_sharded:
        return max(_distance(x, want) for x in have)
    return max(_distance(x, take_shard(want, layout, layout.mesh.coordinate(rank))) for rank, x in enumerate(have))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    same = (a == b) | ((a != a) & (b != b))
    return 0.0 if bool(same.all()) else float(torch.where(same, 0.0, (a.to(torch.complex128) - b.to(torch.complex128)).abs()).max())


def _run(target: Op, args: object, kwargs: dict[str, object], operands: Sequence[Any]) -> list[torch.Tensor]:
    """Call with the operands in the places of their specs; the results as a list."""
    given = iter(operands)
    positional, named = pytree.tree_map_only(TensorSpec, lambda _: next(given), (args, kwargs))
    results = target(*positional, **named)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _gradients(outputs: list[torch.Tensor], inputs: list[Any], grads: Sequence[torch.Tensor | None]) -> list[Any]:
    """Gradient of every input, None for those without."""
    pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None and output.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    wanted = [x for x in inputs if x.requires_grad]
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def _run_together(
    target: Op, args: tuple[object, ...], operands: list[list[Any]], grads: list[list[Any]], mesh: Mesh
) -> tuple[list[list[torch.Tensor]], list[list[Any]]]:
    """Results and gradients of a form with collectives, on virtual ranks in lockstep."""
    wanted = [has_gradients(x.dtype) for x in operands[0]]

    def local(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, coordinates = iter(inputs[: len(wanted)]), iter(inputs[len(wanted) :])
        filled = pytree.tree_map_only(TensorSpec, lambda _: next(given), args)
        filled = pytree.tree_map_only(Coordinate, lambda _: next(coordinates), filled)
        return (target(*filled).clone(),)  # AOTAutograd gives no views

    count = sum(isinstance(leaf, Coordinate) for leaf in pytree.tree_leaves(args))
    ranks = [[*operands[rank], *[torch.tensor([rank])] * count] for rank in range(mesh.num_ranks)]
    joint = aot_export_joint_simple(local, tuple(ranks[0]), trace_joint=True)
    assert isinstance(joint, torch.fx.GraphModule)
    outputs = run_lockstep(joint, [[x.detach() for x in (*ranks[r], *grads[r])] for r in range(mesh.num_ranks)], mesh)
    return [out[:1] for out in outputs], [out[1 : 1 + len(wanted)] for out in outputs]
