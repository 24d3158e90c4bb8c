"""``autopar show``: a saved plan, or what changes from it to another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.figures import json_text
from autopar.cli.lazy import Lazy
from autopar.cli.options import JSON_FILES, AsJson, DotFile, HtmlFile, PlanJson, TraceFile
from autopar.cli.progress import width

if TYPE_CHECKING:
    from autopar.cli import work
else:
    work = Lazy("autopar.cli.work")


def show(
    plan: PlanJson,
    dot: DotFile = None,
    html: HtmlFile = None,
    trace: TraceFile = None,
    module: Annotated[str, typer.Option("--module", metavar="PREFIX", help="only what lies under this module path")] = "",
    stage: Annotated[int | None, typer.Option("--stage", help="only what this pipeline stage has")] = None,
    diff: Annotated[
        Path | None,
        typer.Option(
            "--diff", metavar="OTHER.JSON", help="what another does otherwise, at what cost", autocompletion=JSON_FILES
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", metavar="RECORD.JSON", help="steps that record.save wrote, for --html and --trace", autocompletion=JSON_FILES
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a saved plan, or what changes from it to another."""
    whole = work.Plan.load(plan)
    loaded = work.part_of_plan(whole, module, stage)
    work.write_pictures(loaded, dot, html, trace, record)
    if diff is None:
        sent = work.sent_by_part(whole, loaded, module, stage)
        print(json_text(json.loads(loaded.to_json())) if as_json else work.plan_text(loaded, width(), sent=sent))
        return
    other = work.part_of_plan(work.Plan.load(diff), module, stage)
    print(json_text(work.diff_data(loaded, other)) if as_json else work.diff_text(loaded, other, width()))
