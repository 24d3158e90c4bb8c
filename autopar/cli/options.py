"""Arguments and options that commands share, with how the shell completes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import complete
from autopar.errors import PlanError
from autopar.show.files import check_figure, check_page

JSON_FILES = complete.files(".json")
JSON_MODE = "autopar.json"
"""Where the context of a call says that it is to print JSON."""


def _noted(context: typer.Context, value: bool) -> bool:
    """Whoever shows the errors of a command has to know too."""
    context.meta[JSON_MODE] = value
    return value


def given_sizes(context: typer.Context) -> list[str]:
    """Which options of a call say how large a batch is, and were given."""
    named = {"batch": "--batch", "sequence": "--sequence"}
    sources = {name: context.get_parameter_source(name) for name in named}
    return [option for name, option in named.items() if (source := sources[name]) is not None and source.name == "COMMANDLINE"]


OPTIMIZERS = (
    *("adamw", "adamw_fused", "adamw_master", "adamw_amsgrad", "adam", "adam_fused", "adam_amsgrad", "sgd_momentum", "adafactor", "sgd"),
    *("nadam", "radam", "adamax", "adadelta", "adagrad", "adagrad_fused", "rmsprop", "rmsprop_momentum", "rmsprop_centered", "asgd"),
)

ModelName = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="module:function or hf:NAME", show_default=False, autocompletion=complete.model),
]
Gpt = Annotated[
    str | None,
    typer.Option(
        "--gpt",
        metavar="LAYERS=..,HIDDEN=..",
        help="in place of MODEL, a GPT-2 of these sizes: layers=24,hidden=2048,heads=16,vocab=50304",
        autocompletion=complete.gpt,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document instead of text; errors as JSON on stderr", callback=_noted)]
MeshText = Annotated[str | None, typer.Option("--mesh", help="8 (ranks), 2x4 or dp=2,tp=4; with --cluster it regroups its ranks")]
ClusterText = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="4x8:h100 (nodes x devices : device), 4x8:a100-80gb+2x8:h100, a saved file, or local: this machine, measured",
        autocompletion=complete.cluster,
    ),
]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="rows of the global batch, if module:function returns none of its own")]
Sequence = Annotated[int, typer.Option("--sequence", min=1, help="tokens per row")]
Real = Annotated[bool, typer.Option("--real", help="build real random weights instead of meta tensors")]
MemoryLimit = Annotated[str | None, typer.Option("--memory-limit", help="per rank, for example 10GiB")]
Optimizer = Annotated[
    str,
    typer.Option("--optimizer", help=f"{', '.join(OPTIMIZERS)}: bytes of its state", autocompletion=complete.one_of(*OPTIMIZERS)),
]
InPrecision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="what the model computes in, with parameters as they are: bf16, bf16/bf16, fp16 or fp32",
        autocompletion=complete.one_of("bf16", "bf16/bf16", "fp16", "fp32"),
    ),
]
ToHost = Annotated[
    str | None,
    typer.Option(
        "--offload",
        help="on the host: optimizer, parameters, activations, joined by +; auto: where nothing fits without",
        autocompletion=complete.joined("auto", "optimizer", "parameters", "activations"),
    ),
]
Compress = Annotated[
    str | None,
    typer.Option(
        "--compress",
        help="gradients travel compressed, which is lossy: bf16, fp16, int8, topk:0.01 or powersgd:4; powersgd:4 after 100",
        autocompletion=complete.one_of("bf16", "fp16", "int8", "topk:0.01", "powersgd:4"),
    ),
]
Pins = Annotated[list[str], typer.Option("--pin", metavar="PATTERN:AXIS=LAYOUT", help="fix layouts: 'h.*.c_attn.weight:tp=S1.1'")]
ManualText = Annotated[
    str | None, typer.Option("--manual", help="a hand-written configuration: dp=2,tp=4,zero=1", autocompletion=complete.manual)
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="a saved plan instead of a new one", autocompletion=JSON_FILES)]
ProfileFile = Annotated[
    Path | None, typer.Option("--profile", help="prices that `autopar profile --out` wrote", autocompletion=JSON_FILES)
]
Average = Annotated[
    bool, typer.Option("--average-microbatches", help="where the batch must be whole, allow micro-batches that are batches of their own")
]
NoPipeline = Annotated[bool, typer.Option("--no-pipeline", help="no pipeline stages")]
Complete = Annotated[bool, typer.Option("--complete", help="also try what is likely, and not proved, to be slower")]
Outputs = Annotated[
    str,
    typer.Option(
        "--outputs",
        help="whole, or loss: give back no outputs but scalars, which saves gathering them",
        autocompletion=complete.one_of("whole", "loss"),
    ),
]
PlanJson = Annotated[
    Path, typer.Argument(metavar="PLAN.JSON", help="a saved plan", show_default=False, autocompletion=JSON_FILES)
]
ModelOf = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="what the plan is for, where it does not say so itself", autocompletion=complete.model
    ),
]
OutputsOf = Annotated[
    str | None,
    typer.Option(
        "--outputs", help="whole or loss, where the plan does not say so itself", autocompletion=complete.one_of("whole", "loss")
    ),
]
def writable(value: Path | None) -> Path | None:
    """Said before the work, and not after it."""
    if value is not None and value.is_dir():
        raise typer.BadParameter(f"there is a folder at {value}; name a file")
    if value is not None and not value.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {value.parent} for {value.name}")
    return value


def figure(value: Path | None) -> Path | None:
    """As `writable`, of what matplotlib draws."""
    return _called(value, check_figure)


def page(value: Path | None) -> Path | None:
    """As `writable`, of a page of rows."""
    return _called(value, check_page)


def _called(value: Path | None, check: Callable[[Path], None]) -> Path | None:
    if writable(value) is not None and value is not None:
        try:
            check(value)
        except PlanError as error:
            raise typer.BadParameter(str(error)) from error
    return value


HtmlFile = Annotated[
    Path | None, typer.Option("--html", help="write a page to look at it on, which opens without a network", callback=writable)
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="write the simulated step for ui.perfetto.dev", callback=writable)]
DotFile = Annotated[Path | None, typer.Option("--dot", help="write a Graphviz picture", callback=writable)]


def chosen_model(model: str | None, gpt: str | None) -> str:
    """What is to be built, in one text that a plan can keep.

    Raises:
        BadParameter: nothing is named, or two things are.
    """
    if model is not None and gpt is not None:
        raise typer.BadParameter(f"MODEL {model!r} and --gpt {gpt!r} exclude each other; name one of them")
    if model is None and gpt is None:
        raise typer.BadParameter("say what to plan: MODEL as module:function or hf:gpt2, or --gpt layers=12,hidden=768,heads=12")
    return model if model is not None else f"gpt:{gpt}"
