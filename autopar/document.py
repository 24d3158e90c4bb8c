"""The plan as users meet it: it prints as a table, draws, explains itself, and knows the graph that it was made for."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import fx

from autopar.compile import Normal, local_graph
from autopar.errors import PlanError
from autopar.explain import explain_text
from autopar.formula import formula_text
from autopar.plan import Plan as PlanRecord
from autopar.show.dot import plan_dot
from autopar.show.text import plan_text
from autopar.solve.decide import Decision


@dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """`autopar.plan.Plan` with its face. ``normal`` and ``decision`` are there if it was made in this process, not if loaded."""

    normal: Normal | None = field(default=None, compare=False, repr=False)
    decision: Decision | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(record: PlanRecord, normal: Normal | None = None, decision: Decision | None = None) -> Plan:
        return Plan(**{f.name: getattr(record, f.name) for f in fields(PlanRecord)}, normal=normal, decision=decision)

    def __str__(self) -> str:
        return plan_text(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        return Plan.of(PlanRecord.from_json(text))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote; PlanError if it is not one."""
        return Plan.from_json(Path(path).read_text())

    @property
    def graph(self) -> fx.GraphModule:
        """The normal graph, every node with its layout under ``meta["layout"]``.

        Raises:
            PlanError: the plan was loaded and not yet bound to a model.
        """
        normal = self._bound()
        layouts = {op.name: " ".join(op.layout) for op in self.ops} | {p.name: " ".join(p.held) for p in self.parameters}
        for node in normal.module.graph.nodes:
            placeholder = node.meta.get("placeholder")
            layout = layouts.get(placeholder.name if placeholder else node.name)
            if layout is not None:
                node.meta["layout"] = f"[{layout}]"
        return normal.module

    def local_graph(self) -> fx.GraphModule:
        """What every rank runs before it is differentiated: local shapes, collectives as named nodes."""
        return local_graph(self._bound(), self, device=torch.device("cpu"), training=True)

    def to_dot(self, path: str | Path | None = None) -> str:
        """Graphviz text of the plan; also written to ``path`` if given."""
        text = plan_dot(self)
        if path is not None:
            Path(path).write_text(text)
        return text

    def explain(self, name: str, *, formula: bool = False) -> str:
        """Why a parameter or op lies as it does: its layout against every alternative, each with the price of the whole step.

        Args:
            name: a parameter, or an op by the name of its node.
            formula: instead, what it costs a rank as formulas in the sizes of factors and axes.

        Raises:
            PlanError: there is no such parameter or op, or the plan is not bound to a model.
        """
        self._bound()
        assert self.decision is not None
        if formula:
            return formula_text(self.decision, name)
        return explain_text(self.decision, name, limit_bytes=self.memory_limit_bytes)

    def _bound(self) -> Normal:
        if self.normal is None or self.decision is None:
            raise PlanError("this plan was loaded and knows no graph; bind it with autopar.plan(model, cluster, batch, plan=plan)")
        return self.normal
