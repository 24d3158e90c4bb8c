"""The ``autopar`` command: plans, prices and proofs without writing a script.

Every command is a few lines on the public functions of `autopar.api`. What is asked for goes to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autopar import api
from autopar.cli.check import counted_text, load_planned
from autopar.cli.commands import HELP, Commands
from autopar.cli.imports import READERS, read_imports
from autopar.cli.inputs import (
    Example,
    load_example,
    read_cluster,
    read_configs,
    read_grid,
    read_manual,
    read_mesh,
    read_pin,
)
from autopar.cli.options import (
    Average,
    BatchSize,
    ClusterText,
    Compress,
    DotFile,
    HtmlFile,
    InPrecision,
    ManualText,
    MemoryLimit,
    MeshText,
    ModelName,
    ModelOf,
    NoPipeline,
    Optimizer,
    Outputs,
    OutputsOf,
    Pins,
    PlanFile,
    PlanJson,
    ProfileFile,
    Real,
    Sequence,
    ToHost,
    TraceFile,
    progress,
    width,
)
from autopar.cli.profile import profile_machine, profile_text
from autopar.cli.relief import HINT, hinted, print_reliefs
from autopar.cli.rules import is_called, rule_lines
from autopar.cli.scale import read_count, read_sizes
from autopar.cli.shown import part_of_plan, write_pictures
from autopar.cost.machine import MachineProfile
from autopar.document import Plan
from autopar.dry.check import check as check_programs
from autopar.dry.count import count as count_programs
from autopar.errors import InputError, PlanError, RuleError
from autopar.mesh import Mesh
from autopar.payoff import payoff_text
from autopar.plan import Recipe
from autopar.rules.check import check_op
from autopar.rules.registry import registered
from autopar.scale import scale
from autopar.show.code import graph_code
from autopar.show.compare import compare_text
from autopar.show.diff import diff_text
from autopar.show.page import draw
from autopar.show.scaling import scaling_text
from autopar.show.table import table_text
from autopar.show.text import plan_text
from autopar.solve.manual import Manual
from autopar.sweep import sweep, sweep_text
from autopar.verify import Verification

app = typer.Typer(
    name="autopar", help=HELP, cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_show_locals=False
)


def _wanted(manual: str | None, plan: Path | None) -> Manual | Plan | None:
    if manual is not None and plan is not None:
        raise PlanError("--manual and --plan exclude each other; give one of them")
    return Plan.load(plan) if plan is not None else read_manual(manual) if manual is not None else None


def _make_plan(
    example: Example,
    *,
    mesh: str | None,
    cluster: str | None,
    memory_limit: str | None,
    optimizer: str,
    precision: str | None,
    offload: str | None,
    pins: list[str],
    wanted: Manual | Plan | None,
    average: bool,
    compress: str | None = None,
    profile: Path | None = None,
    relief: bool = False,
    pipeline: bool = True,
    outputs: str = "whole",
) -> Plan:
    with progress() as report, hinted():
        made = (api.relieve if relief else api.plan)(
            example.model,
            read_grid(mesh, cluster),
            example.batch,
            plan=wanted,
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            compress=compress,
            memory_limit=memory_limit,
            constraints=[read_pin(text) for text in pins],
            profile=MachineProfile.load(profile) if profile is not None else None,
            outputs=outputs,
            pipeline=pipeline,
            average_microbatches=average,
            report=report,
        )
    return made if isinstance(made, Plan) else print_reliefs(made, width())


@app.command("plan")
def plan_command(
    model: ModelName,
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
    outputs: Outputs = "whole",
    profile: ProfileFile = None,
    relief: Annotated[bool, typer.Option("--relief", help="try what would make it fit, or what pins cost, and print the prices")] = False,
    compressions: Annotated[bool, typer.Option("--compressions", help="also print what compressing gradients would save")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="save the plan as JSON")] = None,
    dot: DotFile = None,
    html: HtmlFile = None,
    trace: TraceFile = None,
    code: Annotated[Path | None, typer.Option("--code", help="write the annotated graph as Python")] = None,
) -> None:
    """Plan a model for a grid of devices, and print the plan."""
    example = load_example(model, batch=batch, sequence=sequence, real=real)
    made = _make_plan(
        example,
        mesh=mesh,
        cluster=cluster,
        memory_limit=memory_limit,
        optimizer=optimizer,
        precision=precision,
        offload=offload,
        compress=compress,
        pins=pin,
        wanted=_wanted(manual, None),
        average=average,
        profile=profile,
        relief=relief,
        pipeline=not no_pipeline,
        outputs=outputs,
    )
    print(plan_text(made, width()))
    if compressions:
        print(f"\n{payoff_text(made.compressions(), width())}")
    if out is not None:
        replace(made, source=Recipe(model, batch, sequence, real, outputs)).save(out)
    write_pictures(made, dot, html, trace)
    if code is not None:
        code.write_text(graph_code(made.graph))


@app.command()
def show(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="a saved plan", show_default=False)],
    dot: DotFile = None,
    html: HtmlFile = None,
    trace: TraceFile = None,
    module: Annotated[str, typer.Option("--module", metavar="PREFIX", help="only what lies under this module path")] = "",
    stage: Annotated[int | None, typer.Option("--stage", help="only what this pipeline stage has")] = None,
    diff: Annotated[Path | None, typer.Option("--diff", metavar="OTHER.JSON", help="what another does otherwise, at what cost")] = None,
) -> None:
    """Print a saved plan, or what changes from it to another."""
    loaded = part_of_plan(Plan.load(plan), module, stage)
    write_pictures(loaded, dot, html, trace)
    print(plan_text(loaded, width()) if diff is None else diff_text(loaded, part_of_plan(Plan.load(diff), module, stage), width()))


@app.command()
def compare(
    model: ModelName,
    against: Annotated[
        list[str],
        typer.Option("--against", metavar="NAME:DP=..", help="a configuration, such as megatron:dp=2,tp=4,zero=1; repeat it"),
    ] = [],  # noqa: B006
    megatron: Annotated[list[str], typer.Option(metavar="ARGUMENTS|FILE", help="Megatron-LM arguments, or a launch script")] = [],  # noqa: B006
    torchtitan: Annotated[list[str], typer.Option(metavar="FILE", help="a TOML of torchtitan")] = [],  # noqa: B006
    deepspeed: Annotated[list[str], typer.Option(metavar="FILE", help="a JSON of DeepSpeed")] = [],  # noqa: B006
    nemo: Annotated[list[str], typer.Option(metavar="FILE", help="a YAML of NeMo")] = [],  # noqa: B006
    nanotron: Annotated[list[str], typer.Option(metavar="FILE", help="a YAML of nanotron")] = [],  # noqa: B006
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
    average: Average = False,
    profile: ProfileFile = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a page with all rows and their plans")] = None,
) -> None:
    """Compare the automatic plan with hand-written configurations, by prediction."""
    configs = read_configs(against)
    grid = read_grid(mesh, cluster)
    given = dict(zip(READERS, (megatron, torchtitan, deepspeed, nemo, nanotron), strict=True))
    if not configs and not any(given.values()):
        raise InputError(f"say what to compare with: --against dp=2,tp=4, or --{', --'.join(given)} with a configuration of that system")
    example = load_example(model, batch=batch, sequence=sequence, real=real)
    imports = read_imports(given, grid if isinstance(grid, int) else grid.num_ranks, example.batch, taken=configs)
    with progress() as report:
        rows = api.compare(
            example.model,
            grid,
            example.batch,
            configs | imports.configs,
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            compress=compress,
            memory_limit=memory_limit,
            profile=MachineProfile.load(profile) if profile is not None else None,
            average_microbatches=average,
            report=report,
        )
    rows += imports.refused
    print(compare_text(rows, width()))
    if html is not None:
        draw(rows, html)
    if any(row.is_short_of_memory for row in rows):
        print(HINT)


@app.command("sweep")
def sweep_command(
    model: ModelName,
    mesh: MeshText = None,
    cluster: ClusterText = None,
    batch: BatchSize = 32,
    sequence: Sequence = 1024,
    real: Real = False,
    memory_limit: MemoryLimit = None,
    optimizer: Optimizer = "adamw",
    precision: InPrecision = None,
    offload: ToHost = None,
    outputs: Outputs = "whole",
    plot: Annotated[Path | None, typer.Option("--plot", help="draw time against memory: .svg or .png")] = None,
) -> None:
    """Price every 3D configuration that could be written by hand, beside the automatic plan."""
    grid = read_grid(mesh, cluster)
    example = load_example(model, batch=batch, sequence=sequence, real=real)
    with progress() as report, hinted():
        found = sweep(
            example.model,
            grid,
            example.batch,
            memory_limit=memory_limit,
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            outputs=outputs,
            report=report,
        )
    print(sweep_text(found, width()))
    if plot is not None:
        found.plot(plot)


@app.command("scale")
def scale_command(
    model: ModelName,
    cluster: Annotated[str, typer.Option("--cluster", help="4x8:h100 (nodes x devices : device); its nodes are those of --sizes")],
    sizes: Annotated[str, typer.Option("--sizes", metavar="1,2,4", help="numbers of nodes, increasing")],
    batch: BatchSize = 32,
    sequence: Sequence = 1024,
    real: Real = False,
    weak: Annotated[bool, typer.Option("--weak", help="--batch is that of the first size, and grows with the nodes")] = False,
    tokens: Annotated[str | None, typer.Option("--tokens", help="budget of training: 300B, for GPU-hours and days")] = None,
    price: Annotated[float | None, typer.Option("--price", help="of one hour of one device")] = None,
    noise_scale: Annotated[
        str | None, typer.Option("--noise-scale", help="of the gradient, in tokens (the critical batch size): 2M")
    ] = None,
    memory_limit: MemoryLimit = None,
    optimizer: Optimizer = "adamw",
    precision: InPrecision = None,
    offload: ToHost = None,
    average: Average = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw time, GPU-hours and efficiency: .svg or .png")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print rows as JSON instead of a table")] = False,
) -> None:
    """Plan for clusters of several sizes: time, GPU-hours and efficiency against the number of devices."""
    read = {name: read_count(text) if text is not None else None for name, text in (("tokens", tokens), ("noise", noise_scale))}
    numbers, described = read_sizes(sizes), read_cluster(cluster)
    example = load_example(model, batch=batch, sequence=sequence, real=real)
    with progress() as report:
        found = scale(
            example.model,
            described,
            numbers,
            example.batch,
            weak=weak,
            tokens=read["tokens"],
            price_per_gpu_hour=price,
            noise_scale_tokens=read["noise"],
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            memory_limit=memory_limit,
            average_microbatches=average,
            report=report,
        )
    print(found.to_json() if as_json else scaling_text(found, width()))
    if plot is not None:
        found.plot(plot)


@app.command()
def verify(
    model: ModelName,
    mesh: MeshText = None,
    cluster: ClusterText = None,
    batch: BatchSize = 8,
    sequence: Sequence = 32,
    manual: ManualText = None,
    plan: PlanFile = None,
    average: Average = False,
    tolerance: Annotated[float, typer.Option("--tolerance", help="largest relative error that is still right")] = 1e-4,
) -> None:
    """Run a plan on virtual ranks in this process, forward and backward, and compare with the model itself.

    The model is built with real weights on the CPU. Exit code 1 if an error is larger than the tolerance.
    """
    example = load_example(model, batch=batch, sequence=sequence, real=True)
    with progress() as report:
        found: Verification = api.verify(
            example.model,
            read_grid(mesh, cluster),
            example.batch,
            _wanted(manual, plan),
            average_microbatches=average,
            report=report,
        )
    print(found)
    worst = max(found.loss_error, found.output_error, found.grad_error)
    if not worst <= tolerance:
        raise PlanError(f"the plan is wrong: error {worst:.1e} is larger than --tolerance {tolerance:.1e}")


@app.command()
def check(
    plan: PlanJson,
    rank: Annotated[list[int], typer.Option("--rank", help="a rank to check with all that it talks to; repeat it; default: all")] = [],  # noqa: B006
    model: ModelOf = None,
    outputs: OutputsOf = None,
) -> None:
    """Build the programs of a plan's ranks without devices, and check shapes, communication and memory.

    Exit code 1 if anything is found.
    """
    made, example, wanted = load_planned(plan, model=model, outputs=outputs)
    with progress() as report:
        found = check_programs(example.model, made, example.batch, outputs=wanted, ranks=rank or None, report=report)
    print(found)
    if found.findings:
        raise PlanError(f"{len(found.findings)} findings")


@app.command()
def count(
    plan: PlanJson,
    json: Annotated[bool, typer.Option("--json", help="machine-readable")] = False,
    model: ModelOf = None,
    outputs: OutputsOf = None,
) -> None:
    """Count flops, communication and memory of a step on every rank, in the graphs that the ranks run."""
    made, example, wanted = load_planned(plan, model=model, outputs=outputs)
    with progress() as report:
        counted = count_programs(example.model, made, example.batch, outputs=wanted, report=report)
    print(counted.to_json() if json else counted_text(counted, width()))


@app.command()
def explain(
    model: ModelName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a parameter, or an op by the name of its node", show_default=False)],
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
) -> None:
    """Say why a parameter or an op lies as it does: the alternatives and their prices."""
    example = load_example(model, batch=batch, sequence=sequence, real=real)
    made = _make_plan(
        example,
        mesh=mesh,
        cluster=cluster,
        memory_limit=memory_limit,
        optimizer=optimizer,
        precision=precision,
        offload=offload,
        pins=pin,
        wanted=None,
        average=average,
    )
    print(made.explain(name, formula=formula))


@app.command()
def profile(
    mesh: Annotated[
        str | None, typer.Option("--mesh", "--ranks", help="4, 2x2 or dp=2,tp=2; default: all CUDA devices, else 4 ranks")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="save the profile as JSON")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="measure again what is in the cache")] = False,
) -> None:
    """Measure this machine: matmuls, memory, and collectives by message size.

    Ranks are started here, or are those of torchrun: torchrun --nproc-per-node 4 -m autopar profile. The result is also kept in the
    user's cache, where parallelize looks for it.
    """
    grid = read_mesh(mesh) if mesh is not None else None
    measured = profile_machine(Mesh.of(grid) if isinstance(grid, int) else grid, refresh=refresh)
    if measured is None:
        return
    print(profile_text(measured, width()))
    if out is not None:
        measured.save(out)


@app.command()
def rules(
    op: Annotated[str | None, typer.Argument(metavar="[OP]", help="linear, aten.linear or aten.linear.default")] = None,
    check: Annotated[bool, typer.Option("--check", help="prove the rules by brute force on small tensors")] = False,
) -> None:
    """List the rules of ops, or prove them: whole against shards, forward and backward."""
    chosen = {found: entry for found, entry in registered().items() if op is None or is_called(found, op)}
    if op is not None and not chosen:
        names = sorted({str(found).split(".")[1] for found in registered() if "." in str(found)})
        near = difflib.get_close_matches(op.split(".")[-1], names)
        raise RuleError(f"no op {op!r} has a rule" + (f"; did you mean {', '.join(near)}?" if near else "; `autopar rules` lists all"))
    if not check:
        print(table_text(("op", "rule"), rule_lines(chosen), width=width(), wide=("rule",)))
        return
    findings = []
    with progress() as report:
        for number, found in enumerate(chosen):
            report(f"checking {found} ({number + 1} of {len(chosen)})")
            findings += check_op(found)
    for finding in findings:
        print(finding)
    if findings:
        raise RuleError(f"{len(findings)} findings in {len(chosen)} ops")
    print(f"{len(chosen)} ops checked, nothing wrong and nothing missing")


def main() -> None:
    """The console entry."""
    app()
