"""A plan as a Graphviz picture: parameters are boxes, ops are ellipses, and each block of the model is a frame around its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from shutil import which
from subprocess import run

from autopar.errors import PlanError
from autopar.plan import OpPlan, ParameterPlan, Plan
from autopar.show.text import factors_text, op_name, shape_text
from autopar.units import bytes_text, seconds_text


def block_of(module: str) -> str:
    """The frame of a module path: ``transformer.h.3`` for ``transformer.h.3.attn.c_attn``, else its first name."""
    parts = module.split(".")
    end = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[: end + 1])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _parameter_line(entry: ParameterPlan) -> str:
    held = " ".join(entry.held)
    label = f"{entry.name}\n{factors_text(entry.factors)}\n[{held}] {shape_text(entry.local_shape)}, {bytes_text(entry.num_bytes)}"
    return f"{_quoted(entry.name)} [shape=box, style=filled, fillcolor=lightgrey, label={_quoted(label)}];"


def _op_line(op: OpPlan) -> str:
    label = f"{op_name(op.op)}\n[{' '.join(op.choices)}] -> [{' '.join(op.layout)}]"
    if op.time_s:
        label += f"\n{seconds_text(op.time_s)}"
    tooltip = "\n".join(part for part in (op.module, op.line, op.rule, shape_text(op.shape)) if part)
    return f"{_quoted(op.name)} [shape=ellipse, label={_quoted(label)}, tooltip={_quoted(tooltip)}];"


def _edges(plan: Plan) -> Iterator[str]:
    known = {op.name for op in plan.ops} | {entry.name for entry in plan.parameters}
    inputs: dict[str, None] = {}
    for op in plan.ops:
        for source in dict.fromkeys(op.inputs):
            if source not in known:
                inputs[source] = None
            yield f"  {_quoted(source)} -> {_quoted(op.name)};"
    yield from (f"  {_quoted(name)} [shape=plaintext];" for name in inputs)


def plan_dot(plan: Plan) -> str:
    """The text of a ``.dot`` file; ``dot -Tsvg plan.dot`` draws it."""
    blocks: dict[str, list[str]] = {}
    for entry in plan.parameters:
        blocks.setdefault(block_of(entry.name.rpartition(".")[0]), []).append(_parameter_line(entry))
    for op in plan.ops:
        blocks.setdefault(block_of(op.module), []).append(_op_line(op))
    title = f"{plan.model} on mesh {plan.grid}: {plan.config or 'automatic'}"
    lines = ["digraph plan {", f"  graph [label={_quoted(title)}, labelloc=t, fontname=Helvetica, compound=true];"]
    lines.append("  node [fontname=Helvetica, fontsize=10];")
    for number, (block, members) in enumerate(blocks.items()):
        if not block:
            lines += [f"  {line}" for line in members]
            continue
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(block)};"]
        lines += [f"    {line}" for line in members]
        lines.append("  }")
    return "\n".join([*lines, *_edges(plan), "}"]) + "\n"


def graph_svg(plan: Plan) -> str:
    """What Graphviz draws of `plan_dot`.

    Raises:
        PlanError: ``dot`` is not installed, or fails.
    """
    program = which("dot")
    if program is None:
        raise PlanError(
            "the picture of the graph is drawn by `dot` of Graphviz, which is not installed: install the package graphviz of your system, "
            "or use plan.to_html(path), which needs nothing; views 'timeline' and 'memory' need nothing either"
        )
    done = run([program, "-Tsvg"], input=plan_dot(plan), capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise PlanError(f"{program} -Tsvg failed with exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
