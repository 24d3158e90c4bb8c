"""``autopar profile`` and ``autopar demo``: what this machine does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.figures import json_text
from autopar.cli.lazy import Lazy
from autopar.cli.options import AsJson, writable
from autopar.cli.progress import width

if TYPE_CHECKING:
    from autopar.cli import work
    from autopar.demo import local
else:
    work, local = Lazy("autopar.cli.work"), Lazy("autopar.demo.local")


def profile(
    mesh: Annotated[
        str | None, typer.Option("--mesh", "--ranks", help="4, 2x2 or dp=2,tp=2; default: all CUDA devices, else 4 ranks")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="save the profile as JSON", callback=writable)] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="measure again what is in the cache")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: matmuls, memory, and collectives by message size.

    Ranks are started here, or are those of torchrun: torchrun --nproc-per-node 4 -m autopar profile. The result is also kept in the
    user's cache, where parallelize and --cluster local look for it.
    """
    grid = work.read_mesh(mesh) if mesh is not None else None
    measured = work.profile_machine(work.Mesh.of(grid) if isinstance(grid, int) else grid, refresh=refresh)
    if measured is None:
        return
    print(json_text(measured) if as_json else work.profile_text(measured, width()))
    if out is not None:
        measured.save(out)


def demo(
    out: Annotated[Path, typer.Option("--out", help="folder for the report, the plan and its page")] = Path("out/demo"),
    as_json: AsJson = False,
) -> None:
    """Plan and train a small GPT-2 on four processes of this machine, beside one device and hand-written plans.

    It needs transformers (pip install 'autopar[examples]') and two to four minutes. Exit code 1 if losses differ by more than rounding.
    """
    local.check_installed()
    arguments = ["--out", str(out), *(["--json"] if as_json else [])]
    sys.stdout.flush()
    raise typer.Exit(local.start_module("autopar.demo", local.RANKS, arguments))
