"""``autopar check`` and ``autopar count``: a saved plan back to its model, and what was counted as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from autopar.cli.inputs import Example, load_example
from autopar.dry.count import Counted
from autopar.errors import PlanError
from autopar.plan import Recipe
from autopar.planner.document import Plan
from autopar.show.table import table_text
from autopar.units import bytes_text, count_text, number_text


class Planned(NamedTuple):
    """A saved plan with the model that it was made for."""

    plan: Plan
    example: Example
    outputs: str


def load_planned(path: Path, *, model: str | None, outputs: str | None, real: bool = False) -> Planned:
    """Build the model of a plan again, as the plan says or as asked.

    Args:
        path: of the plan.
        model: names the model, for plans that do not say what it is.
        outputs: as for `autopar.plan`; by default as the plan says.
        real: with real random weights, also where the plan does not need them.

    Raises:
        PlanError: neither the plan nor ``model`` names the model.
        InputError: there is no such model.
    """
    plan = Plan.load(path)
    recipe = plan.source
    if recipe is None and model is None:
        raise PlanError(
            f"{path} does not say how its model ({plan.model}) is built, since it was not made by `autopar plan --out`; "
            "name the model with --model module:function or --model hf:NAME"
        )
    if recipe is None:
        assert model is not None
        recipe = Recipe(model, *_batch_and_sequence(plan.batch))
    recipe = replace(recipe, model=model or recipe.model, outputs=outputs or recipe.outputs)
    example = load_example(recipe.model, batch=recipe.batch, sequence=recipe.sequence, real=real or recipe.is_real)
    return Planned(plan, example, recipe.outputs)


def _batch_and_sequence(batch: Mapping[str, str]) -> tuple[int, int]:
    """Rows and tokens per row of the first input of a plan, ``int64[32, 1024]``."""
    sizes = [int(size) for size in re.findall(r"\d+", next(iter(batch.values()), "").partition("[")[2])]
    return (sizes[0] if sizes else 1), (sizes[1] if len(sizes) > 1 else 1)


def counted_text(counted: Counted, width: int) -> str:
    """Flops, memory and traffic of a rank at each position of the pipeline, as tables."""
    rows, moved = [], []
    for row in counted.positions:
        first = str(row.position)
        rows.append((first, str(len(row.ranks)), str(len(row.stages)), count_text(row.flops), bytes_text(row.peak_memory_bytes)))
        for t in row.traffic:
            moved.append((first, t.kind, t.axis, str(t.group_size), str(t.count), bytes_text(t.num_bytes)))
    ranks, parts = number_text(counted.num_ranks, "rank"), number_text(counted.microbatches, "micro-batch", "micro-batches")
    head = f"{counted.model} on mesh {counted.grid} ({ranks}), {parts}, per rank and step"
    figures = table_text((">position", ">ranks", ">stages", ">flops", ">peak memory"), rows, width=width)
    traffic = table_text((">position", "kind", "axis", ">of", ">count", ">bytes"), moved, width=width)
    return f"{head}\n\n{figures}\n\n{traffic}\n\nall ranks: {count_text(counted.total_flops)} flops"
