"""``autopar verify``, ``check``, ``count`` and ``rules``: whether plans and rules are right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.figures import json_text
from autopar.cli.lazy import Lazy
from autopar.cli.options import (
    AsJson,
    Average,
    BatchSize,
    ClusterText,
    Gpt,
    ManualText,
    MeshText,
    ModelName,
    ModelOf,
    OutputsOf,
    PlanFile,
    PlanJson,
    Sequence,
    chosen_model,
    given_sizes,
)
from autopar.cli.progress import progress, width
from autopar.errors import PlanError, RuleError
from autopar.report import Counted
from autopar.units import number_text

if TYPE_CHECKING:
    from autopar.cli import work
else:
    work = Lazy("autopar.cli.work")


RIGHT = 1e-4
"""A relative error that is no fault."""
ROUNDED = 4
"""So many times what rounding does to the model itself may be rounding."""


def _wanted(manual: str | None, plan: Path | None) -> work.Manual | work.Plan | None:
    if manual is not None and plan is not None:
        raise PlanError("--manual and --plan exclude each other; give one of them")
    return work.Plan.load(plan) if plan is not None else work.read_manual(manual) if manual is not None else None


def verify(
    context: typer.Context,
    model: ModelName = None,
    gpt: Gpt = None,
    mesh: MeshText = None,
    cluster: ClusterText = None,
    batch: BatchSize = 8,
    sequence: Sequence = 32,
    manual: ManualText = None,
    plan: PlanFile = None,
    average: Average = False,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help=f"largest relative error that is still right; by default {RIGHT:g}, or what rounding explains"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a plan on virtual ranks in this process, forward and backward, and compare with the model itself.

    The model is built with real weights on the CPU. A saved plan knows its model, batch and mesh. Exit code 1 if an error is larger than
    the tolerance.
    """
    wanted = _wanted(manual, plan)
    if plan is not None and model is gpt is None:
        example = work.load_planned(plan, model=None, outputs=None, real=True).example
    else:
        example = work.load_example(chosen_model(model, gpt), batch=batch, sequence=sequence, real=True, given=given_sizes(context))
    grid = wanted.grid if isinstance(wanted, work.Plan) and mesh is cluster is None else work.read_grid(mesh, cluster)
    with progress() as report:
        found = work.api.verify(
            example.model,
            grid,
            example.batch,
            wanted,
            average_microbatches=average,
            report=report,
        )
    print(json_text(found) if as_json else found)
    worst = max(found.loss_error, found.output_error, found.grad_error)
    right = max(RIGHT, ROUNDED * found.reference_error) if tolerance is None else tolerance  # that one may be NaN
    if not worst <= right:
        raise PlanError(f"the plan is wrong: error {worst:.1e} is larger than {right:.1e}; --tolerance allows more")


def check(
    plan: PlanJson,
    rank: Annotated[list[int], typer.Option("--rank", help="a rank to check with all that it talks to; repeat it; default: all")] = [],  # noqa: B006
    model: ModelOf = None,
    outputs: OutputsOf = None,
    as_json: AsJson = False,
) -> None:
    """Build the programs of a plan's ranks without devices, and check shapes, communication and memory.

    Exit code 1 if anything is found.
    """
    made, example, wanted = work.load_planned(plan, model=model, outputs=outputs)
    with progress() as report:
        found = work.check(example.model, made, example.batch, outputs=wanted, ranks=rank or None, report=report)
    print(json_text(found) if as_json else found)
    if found.findings:
        raise PlanError(f"{number_text(len(found.findings), 'finding')}")


def count(plan: PlanJson, model: ModelOf = None, outputs: OutputsOf = None, as_json: AsJson = False) -> None:
    """Count flops, communication and memory of a step on every rank, in the graphs that the ranks run."""
    made, example, wanted = work.load_planned(plan, model=model, outputs=outputs)
    with progress() as report:
        counted = work.count(example.model, made, example.batch, outputs=wanted, report=report)
    print(counted.to_json() if as_json else work.counted_text(counted, width()))


def _ops(incomplete: str) -> list[str]:
    return work.op_names()


def rules(
    op: Annotated[
        str | None, typer.Argument(metavar="[OP]", help="linear, aten.linear or aten.linear.default", autocompletion=_ops)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="prove the rules by brute force on small tensors")] = False,
    as_json: AsJson = False,
) -> None:
    """List the rules of ops, or prove them: whole against shards, forward and backward."""
    chosen = work.chosen_rules(op)
    if not check:
        lines = list(work.rule_lines(chosen))
        rows = [{"op": name, "rule": line} for name, line in lines]
        print(json_text(rows) if as_json else work.table_text(("op", "rule"), lines, width=width(), wide=("rule",)))
        return
    findings = []
    with progress() as report:
        for number, found in enumerate(chosen):
            report(Counted(f"checking {found} ({number + 1} of {len(chosen)})", number, len(chosen)))
            findings += work.check_op(found)
    if as_json:
        print(json_text({"ops": [str(found) for found in chosen], "findings": findings}))
    else:
        for finding in findings:
            print(finding)
    if findings:
        raise RuleError(f"{number_text(len(findings), 'finding')} in {number_text(len(chosen), 'op')}")
    if not as_json:
        print(f"{number_text(len(chosen), 'op')} checked, nothing wrong and nothing missing")
