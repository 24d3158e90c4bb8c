"""Arguments and options that commands share, and what they all show: the phase on stderr, and tables as wide as the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="module:function or hf:NAME", show_default=False)]
MeshText = Annotated[str | None, typer.Option("--mesh", help="8 (ranks), 2x4 or dp=2,tp=4; with --cluster it regroups its ranks")]
ClusterText = Annotated[
    str | None, typer.Option("--cluster", help="4x8:h100 (nodes x devices : device), 4x8:a100-80gb+2x8:h100, or a saved file")
]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="rows of the global batch")]
Sequence = Annotated[int, typer.Option("--sequence", min=1, help="tokens per row")]
Real = Annotated[bool, typer.Option("--real", help="build real random weights instead of meta tensors")]
MemoryLimit = Annotated[str | None, typer.Option("--memory-limit", help="per rank, for example 10GiB")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="adamw, adam, sgd_momentum or sgd: bytes of its state")]
InPrecision = Annotated[
    str | None, typer.Option("--precision", help="what the model computes in, with parameters as they are: bf16, bf16/bf16, fp16 or fp32")
]
ToHost = Annotated[
    str | None,
    typer.Option("--offload", help="on the host: optimizer, parameters, activations, joined by +; auto: where nothing fits without"),
]
Compress = Annotated[
    str | None, typer.Option("--compress", help="gradients travel compressed, which is lossy: bf16, fp16, int8, topk:0.01 or powersgd:4")
]
Pins = Annotated[list[str], typer.Option("--pin", metavar="PATTERN:AXIS=LAYOUT", help="fix layouts: 'h.*.c_attn.weight:tp=S1.1'")]
ManualText = Annotated[str | None, typer.Option("--manual", help="a hand-written configuration: dp=2,tp=4,zero=1")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="a saved plan instead of a new one")]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="prices that `autopar profile --out` wrote")]
Average = Annotated[
    bool, typer.Option("--average-microbatches", help="where the batch must be whole, allow micro-batches that are batches of their own")
]
NoPipeline = Annotated[bool, typer.Option("--no-pipeline", help="no pipeline stages")]
Outputs = Annotated[str, typer.Option("--outputs", help="whole, or loss: give back no outputs but scalars, which saves gathering them")]
PlanJson = Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="a saved plan", show_default=False)]
ModelOf = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="what the plan is for, where it does not say so itself")]
OutputsOf = Annotated[str | None, typer.Option("--outputs", help="whole or loss, where the plan does not say so itself")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="write a page to look at it on, which opens without a network")]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="write the simulated step for ui.perfetto.dev")]
DotFile = Annotated[Path | None, typer.Option("--dot", help="write a Graphviz picture")]


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A status line on stderr that names the phase; nothing where stderr is not a terminal."""
    with Console(stderr=True).status("capturing") as status:
        yield lambda text: status.update(text.replace("[", r"\["))


def width() -> int:
    return max(80, min(Console().width, 160)) if sys.stdout.isatty() else 100
