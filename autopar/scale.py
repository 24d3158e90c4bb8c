"""`scale`: one model on clusters of several sizes, captured once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.loss import LossFn
from autopar.cost.batch_size import BatchSize
from autopar.cost.cluster import Cluster
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.offload import Offload
from autopar.planner.document import Plan
from autopar.planner.question import Question, ask
from autopar.planner.request import Batch, positional_and_keyword
from autopar.precision import Precision
from autopar.report import Report, silent
from autopar.show.scaling import Scaling, ScalingRow
from autopar.solve.pins import Pin
from autopar.units import is_whole, number_text


def scale(
    model: nn.Module,
    cluster: Cluster,
    sizes: Sequence[int],
    batch: Batch,
    *,
    weak: bool = False,
    tokens: float | None = None,
    price_per_gpu_hour: float | None = None,
    noise_scale_tokens: float | None = None,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] | Pin = (),
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    report: Report = silent,
) -> Scaling:
    """Plan a model for clusters of several sizes: time, memory, efficiency and GPU-hours against the number of devices.

    The model is captured once; every size is planned as `autopar.plan` would.

    Args:
        model: the module, as for `plan`.
        cluster: one node of it and what links nodes count; its own number of nodes does not.
        sizes: numbers of nodes, each more than the one before: ``[1, 2, 4, 8]`` of ``Cluster(1, 8, "h100")`` are 8 to 64 devices.
        batch: global batch, as for `plan`; with ``weak`` that of the first size.
        weak: let the rows of the batch (dim 0 of every tensor that has as many) grow with the size. By default the global batch stays.
        tokens: budget of training, as the number of tokens that are processed, for GPU-hours and days. It is not corrected for the size of
            the batch: with ``noise_scale_tokens`` the rows tell how many times the least data each batch needs for the same loss.
            A token is an element of the first integer input, or where there is none a row of the batch.
        price_per_gpu_hour: of one device, in any currency, for the cost of the budget.
        noise_scale_tokens: gradient noise scale, which is the critical batch size, in tokens (`cost.batch_size`).

    The other arguments are those of `parallelize`.

    Returns:
        A row for each size; one that cannot be planned says why.

    Raises:
        MeshError: the sizes are no increasing positive numbers, or the cluster cannot have other numbers of nodes.
        PlanError: another number is not positive, or rows of the batch do not grow to a whole number.
        CaptureError: the model is not one graph.
    """
    _check(cluster, sizes, tokens=tokens, price_per_gpu_hour=price_per_gpu_hour, noise_scale_tokens=noise_scale_tokens)
    question = ask(
        model,
        cluster,
        batch,
        loss_fn=loss_fn,
        outputs=outputs,
        symbolic=weak,
        optimizer=optimizer,
        precision=precision,
        offload=offload,
        memory_limit=memory_limit,
        constraints=constraints,
        pipeline=pipeline,
        average_microbatches=average_microbatches,
        report=report,
    )
    budget = Budget(tokens, price_per_gpu_hour, noise_scale_tokens)
    batches = [_grown(batch, question.session.batch_size, nodes, sizes[0]) if weak else None for nodes in sizes]
    rows = _rows(question, cluster, sizes, batches, budget)
    return Scaling(question.session.name, f"{cluster.gpus_per_node} {cluster.device}", tuple(rows), weak)


class Budget(NamedTuple):
    """What a scaling is asked to count beside times."""

    tokens: float | None
    price_per_gpu_hour: float | None
    noise_scale_tokens: float | None


def _rows(
    question: Question, cluster: Cluster, sizes: Sequence[int], batches: Sequence[Batch | None], budget: Budget
) -> list[ScalingRow]:
    """A row for each size, with a batch of its own if one is given."""
    rows: list[ScalingRow] = []
    for i, nodes in enumerate(sizes):
        described = replace(cluster, nodes=nodes)
        question.report(f"planning {number_text(nodes, 'node')}, {number_text(described.num_ranks, 'rank')} ({i + 1} of {len(sizes)})")
        own = question.changed(cluster=described, batch=batches[i])
        plan, reason = _planned(own)
        row = ScalingRow(
            nodes,
            described.num_ranks,
            own.session.batch_size,
            plan,
            reason,
            budget_tokens=budget.tokens,
            price_per_gpu_hour=budget.price_per_gpu_hour,
        )
        rows.append(_related(row, next((other for other in rows if other.fits), row), budget.noise_scale_tokens) if row.fits else row)
    return rows


def _planned(question: Question) -> tuple[Plan | None, str]:
    """The plan, or why there is none."""
    try:
        return Plan.answer(question), ""
    except AutoparError as error:
        return None, str(error)


def _related(row: ScalingRow, base: ScalingRow, noise_scale_tokens: float | None) -> ScalingRow:
    """A row that fits with its figures relative to the base."""
    row = replace(row, efficiency=row.tokens_per_s_per_gpu / base.tokens_per_s_per_gpu)
    if noise_scale_tokens is None:
        return row
    batch = BatchSize(row.tokens_per_step, noise_scale_tokens)
    return replace(row, batch=batch, learning_rate_factor=batch.learning_rate_factor(base.batch or batch))


def _grown(batch: Batch, rows: int, size: int, first: int) -> Batch:
    """The batch for another size of the cluster, on meta."""
    if rows * size % first:
        raise PlanError(
            f"a batch of {number_text(rows, 'row')} on {number_text(first, 'node')} is no whole "
            f"number of rows on {size}; give rows that {first} divides, "
            "or other sizes"
        )

    def grown(x: object) -> object:
        if not isinstance(x, torch.Tensor) or not x.dim() or x.shape[0] != rows:
            return x
        return x.new_empty((rows * size // first, *x.shape[1:]), device="meta")

    args, kwargs = positional_and_keyword(batch)
    return {name: pytree.tree_map(grown, value) for name, value in kwargs.items()} or pytree.tree_map(grown, args)


def _check(cluster: Cluster, sizes: Sequence[int], **numbers: float | None) -> None:
    if not isinstance(cluster, Cluster):
        raise MeshError(f"scale counts the nodes of a Cluster, such as Cluster(1, 8, 'h100'), got {cluster!r}")
    if cluster.others:
        raise MeshError(f"a cluster of {cluster.device_name} has no one kind of node to count; scale each kind by itself")
    if cluster.grid is not None or cluster.measured is not None:
        raise MeshError(
            f"the cluster is regrouped or measured as mesh ({cluster.mesh}), which holds for its own number of nodes; give one by the "
            "names of its parts: Cluster(nodes, gpus_per_node, device)"
        )
    is_list = isinstance(sizes, Sequence) and all(map(is_whole, sizes))
    if not is_list or not sizes or sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise MeshError(f"sizes are numbers of nodes, at least one, positive and increasing, such as [1, 2, 4]; got {sizes!r}")
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and value > 0):
            raise PlanError(f"{name} must be a positive number, got {value!r}")
