"""`autopar.sweep`: the automatic plan among all configurations that could be written by hand."""

from __future__ import annotations

from torch import nn

from autopar.cost.machine import Cluster, MachineProfile
from autopar.document import Plan
from autopar.loss import LossFn
from autopar.question import Question
from autopar.report import Report, silent
from autopar.request import Batch, Grid, check_optimizer, grids_of, positional_and_keyword
from autopar.runtime.module import make_skeleton
from autopar.session import memory_bytes, open_session
from autopar.show.sweep import Sweep
from autopar.solve.fold import KEPT
from autopar.solve.search import Search
from autopar.solve.sweep import configurations, price_all


def sweep(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    memory_limit: float | str | None = None,
    profile: MachineProfile | None = None,
    outputs: str = "whole",
    report: Report = silent,
) -> Sweep:
    """The automatic plan, and every 3D configuration (`solve.sweep.configurations`) of the same ranks and batch, by predicted time and
    memory.

    Tensor parallelism stays within a node of a described cluster, or within the last axis of a mesh. Deep models are priced by a few of
    their blocks.

    The arguments and the errors are those of `autopar.plan`.
    """
    check_optimizer(optimizer)
    session = open_session(
        make_skeleton(model), *positional_and_keyword(batch), loss_fn=loss_fn, outputs=outputs, symbolic=False, report=report
    )
    limit = memory_bytes(memory_limit)
    question = Question(session, cluster, optimizer=optimizer, limit=limit, profile=profile, report=report)
    auto = Plan.answer(question)
    mesh, folded = grids_of(cluster, None)[0], session.folded()
    most_tp = cluster.gpus_per_node if isinstance(cluster, Cluster) else mesh.sizes[-1]
    most_stages = folded.removed + KEPT if folded is not None else mesh.num_ranks
    configs = configurations(mesh.num_ranks, session.batch_size, most_tp=most_tp, most_stages=most_stages)
    search = Search(session.normal_for, question.machine_of, limit, (), optimizer, True, report)
    return Sweep(auto, tuple(price_all(configs, search, folded, session.batch_size)))
