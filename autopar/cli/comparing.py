"""``autopar compare``, ``sweep`` and ``scale``: many plans of one model, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli import complete
from autopar.cli.figures import figures, json_text
from autopar.cli.lazy import Lazy
from autopar.cli.options import (
    AsJson,
    Average,
    BatchSize,
    ClusterText,
    Compress,
    Gpt,
    InPrecision,
    MemoryLimit,
    MeshText,
    ModelName,
    Optimizer,
    Outputs,
    ProfileFile,
    Real,
    Sequence,
    ToHost,
    chosen_model,
    figure,
    given_sizes,
    page,
)
from autopar.cli.progress import progress, width
from autopar.errors import InputError

if TYPE_CHECKING:
    from autopar.cli import work
else:
    work = Lazy("autopar.cli.work")


def compare(
    context: typer.Context,
    model: ModelName = None,
    gpt: Gpt = None,
    against: Annotated[
        list[str],
        typer.Option(
            "--against",
            metavar="NAME:DP=..",
            help="a configuration, such as megatron:dp=2,tp=4,zero=1; repeat it",
            autocompletion=complete.manual,
        ),
    ] = [],  # noqa: B006
    megatron: Annotated[
        list[str],
        typer.Option(metavar="ARGUMENTS|FILE", help="Megatron-LM arguments, or a launch script", autocompletion=complete.files(".sh")),
    ] = [],  # noqa: B006
    torchtitan: Annotated[
        list[str], typer.Option(metavar="FILE", help="a TOML of torchtitan", autocompletion=complete.files(".toml"))
    ] = [],  # noqa: B006
    deepspeed: Annotated[
        list[str], typer.Option(metavar="FILE", help="a JSON of DeepSpeed", autocompletion=complete.files(".json"))
    ] = [],  # noqa: B006
    nemo: Annotated[
        list[str], typer.Option(metavar="FILE", help="a YAML of NeMo", autocompletion=complete.files(".yaml", ".yml"))
    ] = [],  # noqa: B006
    nanotron: Annotated[
        list[str], typer.Option(metavar="FILE", help="a YAML of nanotron", autocompletion=complete.files(".yaml", ".yml"))
    ] = [],  # noqa: B006
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
    outputs: Outputs = "whole",
    profile: ProfileFile = None,
    html: Annotated[Path | None, typer.Option("--html", help="write a page with all rows and their plans", callback=page)] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the automatic plan with hand-written configurations, by prediction."""
    configs = work.read_configs(against)
    grid = work.read_grid(mesh, cluster)
    given = dict(zip(work.READERS, (megatron, torchtitan, deepspeed, nemo, nanotron), strict=True))
    if not configs and not any(given.values()):
        raise InputError(f"say what to compare with: --against dp=2,tp=4, or --{', --'.join(given)} with a configuration of that system")
    example = work.load_example(chosen_model(model, gpt), batch=batch, sequence=sequence, real=real, given=given_sizes(context))
    imports = work.read_imports(given, grid if isinstance(grid, int) else grid.num_ranks, example.batch, taken=configs)
    with progress() as report:
        rows = work.api.compare(
            example.model,
            grid,
            example.batch,
            configs | imports.configs,
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            compress=compress,
            memory_limit=memory_limit,
            profile=work.MachineProfile.load(profile) if profile is not None else None,
            average_microbatches=average,
            outputs=outputs,
            report=report,
        )
    rows += imports.refused
    print(json_text({"rows": [_row_data(row) for row in rows]}) if as_json else work.compare_text(rows, width()))
    if html is not None:
        work.draw(rows, html)
    if any(row.is_short_of_memory for row in rows) and not as_json:
        print(work.HINT)


def _row_data(row: work.Row) -> dict[str, Any]:
    names = ("name", "fits", "reason", "is_short_of_memory", "layout", "num_ranks", "step_time_s", "measured_step_time_s", "tokens_per_s")
    more = ("tokens_per_s_per_gpu", "mfu", "bubble_fraction", "exposed_comm_s", "exposed_by_kind_s", "peak_memory_bytes")
    return figures(row, *names, *more, "moved_bytes", "bytes_by_axis", "bytes_by_level")


def sweep(
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
    outputs: Outputs = "whole",
    plot: Annotated[Path | None, typer.Option("--plot", help="draw time against memory: .svg, .png or .pdf", callback=figure)] = None,
    as_json: AsJson = False,
) -> None:
    """Price every configuration that could be written by hand, beside the automatic plan.

    With --json all of them are told, the table has the fastest.
    """
    grid = work.read_grid(mesh, cluster)
    example = work.load_example(chosen_model(model, gpt), batch=batch, sequence=sequence, real=real, given=given_sizes(context))
    with progress() as report, work.hinted():
        found = work.sweep(
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
    print(json_text(_sweep_data(found)) if as_json else work.sweep_text(found, width()))
    if plot is not None:
        found.plot(plot)


def _sweep_data(found: work.Sweep) -> dict[str, Any]:
    auto = figures(found.auto.prediction, "step_time_s", "bubble_fraction", "peak_memory_bytes")
    return {"automatic": {"grid": found.auto.grid, **auto}, "configurations": found.points, "left_out": dict(found.left)}


def scale(
    context: typer.Context,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", help="4x8:h100 (nodes x devices : device); its nodes are those of --sizes", autocompletion=complete.cluster
        ),
    ],
    sizes: Annotated[str, typer.Option("--sizes", metavar="1,2,4", help="numbers of nodes, increasing")],
    model: ModelName = None,
    gpt: Gpt = None,
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
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw time, GPU-hours and efficiency: .svg, .png or .pdf", callback=figure)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan for clusters of several sizes: time, GPU-hours and efficiency against the number of devices."""
    read = {name: work.read_count(text) if text is not None else None for name, text in (("tokens", tokens), ("noise", noise_scale))}
    numbers, described = work.read_sizes(sizes), work.read_cluster(cluster)
    example = work.load_example(chosen_model(model, gpt), batch=batch, sequence=sequence, real=real, given=given_sizes(context))
    with progress() as report:
        found = work.scale(
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
    print(found.to_json() if as_json else work.scaling_text(found, width()))
    if plot is not None:
        found.plot(plot)
