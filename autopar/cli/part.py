"""The part of a plan that `autopar show` is to show, and its pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.errors import PlanError
from autopar.planner.document import Plan
from autopar.show.collectives import by_value
from autopar.show.levels import LevelTraffic, sent_by_level


def part_of_plan(plan: Plan, module: str = "", stage: int | None = None) -> Plan:
    """The part of a plan that lies under a module path, or in a pipeline stage; figures of the whole stay.

    Raises:
        PlanError: there is nothing.
    """
    if not module and stage is None:
        return plan
    if stage is not None and not 0 <= stage < plan.pipeline.stages:
        raise PlanError(f"the plan has no stage {stage}; its stages are 0 to {plan.pipeline.stages - 1}")

    def is_under(path: str) -> bool:
        return not module or path == module or path.startswith(f"{module}.")

    parameters = tuple(p for p in plan.parameters if is_under(p.name) and (stage is None or stage in p.stages))
    ops = tuple(op for op in plan.ops if is_under(op.module) and stage in (None, op.stage))
    if not parameters and not ops:
        first = sorted({p.name.partition(".")[0] for p in plan.parameters} | {op.module.partition(".")[0] for op in plan.ops} - {""})
        where = f" of stage {stage}" if stage is not None else ""
        raise PlanError(f"the plan has nothing under module {module!r}{where}; its modules begin with {', '.join(first)}")
    own = by_value(plan)
    collectives = [c for op in ops for c in own.get(op.name, ())] + [c for p in parameters for c in own.get(p.name, ())]
    # links tell what a rank sends, messages between stages too, of a whole plan; `sent_by_part` those of a part
    return replace(plan, parameters=parameters, ops=ops, collectives=tuple(collectives), links=())


def sent_by_part(plan: Plan, part: Plan, module: str = "", stage: int | None = None) -> list[LevelTraffic]:
    """What the `part_of_plan` sends by level of links: of a stage in the mean of its ranks, and with its messages; a module has none."""
    return sent_by_level(replace(part, links=plan.links), stage=stage, has_messages=not module)


def write_pictures(plan: Plan, dot: Path | None, html: Path | None, trace: Path | None, record: Path | None = None) -> None:
    """Each in the file that was asked for, with recorded steps where they are shown.

    Raises:
        PlanError: the record is not of this plan, or is shown nowhere.
    """
    if record is not None and html is None and trace is None:
        raise PlanError(f"--record {record} is shown on a page or in a trace: add --html FILE or --trace FILE")
    if dot is not None:
        plan.to_dot(dot)
    if html is not None:
        plan.to_html(html, record=record)
    if trace is not None:
        plan.to_trace(trace, record=record)
