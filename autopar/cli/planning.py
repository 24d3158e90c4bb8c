"""``autopar plan`` and ``autopar explain``: one plan, printed, drawn, saved and explained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.commands import STOPPED
from autopar.cli.figures import figures, json_text
from autopar.cli.lazy import Lazy
from autopar.cli.options import (
    AsJson,
    Average,
    BatchSize,
    ClusterText,
    Complete,
    Compress,
    DotFile,
    Gpt,
    HtmlFile,
    InPrecision,
    ManualText,
    MemoryLimit,
    MeshText,
    ModelName,
    NoPipeline,
    Optimizer,
    Outputs,
    Pins,
    ProfileFile,
    Real,
    Sequence,
    ToHost,
    TraceFile,
    chosen_model,
    given_sizes,
    writable,
)
from autopar.cli.progress import interruptible, progress, width

if TYPE_CHECKING:
    from autopar.cli import work
else:
    work = Lazy("autopar.cli.work")

STOPPING = "stopping with the best plan so far; Ctrl-C again ends at once"


def plan(
    context: typer.Context,
    model: ModelName = None,
    gpt: Gpt = None,
    mesh: MeshText = None,
    cluster: ClusterText = None,
    batch: BatchSize = 32,
    sequence: Sequence = 1024,
    real: Real = False,
    memory_limit: MemoryLimit = None,
    optimizer: Optimizer = "adamw",
    precision: InPrecision = None,
    offload: ToHost = None,
    compress: Compress = None,
    pin: Pins = [],  # noqa: B006
    manual: ManualText = None,
    average: Average = False,
    no_pipeline: NoPipeline = False,
    complete: Complete = False,
    outputs: Outputs = "whole",
    profile: ProfileFile = None,
    relief: Annotated[bool, typer.Option("--relief", help="try what would make it fit, or what pins cost, and print the prices")] = False,
    compressions: Annotated[bool, typer.Option("--compressions", help="also print what compressing gradients would save")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="save the plan as JSON", callback=writable)] = None,
    dot: DotFile = None,
    html: HtmlFile = None,
    trace: TraceFile = None,
    code: Annotated[Path | None, typer.Option("--code", help="write the annotated graph as Python", callback=writable)] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a model for a grid of devices, and print the plan.

    Ctrl-C while it searches ends with the best plan so far, which says so, and exit code 3; before there is one, with 130. A second
    Ctrl-C ends at once.

    With --json it is the document of --out; --relief and --compressions add theirs under these names. Where nothing fits it has the relief
    alone.
    """
    named = chosen_model(model, gpt)
    example = work.load_example(named, batch=batch, sequence=sequence, real=real, given=given_sizes(context))
    asked: dict[str, Any] = {
        "plan": work.read_manual(manual) if manual is not None else None,
        "optimizer": optimizer,
        "precision": precision,
        "offload": offload,
        "compress": compress,
        "memory_limit": memory_limit,
        "constraints": [work.read_pin(text) for text in pin],
        "profile": work.MachineProfile.load(profile) if profile is not None else None,
        "outputs": outputs,
        "pipeline": not no_pipeline,
        "average_microbatches": average,
        "complete": complete,
    }
    grid, reliefs = work.read_grid(mesh, cluster), list[work.Relief]()
    with progress() as shown, work.hinted():
        if relief:
            reliefs = work.api.relieve(example.model, grid, example.batch, report=shown, **asked)
        else:
            with interruptible(shown, STOPPING) as report:
                made = work.api.plan(example.model, grid, example.batch, report=report, on_interrupt="best", **asked)
    if relief:
        if as_json and not reliefs[0].fits:
            print(json_text({"relief": [_relief_data(row) for row in reliefs]}))
        elif len(reliefs) > 1 and not as_json:
            print(work.relief_text(reliefs, width()), end="\n\n")
        made = work.asked_plan(reliefs)
    made = replace(made, source=work.Recipe(named, batch, sequence, real, outputs))
    payoffs = made.compressions() if compressions else []
    if as_json:
        document = json.loads(made.to_json())
        document |= {"relief": [_relief_data(row) for row in reliefs]} if relief else {}
        print(json_text(document | ({"compressions": payoffs} if compressions else {})))
    else:
        print(work.plan_text(made, width()))
        if payoffs:
            print(f"\n{work.payoff_text(payoffs, width())}")
    if out is not None:
        made.save(out)
    work.write_pictures(made, dot, html, trace)
    if code is not None:
        code.write_text(work.graph_code(made.graph))
    if made.stats.is_interrupted:
        raise typer.Exit(STOPPED)


def _relief_data(row: work.Relief) -> dict[str, Any]:
    known = figures(row, "what", "fits", "reason", "least_bytes", "step_time_s", "tokens_per_s", "peak_memory_bytes")
    return known | {"changes": sorted(row.change)}


def explain(
    context: typer.Context,
    model: ModelName = None,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="a parameter, or an op by the name of its node", show_default=False)
    ] = None,
    gpt: Gpt = None,
    mesh: MeshText = None,
    cluster: ClusterText = None,
    batch: BatchSize = 32,
    sequence: Sequence = 1024,
    real: Real = False,
    memory_limit: MemoryLimit = None,
    optimizer: Optimizer = "adamw",
    precision: InPrecision = None,
    offload: ToHost = None,
    pin: Pins = [],  # noqa: B006
    average: Average = False,
    formula: Annotated[bool, typer.Option("--formula", help="flops and bytes of a rank as formulas, instead of the alternatives")] = False,
    as_json: AsJson = False,
) -> None:
    """Say why a parameter or an op lies as it does: the alternatives and their prices."""
    if gpt is not None and name is None:
        model, name = None, model
    if name is None:
        raise typer.BadParameter("say what to explain: NAME of a parameter or op, after the MODEL")
    example = work.load_example(chosen_model(model, gpt), batch=batch, sequence=sequence, real=real, given=given_sizes(context))
    with progress() as report, work.hinted():
        made = work.api.plan(
            example.model,
            work.read_grid(mesh, cluster),
            example.batch,
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            memory_limit=memory_limit,
            constraints=[work.read_pin(text) for text in pin],
            average_microbatches=average,
            report=report,
        )
        assert made.decision is not None
        report(f"explaining {name}")
        if formula:
            told: object = work.formulas(made.decision, name)
        else:
            told = work.explain(made.decision, name, plan=made)
    print(json_text(told) if as_json else told)
